"""The files of a HuggingFace folder that hold weights: safetensors, or pickles of torch where there are none.

One file, or several with an index that says which tensor is in which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mega_ckpt.formats import trainer_state
from mega_ckpt.formats.disk import Stored
from mega_ckpt.formats.foreign_state import foreign_state, unwrapped
from mega_ckpt.formats.named_state import NamedState, plain
from mega_ckpt.formats.numbered_state import beside
from mega_ckpt.formats.safetensors import Header, SafetensorsFile
from mega_ckpt.formats.torch_state import state_tensors
from mega_common.errors import CheckpointError
from mega_common.log import logger
from mega_common.remote import Place, Remote

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TORCH_INDEX, TORCH_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"


@dataclass(frozen=True)
class WeightFiles:
    """What the files hold.

    Attributes:
        tensors: {name: tensor}.
        headers: {file name: header} of safetensors files; empty for other kinds.
        trained: reads weights and moments, where a trainer left some.
        foreign: the names are such a trainer's own, and all may have something in front.
    """

    tensors: Mapping[str, Stored]
    headers: Mapping[str, Header] = field(default_factory=dict)
    trained: Callable[[], NamedState | None] = lambda: None
    foreign: bool = False


def holds_weights(folder: Place) -> bool:
    """Whether there are weights of these kinds in a folder."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX))


def open_weights(folder: Place) -> WeightFiles:
    """Open the weights of a folder, by names without wrappers; those in safetensors where there are two kinds.

    Raises:
        CheckpointError: when files are missing, damaged, or disagree with the index, or when two names differ by wrappers alone.
    """
    files = _open(folder)
    names = {name: unwrapped(name) for name in files.tensors}
    wrapped = [name for name, bare in names.items() if name != bare]
    if not wrapped:
        return files
    if len(set(names.values())) < len(names):
        twice = next(name for name in wrapped if names[name] in names or list(names.values()).count(names[name]) > 1)
        raise CheckpointError(
            f"{folder}: the files hold {names[twice]} twice, once as {twice}", hint="leave one of the two in"
        )
    logger.info(
        "%s: tensor names are those of a wrapped module (%s); read as %s", folder, wrapped[0], names[wrapped[0]]
    )

    def trained() -> NamedState | None:
        state = files.trained()
        return None if state is None else state.renamed(unwrapped)

    # without headers: what is written from these weights has the names of the model
    return WeightFiles(
        {names[name]: one for name, one in files.tensors.items()}, trained=trained, foreign=files.foreign
    )


def _open(folder: Place) -> WeightFiles:
    """Open the weights of a folder by the names in its files."""
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        files = [SafetensorsFile.open(folder / name) for name in _names(folder, SINGLE, INDEX)]
        held = {file.path.name: _tensors(file) for file in files}
        _check_index(folder, SINGLE, INDEX, held)
        tensors = _together(held)
        headers = {file.path.name: file.header for file in files}
        if not isinstance(folder, Path):
            return WeightFiles(tensors, headers)
        return WeightFiles(tensors, headers, partial(trainer_state.beside, folder, tensors))
    if (folder / TORCH_SINGLE).is_file() or (folder / TORCH_INDEX).is_file():
        if not isinstance(folder, Path):
            raise CheckpointError(f"{folder}: pickled weights are read from a folder here", hint="download it first")
        saved = {name: state_tensors(folder / name) for name in _names(folder, TORCH_SINGLE, TORCH_INDEX)}
        _check_index(folder, TORCH_SINGLE, TORCH_INDEX, saved)
        state = beside(folder, saved)
        if state is not None:
            return WeightFiles(state.weights, trained=lambda: state, foreign=True)
        tensors = {key: plain(one.path, one) for part in saved.values() for key, one in part.items()}
        return WeightFiles(tensors, trained=partial(trainer_state.beside, folder, tensors))
    foreign = foreign_state(folder) if isinstance(folder, Path) else None
    if foreign is not None:
        return WeightFiles(foreign.weights, trained=lambda: foreign, foreign=True)
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    raise CheckpointError(
        f"{folder}: there are no weights, neither {SINGLE} nor {INDEX}, nor {TORCH_SINGLE}"
        + (f"; {others[0]} is none" if others else ""),
        hint="was the download interrupted? A new model of this shape, with random weights, is "
        f"model.from={folder / 'config.json'}",
    )


def _tensors(file: SafetensorsFile) -> Mapping[str, Stored]:
    remote = isinstance(file.path, Remote)
    return {
        name: Stored(file.path, entry.dtype, entry.shape, partial(file.read, name), costly=remote)
        for name, entry in file.header.entries.items()
    }


def _together(held: Mapping[str, Mapping[str, Stored]]) -> dict[str, Stored]:
    return {name: stored for tensors in held.values() for name, stored in tensors.items()}


def _names(folder: Place, single: str, index: str) -> list[str]:
    """The plain names of the files, all of which are there."""
    if (folder / single).is_file():
        return [single]
    weight_map = _weight_map(folder / index)
    for tensor, name in weight_map.items():
        check_file_name(name, f"{folder / index}: {tensor}", Path(single).suffix)
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: {name} is missing, which holds {tensor}", hint="was the download interrupted?"
            )
    return sorted(set(weight_map.values()))


def _check_index(folder: Place, single: str, index: str, held: Mapping[str, Iterable[str]]) -> None:
    if single in held:
        return
    found = {(tensor, name) for name, tensors in held.items() for tensor in tensors}
    for tensor, name in found ^ set(_weight_map(folder / index).items()):
        raise CheckpointError(f"{folder / index}: disagrees with {name} on whether it holds {tensor}")


def _weight_map(index: Place) -> Mapping[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    return weight_map


def check_file_name(name: object, source: str, suffix: str = ".safetensors") -> None:
    """Refuse anything but the plain name of a file with that suffix.

    Raises:
        CheckpointError: naming `source`.
    """
    plain = isinstance(name, str) and name.endswith(suffix) and name.isprintable()
    if not plain or {"/", "\\", ":"} & set(str(name)) or str(name).startswith("."):
        raise CheckpointError(f"{source}: {name!r} is not the plain name of a {suffix[1:]} file in the same folder")


def read_json(path: Place) -> dict[str, Any]:
    """A JSON mapping.

    Raises:
        CheckpointError: when the file is anything else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    return decode_json(content, path)


def decode_json(content: bytes, source: object) -> dict[str, Any]:
    """The JSON mapping that is the content of a file.

    Raises:
        CheckpointError: when it is anything else, naming `source`.
    """
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{source}: expected keys with values, found {type(raw).__name__}")
    return raw


def encode_json(value: Mapping[str, Any]) -> bytes:
    """A mapping as the library writes its configuration files."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
