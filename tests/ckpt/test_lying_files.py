"""Files whose counts do not fit their size: a sentence that names the file, in little memory."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_models import write_gguf
from hf_models import save_model

from mega_ckpt.formats.gguf_file import open_gguf_model
from mega_ckpt.formats.gguf_source import GgufSource
from mega_common.errors import MegaError

ROOM = 1 << 28  # bytes that reading may take beside what the process has
HUGE = 1 << 40


def _string(text: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode()


def _gguf(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def _tensor(shape: list[int], offset: int = 0, axes: int | None = None) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape) if axes is None else axes, *shape)
    return _string("x") + dims + struct.pack("<IQ", 0, offset) + b"\0" * 64


def _array(kind: int, count: int, content: bytes = b"") -> bytes:
    return _string("key") + struct.pack("<IIQ", 9, kind, count) + content


GGUF: Mapping[str, bytes] = {
    "array of bytes": _gguf(_array(0, HUGE), keys=1),
    "array of floats": _gguf(_array(6, 200_000_000), keys=1),
    "array of strings": _gguf(_array(8, HUGE), keys=1),
    "array of arrays": _gguf(_array(9, HUGE), keys=1),
    "nested arrays": _gguf(_string("key") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, keys=1),
    "array of many true elements": _gguf(_array(0, 1 << 23, bytes(1 << 23)), keys=1),
    "length of a key": _gguf(_string("key", HUGE), keys=1),
    "length of a string": _gguf(_string("key"), struct.pack("<I", 8), _string("text", 1 << 63), keys=1),
    "number of keys": _gguf(keys=HUGE),
    "number of tensors": _gguf(tensors=HUGE),
    "unknown type": _gguf(_string("key"), struct.pack("<I", 77), keys=1),
    "number of dimensions": _gguf(_tensor([2], axes=1 << 31), tensors=1),
    "a dimension": _gguf(_tensor([HUGE]), tensors=1),
    "dimensions whose product wraps": _gguf(_tensor([1 << 32, 1 << 32]), tensors=1),
    "dimension of zero": _gguf(_tensor([1 << 62, 0]), tensors=1),
    "offset of a tensor": _gguf(_tensor([2], HUGE), tensors=1),
    "length of a tensor's name": _gguf(_string("x", HUGE), tensors=1),
    "big-endian with huge counts": b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64),
    "future version": _gguf(version=9),
}  # fmt: skip


def _bounded(read: Callable[[Path], object], path: Path, results: Any) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    try:
        read(path)
        results.put(("no error", ""))
    except BaseException as error:  # noqa: BLE001 - reported to the parent
        results.put(("MegaError" if isinstance(error, MegaError) else type(error).__name__, str(error)[:2000]))


def read_bounded(read: Callable[[Path], object], path: Path) -> str:
    """Run a reader in a child with bounded memory and processor time, and return its message."""
    context = get_context("fork")
    results = context.Queue()
    child = context.Process(target=_bounded, args=(read, path, results))
    child.start()
    try:
        kind, message = results.get(timeout=60)
    finally:
        child.join(10)
        child.kill()
    assert kind == "MegaError", f"{kind}: {message}"
    return str(message)


def _open_gguf(path: Path) -> object:
    return open_gguf_model(path)


@pytest.mark.parametrize("case", GGUF)
def test_a_gguf_header_is_bounded_by_its_file(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF[case])
    assert str(path) in read_bounded(_open_gguf, path)


def test_a_gguf_without_a_needed_part(tmp_path: Path) -> None:
    """Each key and tensor is left out, or has a value of another kind."""
    whole = write_gguf(save_model(tmp_path / "hf", "llama"), tmp_path / "whole.gguf", more=_tokenizer)
    reader = gguf.GGUFReader(whole)
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    path, refused = tmp_path / "model.gguf", []
    for left_out in [*keys, *(tensor.name for tensor in reader.tensors)]:
        for replaced in (None, [1, 2], "text", -1):
            if replaced is not None and left_out not in keys:
                continue
            _copy(reader, path, left_out, replaced)
            message = _refusal(path)
            assert not message or str(path) in message
            refused += [left_out] * bool(message)
    assert {"token_embd.weight", "llama.block_count", "llama.attention.head_count", "general.architecture"} <= {
        *refused
    }
    assert "tokenizer.ggml.merges" in refused


def _refusal(path: Path) -> str:
    try:
        GgufSource(path).asset_files()
    except MegaError as error:
        return str(error)
    return ""


def _tokenizer(writer: gguf.GGUFWriter, _: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 3])
    writer.add_token_merges(["a b"])


def _copy(reader: gguf.GGUFReader, path: Path, left_out: str, replaced: object) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or (key == left_out and replaced is None):
            continue
        value = replaced if key == left_out else field.contents()
        kind = gguf.GGUFValueType.get_type(value) if key == left_out else field.types[0]
        writer.add_key_value(
            key, value, kind, *(field.types[-1:] if isinstance(value, list) and key != left_out else [])
        )
    for tensor in reader.tensors:
        if tensor.name != left_out:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _archive(path: Path, *, size: int | None = None, directory: int | None = None) -> None:
    """An archive of torch.save, with another size of its pickle, or of its directory."""
    torch.save({"weight": torch.ones(4)}, path)
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    if size is not None:
        data[entry + 20 : entry + 28] = struct.pack("<II", size, size)
    if directory is not None:
        end = data.rindex(b"PK\x05\x06")
        data[end + 12 : end + 16] = struct.pack("<I", directory)
        wide = data.rindex(b"PK\x06\x06")
        data[wide + 40 : wide + 48] = struct.pack("<Q", directory)
    path.write_bytes(data)


def _old_archive(path: Path, *content: bytes) -> None:
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"".join(content))


def _safetensors(path: Path, header: object, length: int | None = None) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)


def _entry(shape: list[int], end: int) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}


def _distributed(path: Path, old: bytes, new: bytes) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    save({"w": torch.ones(777, 3)}, storage_writer=FileSystemWriter(path), no_dist=True)
    metadata = (path / ".metadata").read_bytes()
    assert old in metadata
    (path / ".metadata").write_bytes(metadata.replace(old, new))


def _index(path: Path, sequences: int, bounds: int) -> None:
    path.with_suffix(".bin").write_bytes(bytes(8))
    path.with_suffix(".idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, bounds) + bytes(64))


def _tokens(path: Path, **values: object) -> None:
    config = {
        "pattern": ".", "num_vocab_tokens": 256, "default_vocab_size": 300, "default_num_special_tokens": 10, "version": "v3",
    }  # fmt: skip
    vocab = [{"rank": n, "token_bytes": "YQ==", "token_str": "a"} for n in range(256)]
    path.write_text(json.dumps({"config": config | values, "vocab": vocab}))


def _state(path: Path) -> object:
    from mega_ckpt.formats.torch_archive import load_state_tensors

    return [tensor.read() for tensor in load_state_tensors(path).values()]


def _safe(path: Path) -> object:
    from mega_ckpt.formats.safetensors_file import SafetensorsFile

    file = SafetensorsFile.open_file(path)
    return [file.read_tensor(name) for name in file.header.entries]


def _pickled(path: Path) -> object:
    from mega_ckpt.formats.safe_pickles import load_untrusted_pickle

    with open(path, "rb") as stream:
        load_untrusted_pickle(stream.read(), str(path))
    return load_untrusted_pickle(path.read_bytes(), str(path))


def _dist(path: Path) -> object:
    from mega_ckpt.formats import dcp

    return [tensor.read() for tensor in dcp.read_dcp_folder(path).tensors.values()]


def _indexed(path: Path) -> object:
    from mega_data.token_files.indexed_reader import IndexedReader

    return IndexedReader(path)


def _converted(path: Path) -> object:
    from mega_data.tokenizer_conversion import convert_tokenizer

    return convert_tokenizer(path, path.parent / "out", ["a text"], pattern=".", special_tokens=["<s>"])


HUGE_INT = b"\x8a\x06" + HUGE.to_bytes(6, "little")  # LONG1 of a pickle
OTHERS: Mapping[str, tuple[str, Callable[[Path], object], Callable[[Path], object]]] = {
    "zip: size of an entry": ("m.bin", lambda path: _archive(path, size=(1 << 30) - 1), _state),
    "zip: size of the directory": ("m.bin", lambda path: _archive(path, directory=(1 << 32) - 2), _state),
    "old archive: bytes": ("m.bin", lambda path: _old_archive(path, b"\x80\x04\x8e" + struct.pack("<Q", 1 << 33)), _state),
    "old archive: frame": ("m.bin", lambda path: _old_archive(path, b"\x80\x04\x95" + struct.pack("<Q", 1 << 33)), _state),
    "pickle: bytearray": ("p", lambda path: path.write_bytes(b"\x80\x05\x96" + struct.pack("<Q", 1 << 33)), _pickled),
    "pickle: string": ("p", lambda path: path.write_bytes(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 33)), _pickled),
    "pickle: long": ("p", lambda path: path.write_bytes(b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1)), _pickled),
    "safetensors: length of the header": ("m.safetensors", lambda path: _safetensors(path, {}, HUGE), _safe),
    "safetensors: longest header": ("m.safetensors", lambda path: _safetensors(path, {}, 99_999_999), _safe),
    "safetensors: shape": ("m.safetensors", lambda path: _safetensors(path, _entry([HUGE], 16)), _safe),
    "safetensors: shape and offsets": ("m.safetensors", lambda path: _safetensors(path, _entry([HUGE], 4 * HUGE)), _safe),
    "distributed: shapes": ("d", lambda path: _distributed(path, b"M\x09\x03", HUGE_INT), _dist),
    "idx: sequences": ("data.idx", lambda path: _index(path, HUGE, 1), _indexed),
    "idx: documents": ("data.idx", lambda path: _index(path, 1, HUGE), _indexed),
    "idx: both wrap": ("data.idx", lambda path: _index(path, (1 << 64) - 1, (1 << 64) - 1), _indexed),
    "sentencepiece: length of a piece": ("t.model", lambda path: path.write_bytes(b"\x0a\xff\xff\xff\xff\x07abc"), _converted),
    "tiktoken: a rank": ("t.tiktoken", lambda path: path.write_text(f"YQ== {HUGE}\n"), _converted),
    "tekken: size of the vocabulary": ("tekken.json", lambda path: _tokens(path, default_vocab_size=HUGE), _converted),
    "tekken: special tokens": ("tekken.json", lambda path: _tokens(path, default_num_special_tokens=HUGE), _converted),
    "tekken: negative": ("tekken.json", lambda path: _tokens(path, default_num_special_tokens=-HUGE), _converted),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_counts_are_bounded_by_the_file(case: str, tmp_path: Path) -> None:
    name, write, read = OTHERS[case]
    path = tmp_path / name
    write(path)
    assert str(path.with_suffix("") if "idx" in case else path) in read_bounded(read, path)
