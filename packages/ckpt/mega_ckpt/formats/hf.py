"""Reading a HuggingFace folder: config.json and safetensors, one file or several with an index.

Nothing is loaded when a folder is opened; headers, names and shapes are all checked.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.families import Family, family_of
from mega_ckpt.families.layouts import DiskTensor, Slab
from mega_ckpt.formats.safetensors import Header, SafetensorsFile
from mega_ckpt.names import some, tensors_of
from mega_ckpt.pieces import Box, Shape, copy_overlap, crop
from mega_ckpt.remote import Place, Remote, content_of
from mega_common.errors import CheckpointError
from mega_common.log import logger
from mega_common.model_config import ModelConfig

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
LAYOUT = "hf_layout.json"  # in a mega checkpoint's assets: the headers of the files that it was made from
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".tmp")
_TEMPLATES = "additional_chat_templates"


class HfSource:
    """The weights in a HuggingFace folder. Its `unread` are the keys of config.json that nothing reads.

    Raises:
        CheckpointError: from the constructor, naming file, key or tensor, for a folder that cannot be used.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._fetched: dict[str, Tensor] = {}
        self.family, described, self.unread = described_by(folder / CONFIG, read_config(folder))
        self.files = _open_files(folder)
        self._file_of = {name: file for file in self.files for name in file.header.entries}
        self.model: ModelConfig = self.family.as_held(described, self._file_of)
        table = checked_table(
            self.family,
            self.model,
            {name: file.header.entries[name].shape for name, file in self._file_of.items()},
            folder,
        )
        self._shapes = tensors_of(self.model)
        self._places = _places(table)
        self._check_copies(table)
        self._check_dtypes()
        self._buffers = [name for name in self._file_of if name not in table]

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of the forward pass."""
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Its stored dtype."""
        disk, _ = self._places[name][0]
        return self._file_of[disk.name].header.entries[disk.name].dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor: a view of the file, unless it is assembled from several."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it: a view of the file, unless it is assembled from several tensors there."""
        places = self._places[name]
        if len(places) == 1:
            return crop(self._view(*places[0]), offset, shape)
        out = torch.empty(shape, dtype=self.dtype(name))
        for disk, slab in places:
            if all(a < b + n and b < a + m for a, m, b, n in zip(offset, shape, slab.offset, slab.shape, strict=True)):
                copy_overlap(Box(offset, out), Box(slab.offset, self._view(disk, slab)))
        return out

    def buffers(self) -> Sequence[str]:
        """Tensors on disk that are no weights."""
        return self._buffers

    def read_buffer(self, name: str) -> Tensor:
        """One of them: a view of the file."""
        return self._file_of[name].read(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """Every file that holds no weights, and how the weights were laid out in theirs."""
        found = {path.name: content_of(path) for path in _sorted(self.folder.iterdir()) if _travels(path)}
        templates = self.folder / _TEMPLATES
        if templates.is_dir():
            found |= {f"{_TEMPLATES}/{path.name}": content_of(path) for path in _sorted(templates.glob("*.jinja"))}
        return {**found, LAYOUT: encode_layout({file.path.name: file.header.text for file in self.files})}

    def _view(self, disk: DiskTensor, slab: Slab) -> Tensor:
        views = disk.views(self._whole(disk.name))
        return next(view for each, view in views if each == slab)

    def _whole(self, name: str) -> Tensor:
        """A tensor on disk. One that had to be fetched is kept until the next, for it is asked for in blocks."""
        if not isinstance(self.folder, Remote):
            return self._file_of[name].read(name)
        if name not in self._fetched:
            self._fetched.clear()
            self._fetched[name] = self._file_of[name].read(name)
        return self._fetched[name]

    def _check_copies(self, table: Mapping[str, DiskTensor]) -> None:
        """A folder may store a tensor twice, such as tied embeddings; the two must then be one."""
        for copy, name in self.family.copies(self.model).items():
            (place, _), *_ = self._places[name]
            if copy not in table or copy == place.name:
                continue
            one, other = (self._file_of[each].read(each) for each in (place.name, copy))
            if one.dtype != other.dtype or not torch.equal(one, other):
                tied = copy == self.family.head
                raise CheckpointError(
                    f"{self.folder}: {copy} differs from {place.name}, but {CONFIG} says that they are "
                    + ("tied" if tied else "one"),
                    hint='set "tie_word_embeddings": false in config.json if both are meant' if tied else None,
                )

    def _check_dtypes(self) -> None:
        """Experts that are one tensor here have one dtype."""
        for name, places in self._places.items():
            for disk, _ in places:
                if self._file_of[disk.name].header.entries[disk.name].dtype != self.dtype(name):
                    raise CheckpointError(f"{self.folder}: {disk.name} has another dtype than {places[0][0].name}")


def _places(table: Mapping[str, DiskTensor]) -> Mapping[str, list[tuple[DiskTensor, Slab]]]:
    """Where each canonical tensor is: the disk tensors and the slab that each of them holds, without repetition."""
    found: defaultdict[str, dict[Shape, tuple[DiskTensor, Slab]]] = defaultdict(dict)
    for disk in table.values():
        for slab in disk.slabs:
            found[slab.name].setdefault(slab.offset, (disk, slab))
    return {name: list(places.values()) for name, places in found.items()}


def checked_table(
    family: Family, model: ModelConfig, held: Mapping[str, Shape], source: object
) -> Mapping[str, DiskTensor]:
    """The family's table for `model`, when `held` (disk names with shapes) are its tensors, beside buffers.

    Raises:
        CheckpointError: naming a tensor that is missing, unknown or of another shape.
    """
    layers = model.num_layers + model.mtp_layers
    if layers > len(held):
        raise CheckpointError(f"{source}: {layers} layers by {CONFIG}, but only {len(held)} tensors")
    if model.moe and family.by_expert and model.moe.num_experts > len(held):
        raise CheckpointError(f"{source}: {model.moe.num_experts} experts by {CONFIG}, but only {len(held)} tensors")
    table = family.table(model, held)
    missing = table.keys() - held.keys()
    if missing:
        raise CheckpointError(f"{source}: the tensor {some(missing)} is missing")
    unknown = {name for name in held.keys() - table.keys() if not family.is_buffer(name)}
    if unknown:
        raise CheckpointError(
            f"{source}: the tensor {some(unknown)} is not one of a {family.name} model with this {CONFIG}",
            hint="a tensor that is not understood is refused rather than dropped",
        )
    for name, disk in table.items():
        if held[name] != disk.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(held[name])}, but {CONFIG} makes it {list(disk.shape)}"
            )
    return table


