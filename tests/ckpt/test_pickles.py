"""Nothing in a pickle is run: each of these would do harm, or take all memory, if it were loaded as pickles are."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_ckpt.formats.safe_pickles import PickledObjectPlaceholder, load_untrusted_pickle
from mega_ckpt.formats.torch_archive import StoredTensor, load_torch_archive, namespace_attributes
from mega_common.errors import CheckpointError


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def text_pickle(*lines: str) -> bytes:
    return "\n".join(lines).encode()


# {what: (the pickle, what is said of it)}
BOMBS: dict[str, tuple[bytes, str]] = {
    "a shell command": (pickle.dumps(Calls(os.system, "touch {mark}")), "posix.system"),
    "a program": (text_pickle("csubprocess", "Popen", "((S'touch'", "S'{mark}'", "ltR."), "subprocess.Popen"),
    "python": (pickle.dumps(Calls(exec, "open('{mark}', 'w')")), "builtins.exec"),
    "python, protocol 0": (pickle.dumps(Calls(eval, "open('{mark}', 'w')"), protocol=0), "__builtin__.eval|builtins.eval"),
    "getattr": (pickle.dumps(Calls(getattr, 1, "real")), "builtins.getattr"),
    "a file": (pickle.dumps(Calls(open, "{mark}", "w")), "_?io.open"),
    "torch.load": (pickle.dumps(Calls(torch.load, "{mark}")), "torch.serialization.load"),
    "an attribute of an allowed module": (
        b"\x80\x04\x8c\x1ctorch.distributed.checkpoint\x8c\x14filesystem.os.system\x93\x8c\x0ctouch {mark}\x85R.",
        "",
    ),
    "memory of a terabyte": (pickle.dumps(Calls(bytearray, 1 << 40)), "builtins.bytearray"),
    "an index of four billion": (b"\x80\x04]r\xff\xff\xff\xff0.", "damaged"),
    "a string longer than the file": (b"\x80\x04\x8d" + (1 << 50).to_bytes(8, "little") + b"x.", "damaged"),
    "an extension": (b"\x80\x02\x82\x01.", "damaged"),
    "external references": (b"\x80\x04\x8c\x01xQ.", "damaged"),
    "nothing": (b"", "damaged"),
    "half": (pickle.dumps({"a": [1, 2, 3]})[:-4], "damaged"),
    "text": (b"hello", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_bombs(what: str, tmp_path: Path) -> None:
    data, said = BOMBS[what]
    mark = tmp_path / "mark"
    if not said:  # a stand-in is called, which does nothing
        load_untrusted_pickle(data, "x.pt")
    else:
        with pytest.raises(CheckpointError, match=said) as error:
            load_untrusted_pickle(data, "x.pt")
        assert "x.pt" in str(error.value)
        assert "\n" not in error.value.message
    assert not mark.exists()


@pytest.mark.parametrize("what", [name for name, (_, said) in BOMBS.items() if "." in said])
def test_bombs_in_an_archive(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", BOMBS[what][0])
    with pytest.raises(CheckpointError, match=BOMBS[what][1]):
        load_torch_archive(path)


def test_one_pickle_cannot_reach_another() -> None:
    """BUILD sets attributes of whatever lies on the stack, here of a class."""
    pickled = b"\x80\x04\x8c\x08argparse\x8c\tNamespace\x93N}\x8c\x04evilK\x01s\x86b."
    with pytest.raises(CheckpointError, match="damaged"):
        load_untrusted_pickle(pickled, "x")
    found = load_untrusted_pickle(pickle.dumps(argparse.Namespace(a=1)), "x")
    assert (found.name, found.state, found.a) == ("argparse.Namespace", {"a": 1}, 1)
    assert not any(hasattr(kind, "evil") for kind in (found, PickledObjectPlaceholder, argparse.Namespace))


def test_what_checkpoints_hold(tmp_path: Path) -> None:
    """Settings with enums and types of Megatron's, containers, tensors that share a storage."""
    kind = enum.Enum("AttnBackend", {"flash": 1})
    kind.__module__, kind.__qualname__ = "megatron.core.transformer.enums", "AttnBackend"
    module = types.ModuleType(kind.__module__)
    module.AttnBackend = kind  # type: ignore[attr-defined]
    base = torch.arange(60, dtype=torch.bfloat16)
    value = {
        "args": argparse.Namespace(backend=kind.flash, dtype=torch.bfloat16, path=Path("/x"), sizes=[1, 2]),
        "model": OrderedDict(
            whole=base.view(6, 10), part=base.view(6, 10)[1:3], columns=base.view(6, 10)[:, 2:4],
            turned=base.view(6, 10).t(), none=torch.empty(0, 3), scalar=torch.tensor(2.5),
            parameter=torch.nn.Parameter(torch.ones(2)),
        ),
        "rng": torch.get_rng_state(),
    }  # fmt: skip
    sys.modules[kind.__module__] = module
    try:
        torch.save(value, tmp_path / "x.pt")
    finally:
        del sys.modules[kind.__module__]
    found = load_torch_archive(tmp_path / "x.pt")
    args = namespace_attributes(found["args"])
    assert args["sizes"] == [1, 2]
    assert isinstance(args["backend"], PickledObjectPlaceholder)
    for name, tensor in value["model"].items():
        stored = found["model"][name]
        assert isinstance(stored, StoredTensor)
        assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(stored.read(), tensor.detach())
    assert torch.equal(found["rng"].read(), value["rng"])
    assert namespace_attributes(3) == {}


def test_an_archive_inside_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.distcp"
    with open(path, "wb") as stream:
        stream.write(b"odd")
        torch.save(torch.arange(5.0), stream)
        end = stream.tell()
        stream.write(b"more")
    assert torch.equal(load_torch_archive(path, 3, end).read(), torch.arange(5.0))


def archive_with(path: Path, change: Callable[[bytes], bytes], storage: bytes = bytes(16)) -> None:
    """An archive of a tensor of four floats, with its pickle changed and another storage."""
    torch.save(torch.arange(4.0), path)
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", change(pickled))
        archive.writestr("x/data/0", storage)


def swapped(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "storage"),
    [
        pytest.param(swapped(b"K\x04\x85", b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85"), bytes(16), id="terabyte"),
        pytest.param(swapped(b"K\x04\x85q", b"K\x05\x85q"), bytes(16), id="longer than its storage"),
        pytest.param(swapped(b"K\x04tq", b"K\x7ftq"), bytes(16), id="storage longer than its bytes"),
        pytest.param(lambda data: data, bytes(12), id="short storage"),
        pytest.param(swapped(b"K\x00K\x04\x85", b"J\xff\xff\xff\xffK\x04\x85"), bytes(16), id="before its storage"),
        pytest.param(swapped(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007"), bytes(16), id="another storage"),
    ],
)
def test_tensors_that_reach_outside(change: Callable[[bytes], bytes], storage: bytes, tmp_path: Path) -> None:
    archive_with(tmp_path / "x.pt", change, storage)
    with pytest.raises(CheckpointError, match="damaged"):
        load_torch_archive(tmp_path / "x.pt")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for content in (b"", b"hello", b"PK\x05\x06" + bytes(18)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.pt: damaged"):
            load_torch_archive(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_torch_archive(tmp_path / "none")
    torch.save({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            load_torch_archive(path)
    with pytest.raises(CheckpointError, match="bytes instead of"):
        load_torch_archive(path, 5, 1 << 40)
