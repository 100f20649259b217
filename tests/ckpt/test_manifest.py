"""A manifest is believed only after it was checked: it may be damaged, and it may be hostile."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mega_ckpt.manifest import (
    MANIFEST,
    Manifest,
    ManifestFileEntry,
    ManifestTensorEntry,
    TensorChunk,
    is_exact_tiling,
    make_checkpoint_manifest,
)
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset

MODEL = ModelConfig.parse(load_model_preset("tiny"))
SUM = "0" * 32


def sound() -> Manifest:
    """Two tensors, the first in two chunks, in one shard whose header takes 16 bytes."""
    first = ManifestTensorEntry(
        dtype="F32",
        shape=(4, 2),
        chunks=(
            TensorChunk(offset=(0, 0), shape=(2, 2), file="s.safetensors", begin=16, end=32, checksum=SUM),
            TensorChunk(offset=(2, 0), shape=(2, 2), file="s.safetensors", begin=32, end=48, checksum=SUM),
        ),
    )
    second = ManifestTensorEntry(
        dtype="BF16",
        shape=(3,),
        chunks=(TensorChunk(offset=(0,), shape=(3,), file="s.safetensors", begin=48, end=54, checksum=SUM),),
    )
    return make_checkpoint_manifest(
        7, MODEL, {"samples": 1 << 70, "scale": 0.1, "list": [1, None, "x"]}, {"by": "test"}
    ).model_copy(
        update={
            "files": {"s.safetensors": ManifestFileEntry(bytes=54, checksum=SUM)},
            "tensors": {"weights/a": first, "weights/b": second},
        }
    )


def signed(raw: dict[str, Any]) -> bytes:
    """A manifest with a checksum that fits, whatever it says."""
    body = json.dumps(raw).encode()[1:]
    return b'{\n "checksum": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'",\n' + body


def test_what_is_written_is_read() -> None:
    manifest = sound()
    assert Manifest.decode_json(manifest.encode_json(), Path("m")) == manifest
    plain = json.loads(manifest.encode_json())
    assert plain["tensors"]["weights/a"]["chunks"][1]["begin"] == 32
    assert next(iter(plain)) == "checksum"


def test_every_flipped_bit_and_every_truncation_is_seen() -> None:
    data = sound().encode_json()
    for position, bit in itertools.product(range(0, len(data), 3), (0, 5)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << bit
        with pytest.raises(CheckpointError, match="m: damaged"):
            Manifest.decode_json(bytes(flipped), Path("m"))
    for length in range(0, len(data), 7):
        with pytest.raises(CheckpointError, match="m: damaged"):
            Manifest.decode_json(data[:length], Path("m"))


def first_chunk(raw: dict[str, Any]) -> Any:
    return raw["tensors"]["weights/a"]["chunks"][0]


def set_entry(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        node: Any = raw
        *parents, last = path.split("|")
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        node[int(last) if isinstance(node, list) else last] = value

    return change


A = "tensors|weights/a"
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "parent folder": (set_entry("files|../s", {"bytes": 1, "checksum": SUM}), "plain name"),
    "absolute path": (set_entry("files|/etc/passwd", {"bytes": 1, "checksum": SUM}), "plain name"),
    "climbing inside": (set_entry("files|assets/../../s", {"bytes": 1, "checksum": SUM}), "plain name"),
    "backslashes": (set_entry("files|..\\s", {"bytes": 1, "checksum": SUM}), "plain name"),
    "null byte": (set_entry("files|a\0b", {"bytes": 1, "checksum": SUM}), "plain name"),
    "itself": (set_entry(f"files|{MANIFEST}", {"bytes": 1, "checksum": SUM}), "plain name"),
    "dot": (set_entry("files|.", {"bytes": 1, "checksum": SUM}), "plain name"),
    "file not listed": (set_entry(f"{A}|chunks|0|file", "../other"), "weights/a.*not a file of this checkpoint"),
    "terabyte": (set_entry(f"{A}|shape", [1 << 38, 2]), "weights/a.*are incomplete"),
    "terabyte chunk": (set_entry(f"{A}|chunks|0|shape", [1 << 38, 2]), "weights/a.*exceeds"),
    "shape that overflows": (set_entry(f"{A}|shape", [1 << 61, 1 << 61]), "weights/a.*is too large"),
    "huge empty shape": (set_entry(f"{A}|shape", [0, 1 << 61, 1 << 61]), "weights/a.*is too large"),
    "too many axes": (set_entry(f"{A}|shape", [1] * 30), "weights/a.*is too large"),
    "negative size": (set_entry(f"{A}|shape", [-4, 2]), "weights/a.*greater than or equal to 0"),
    "integer beyond 64 bits": (set_entry(f"{A}|shape", [1 << 80, 2]), "weights/a"),
    "fraction": (set_entry(f"{A}|shape", [4.5, 2]), "weights/a.*integer"),
    "missing chunk": (lambda raw: raw["tensors"]["weights/a"]["chunks"].pop(), "weights/a.*are incomplete"),
    "duplicate chunk": (
        lambda raw: raw["tensors"]["weights/a"]["chunks"].append(first_chunk(raw)),
        "weights/a.*overlap",
    ),
    "overlapping chunks": (set_entry(f"{A}|chunks|1|offset", [1, 0]), "weights/a.*overlap"),
    "chunk outside": (set_entry(f"{A}|chunks|1|offset", [3, 0]), "weights/a.*exceeds"),
    "axes differ": (set_entry(f"{A}|chunks|0|offset", [0]), "weights/a.*number of axes"),
    "shared bytes": (
        lambda raw: first_chunk(raw).update(begin=32, end=48),
        "weights/[ab].*overlap with another",
    ),
    "bytes do not fit shape": (set_entry(f"{A}|chunks|0|end", 28), "weights/a.*its bytes"),
    "end before begin": (set_entry(f"{A}|chunks|0|end", 8), "weights/a.*its bytes"),
    "past the end of file": (set_entry("files|s.safetensors|bytes", 40), "exceeds the file"),
    "unaccounted bytes": (set_entry("files|s.safetensors|bytes", 99), "must end at the end"),
    "unaligned": (
        lambda raw: [chunk.update(begin=chunk["begin"] + 1, end=chunk["end"] + 1) for chunk in raw["tensors"]["weights/a"]["chunks"]],
        "weights/a.*its bytes",
    ),
    "unknown dtype": (set_entry(f"{A}|dtype", "O"), "weights/a.*dtype 'O' is not supported"),
    "bad checksum": (set_entry(f"{A}|chunks|0|checksum", "xyz"), "weights/a"),
    "name with escapes": (lambda raw: raw["tensors"].update({"a\x1b[2J": raw["tensors"]["weights/a"]}), "printable"),
    "unknown key": (set_entry("surprise", 1), "surprise"),
    "other version": (set_entry("format_version", 2), "format_version"),
    "model that is none": (set_entry("model|num_layers", 0), "model.num_layers"),
    "model that contradicts itself": (set_entry("model|num_kv_heads", 3), "num_kv_heads"),
    "not an object": (set_entry("tensors", []), "tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(name: str) -> None:
    change, sentence = HOSTILE[name]
    raw = json.loads(sound().encode_json())
    del raw["checksum"]
    assert Manifest.decode_json(signed(raw), Path("m")) == sound()
    change(raw)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        Manifest.decode_json(signed(raw), Path("m"))
    assert caught.value.message.startswith("m: ")


@pytest.mark.parametrize("body", [b"{}", b"[]", b"", b"{" * 100_000, b'"\xff"', b"[" * 100_000])
def test_other_json_is_refused(body: bytes) -> None:
    data = b'{\n "checksum": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'",\n' + body
    with pytest.raises(CheckpointError):
        Manifest.decode_json(data, Path("m"))


def test_a_manifest_beyond_reason_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / MANIFEST, "wb") as stream:
        stream.truncate(1 << 42)
    with pytest.raises(CheckpointError, match="must have at most"):
        Manifest.read_from_folder(tmp_path)


def test_a_manifest_behind_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(sound().encode_json())
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / MANIFEST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="links are not followed"):
        Manifest.read_from_folder(tmp_path / "step")


@pytest.mark.parametrize("state", [{"x": float("nan")}, {"x": (1, 2)}, {"x": {1: 2}}, {"x": object()}, {"x": b"y"}])
def test_a_state_that_json_would_change_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="state"):
        make_checkpoint_manifest(1, MODEL, state, None)


@given(st.data(), st.lists(st.integers(0, 4), max_size=3).map(tuple))
def test_tiles_agrees_with_counting(data: st.DataObject, shape: tuple[int, ...]) -> None:
    def box() -> tuple[tuple[int, ...], tuple[int, ...]]:
        offset = tuple(data.draw(st.integers(0, n)) for n in shape)
        return offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))

    boxes = [box() for _ in range(data.draw(st.integers(0, 4)))]
    if data.draw(st.booleans()) and shape:
        at = data.draw(st.integers(0, shape[0]))
        boxes = [((0,) * len(shape), (at, *shape[1:])), ((at, *(0,) * (len(shape) - 1)), (shape[0] - at, *shape[1:]))]
    count = np.zeros(shape, dtype=int)
    for offset, extent in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] += 1
    assert is_exact_tiling(shape, boxes) == bool((count == 1).all())
