"""The state of a model as `torch.save` writes it, {name: tensor}: `pytorch_model.bin` of the older HuggingFace folders.

Two formats: an archive (`torch_archive`), and that of torch before 1.6, which is five pickles in a row (a magic number, the
version, facts about the machine, the state, the storages' keys) and then each storage: its length in eight bytes, and its
elements. All pickles go through `pickles`, and tensors stay in the file until they are read.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from mega_ckpt.formats.pickles import MAX_PICKLE_BYTES, load_pickle
from mega_ckpt.formats.torch_archive import Storage, StoredTensor, load_archive, part_of, rebuilding, storage_dtype
from mega_common.errors import CheckpointError

_MAGIC = 0x1950A86A20F9469CFC6C
_COUNT = 8  # bytes before a storage's elements


def state_tensors(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a model's state, in the order of the file.

    Raises:
        CheckpointError: when the file is damaged, is no state of a model, or asks for anything that no state needs.
    """
    try:
        state = load_archive(path) if zipfile.is_zipfile(path) else _load_old(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in state.items()
    ):
        raise CheckpointError(f"{path}: holds no state of a model ({{name: tensor}})")
    return dict(state)


def _load_old(path: Path) -> Any:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        stream = part_of(file, 0, min(size, MAX_PICKLE_BYTES))
        found: dict[str, Storage] = {}

        def load(storages: Callable[[Any], Storage]) -> Any:
            return load_pickle(stream, str(path), replace=rebuilding(path), stored=storages)

        def note(pid: Any) -> Storage:
            _, marker, key, _, count, view = pid
            if view is not None:
                raise ValueError(f"storage {key} is a part of another one")
            dtype = storage_dtype(marker)
            return found.setdefault(key, Storage(dtype, 0, count * dtype.itemsize))

        if load(note) != _MAGIC:
            raise CheckpointError(f"{path}: not written by torch.save", hint="was the download interrupted?")
        _version, _machine, begin = load(note), load(note), stream.tell()
        _state, keys, end = load(note), load(note), stream.tell()
        places = _places(
            path, file, found, keys, end, size
        )  # known only now that the state was read: so it is read twice
        stream.seek(begin)
        return load(lambda pid: places[pid[2]])


def _places(
    path: Path, file: IO[bytes], found: Mapping[str, Storage], keys: Any, at: int, size: int
) -> dict[str, Storage]:
    """Where the storages are, which follow each other from byte `at` on."""
    places = {}
    for key in keys if isinstance(keys, list) else ():
        file.seek(at)
        count, begin = int.from_bytes(file.read(_COUNT), "little"), at + _COUNT
        if key not in found or count * found[key].dtype.itemsize != found[key].end:
            raise CheckpointError(f"{path}: damaged: storage {key!r} is not as long as its tensors say")
        at = begin + found[key].end
        if at > size:
            raise CheckpointError(f"{path}: truncated: {size} bytes instead of {at}", hint="copy the file again")
        places[key] = Storage(found[key].dtype, begin, at)
    if found.keys() - places.keys():
        raise CheckpointError(f"{path}: damaged: it lacks a storage of its tensors")
    return places
