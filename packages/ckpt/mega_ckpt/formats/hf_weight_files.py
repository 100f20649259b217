"""Weight files of a HuggingFace folder: safetensors if present, else torch pickles; one file, or several with an index
of the tensors in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega_ckpt.formats.adam_state import NamedAdamState, read_colossalai_state, read_hf_adam_state, to_lazy_tensor
from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.formats.foreign_checkpoint import read_foreign_checkpoint, remove_module_wrapper_parts
from mega_ckpt.formats.safetensors_file import SafetensorsFile, SafetensorsHeader
from mega_ckpt.formats.torch_archive import load_state_tensors
from mega_common.bounded_parsing import describe_json_type, explain_read_error, parse_json_text
from mega_common.errors import CheckpointError
from mega_common.object_store import Location, RemotePath
from mega_common.progress_logging import logger

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TORCH_INDEX, TORCH_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"


@dataclass(frozen=True)
class WeightFiles:
    """Contents of the weight files of a HuggingFace folder or another trainer's checkpoint.

    Attributes:
        tensors: {name: tensor}.
        headers: {file name: header} of safetensors files; empty for other formats.
        read_adam_state: reads weights and Adam moments that a trainer saved with them; returns None if there are none.
        has_foreign_names: names are those of another trainer, possibly with a common prefix.
    """

    tensors: Mapping[str, LazyTensor]
    headers: Mapping[str, SafetensorsHeader] = field(default_factory=dict)
    read_adam_state: Callable[[], NamedAdamState | None] = lambda: None
    has_foreign_names: bool = False


def has_readable_weights(folder: Location) -> bool:
    """Return whether a folder has weight files in a HuggingFace format that mega reads.
    The formats are safetensors and torch pickles (pytorch_model.bin).
    """
    return any((folder / name).is_file() for name in (SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX))


def open_weight_files(folder: Location) -> WeightFiles:
    """Open the weights of a HuggingFace folder, by tensor names without module wrappers.
    Safetensors are preferred to torch pickles and other formats.

    Raises:
        CheckpointError: when files are missing, damaged, or disagree with the index, or when two names differ only by
            wrappers.
    """
    files = _open_files(folder)
    names = {name: remove_module_wrapper_parts(name) for name in files.tensors}
    wrapped = [name for name, bare in names.items() if name != bare]
    if not wrapped:
        return files
    if len(set(names.values())) < len(names):
        twice = next(name for name in wrapped if names[name] in names or list(names.values()).count(names[name]) > 1)
        raise CheckpointError(
            f"{folder}: the files have {names[twice]} twice, once as {twice}", hint="remove one of the two tensors"
        )
    logger.info("%s: module wrappers are removed from tensor names: %s is %s", folder, wrapped[0], names[wrapped[0]])

    def read_adam_state() -> NamedAdamState | None:
        state = files.read_adam_state()
        return None if state is None else state.rename_weights(remove_module_wrapper_parts)

    tensors = {names[name]: stored for name, stored in files.tensors.items()}
    # without headers: a folder written from these weights has the names of the model
    return WeightFiles(tensors, read_adam_state=read_adam_state, has_foreign_names=files.has_foreign_names)


def _open_files(folder: Location) -> WeightFiles:
    """Open the weights of a folder by the names in its files."""
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        files = [SafetensorsFile.open_file(folder / name) for name in _file_names(folder, SINGLE, INDEX)]
        by_file = {file.path.name: _lazy_tensors(file) for file in files}
        _check_index(folder, SINGLE, INDEX, by_file)
        tensors = {name: stored for part in by_file.values() for name, stored in part.items()}
        headers = {file.path.name: file.header for file in files}
        if not isinstance(folder, Path):
            return WeightFiles(tensors, headers)
        return WeightFiles(tensors, headers, partial(read_hf_adam_state, folder, tensors))
    if (folder / TORCH_SINGLE).is_file() or (folder / TORCH_INDEX).is_file():
        if not isinstance(folder, Path):
            raise CheckpointError(
                f"{folder}: pickled weights are not supported on an object store", hint="download the folder first"
            )
        saved = {name: load_state_tensors(folder / name) for name in _file_names(folder, TORCH_SINGLE, TORCH_INDEX)}
        _check_index(folder, TORCH_SINGLE, TORCH_INDEX, saved)
        state = read_colossalai_state(folder, saved)
        if state is not None:
            return WeightFiles(state.weights, read_adam_state=lambda: state, has_foreign_names=True)
        tensors = {key: to_lazy_tensor(one.path, one) for part in saved.values() for key, one in part.items()}
        return WeightFiles(tensors, read_adam_state=partial(read_hf_adam_state, folder, tensors))
    foreign = read_foreign_checkpoint(folder) if isinstance(folder, Path) else None
    if foreign is not None:
        return WeightFiles(foreign.weights, read_adam_state=lambda: foreign, has_foreign_names=True)
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    raise CheckpointError(
        f"{folder}: weights are missing: neither {SINGLE} nor {INDEX}, nor {TORCH_SINGLE}"
        + (f"; {others[0]} is not supported" if others else ""),
        hint=f"download the folder again; to train from random weights, set model.from={folder / 'config.json'}",
    )


def _lazy_tensors(file: SafetensorsFile) -> Mapping[str, LazyTensor]:
    remote = isinstance(file.path, RemotePath)
    return {
        name: LazyTensor(file.path, entry.dtype, entry.shape, partial(file.read_tensor, name), costly=remote)
        for name, entry in file.header.entries.items()
    }


def _file_names(folder: Location, single: str, index: str) -> list[str]:
    """Return the plain names of the files, after checking that they exist."""
    if (folder / single).is_file():
        return [single]
    weight_map = _weight_map(folder / index)
    for tensor, name in weight_map.items():
        check_file_name(name, f"{folder / index}: {tensor}", Path(single).suffix)
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: {name}, the file of {tensor}, is missing", hint="download the folder again"
            )
    return sorted(set(weight_map.values()))


def _check_index(folder: Location, single: str, index: str, held: Mapping[str, Iterable[str]]) -> None:
    if single in held:
        return
    found = {(tensor, name) for name, tensors in held.items() for tensor in tensors}
    for tensor, name in found ^ set(_weight_map(folder / index).items()):
        raise CheckpointError(f"{folder / index}: conflicts with {name}: only one of them has {tensor}")


def _weight_map(index: Location) -> Mapping[str, str]:
    weight_map = read_json_mapping(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing")
    return weight_map


def check_file_name(name: object, source: str, suffix: str = ".safetensors") -> None:
    """Raise CheckpointError, naming `source`, if `name` is not the plain name of a file that ends with `suffix`."""
    plain = isinstance(name, str) and name.endswith(suffix) and name.isprintable()
    if not plain or {"/", "\\", ":"} & set(str(name)) or str(name).startswith("."):
        raise CheckpointError(f"{source}: {name!r} must be the plain name of a {suffix[1:]} file in the same folder")


def read_json_mapping(path: Location) -> dict[str, Any]:
    """Read a JSON object from a file; CheckpointError for anything else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({explain_read_error(error)})") from None
    return decode_json_mapping(content, path)


def decode_json_mapping(content: bytes, source: object) -> dict[str, Any]:
    """Parse the content of a file as a JSON object; CheckpointError naming `source` for anything else."""
    try:
        raw = parse_json_text(content)
    except ValueError as error:
        raise CheckpointError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{source}: must be a JSON object, found {describe_json_type(raw)}")
    return raw


def encode_json_mapping(value: Mapping[str, Any]) -> bytes:
    """Return the bytes of a mapping as JSON, formatted as transformers writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def set_config_dtype(raw: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a config.json with the dtype of the weights, under the existing keys or the key of transformers 5."""
    keys = [key for key in ("dtype", "torch_dtype") if key in raw] or ["dtype"]
    return {**raw, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}