def described_by(path: Place, raw: Mapping[str, Any] | None = None) -> tuple[Family, ModelConfig, list[str]]:
    """The family, the model and the unread keys of the config.json at `path`, which holds `raw`.

    Raises:
        CheckpointError: when it is no JSON mapping, or describes no model that is known.
    """
    raw = read_json(path) if raw is None else raw
    family = family_of(raw, str(path))
    return family, family.read_config(raw, str(path)), family.unread_keys(raw)


def warn_of_unread(path: Place, keys: Sequence[str]) -> None:
    """One line for all keys of a config.json that nothing reads, if there are any."""
    if keys:
        logger.warning("%s: neither transformers nor mega reads %s; carried as it is", path, ", ".join(keys))


def has_weights(folder: Place) -> bool:
    """Whether there is any file of weights in a folder, of whatever kind."""
    return any(path.name.endswith((*_WEIGHTS, INDEX)) for path in folder.iterdir())


def read_config(folder: Place) -> dict[str, Any]:
    """The mapping in a folder's config.json.

    Raises:
        CheckpointError: when it is missing or no JSON mapping, with a hint about what the folder looks like.
    """
    path = folder / CONFIG
    if not path.is_file():
        hint = "expected a mega checkpoint, a run folder, or a HuggingFace folder with config.json and safetensors"
        if any(folder.glob("*.safetensors")):
            hint = "there are safetensors files: put the model's config.json beside them"
        raise CheckpointError(f"{folder}: there is no {CONFIG}", hint=hint)
    return read_json(path)


def read_json(path: Place) -> dict[str, Any]:
    """A JSON mapping.

    Raises:
        CheckpointError: when the file is anything else.
    """
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected keys with values, found {type(raw).__name__}")
    return raw


def _open_files(folder: Place) -> list[SafetensorsFile]:
    """The safetensors files of a folder, each tensor in one of them, as the index says if there is one."""
    if (folder / SINGLE).is_file():
        return [SafetensorsFile.open(folder / SINGLE)]
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{folder}: only pickled weights ({pickles[0]}), which can run code when they are loaded",
                hint="get the safetensors version, or convert where you trust it: transformers' save_pretrained writes it",
            )
        raise CheckpointError(
            f"{folder}: there are no weights, neither {SINGLE} nor {INDEX}",
            hint="was the download interrupted? A new model of this shape, with random weights, is "
            f"model.from={folder / CONFIG}",
        )
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    for tensor, name in weight_map.items():
        check_file_name(name, f"{index}: {tensor}")
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: {name} is missing, which holds {tensor}", hint="was the download interrupted?"
            )
    files = [SafetensorsFile.open(folder / name) for name in sorted(set(weight_map.values()))]
    held = {(tensor, file.path.name) for file in files for tensor in file.header.entries}
    for tensor, name in held ^ set(weight_map.items()):
        raise CheckpointError(f"{index}: disagrees with {name} on whether it holds {tensor}")
    return files


def check_file_name(name: object, source: str) -> None:
    """Refuse anything but the plain name of a safetensors file.

    Raises:
        CheckpointError: naming `source`.
    """
    plain = isinstance(name, str) and name.endswith(".safetensors") and name.isprintable()
    if not plain or {"/", "\\", ":"} & set(str(name)) or str(name).startswith("."):
        raise CheckpointError(f"{source}: {name!r} is not the plain name of a safetensors file in the same folder")


def encode_layout(headers: Mapping[str, bytes]) -> bytes:
    """`hf_layout.json`: the header of each safetensors file, as it was to the byte."""
    files = {name: text.decode() for name, text in headers.items()}
    return json.dumps({"files": files}, indent=1, ensure_ascii=False).encode()


def decode_layout(content: bytes) -> dict[str, Header]:
    """The headers in a `hf_layout.json`, {file name: Header}.

    Raises:
        CheckpointError: when it is not one, or names a file outside its folder.
    """
    try:
        files = {str(name): str(text).encode() for name, text in json.loads(content)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{LAYOUT}: damaged ({error})") from None
    for name in files:
        check_file_name(name, LAYOUT)
    return {name: Header.parse(text, Path(name)) for name, text in files.items()}


def _sorted(places: Iterable[Place]) -> list[Place]:
    return sorted(places, key=str)


def _travels(path: Place) -> bool:
    return path.is_file() and not path.name.endswith(_WEIGHTS) and path.name != LAYOUT
