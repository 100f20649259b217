"""Reading a HuggingFace folder: config.json, and weights as `hf_files` finds them and `quantised` decodes them.

Nothing is loaded when a folder is opened; headers, names and shapes are all checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega_ckpt.families import Family, family_for, family_of, image_processor
from mega_ckpt.families.dialects import spoken
from mega_ckpt.families.layouts import DiskTensor
from mega_ckpt.formats import litgpt
from mega_ckpt.formats.disk import DiskSource, Stored
from mega_ckpt.formats.foreign_state import LATEST, unprefixed
from mega_ckpt.formats.hf_files import INDEX, TORCH_INDEX, check_file_name, encode_json, open_weights, read_json
from mega_ckpt.formats.quantised import SCHEME_KEYS, dequantised
from mega_ckpt.formats.safetensors import Header
from mega_ckpt.names import some
from mega_ckpt.pieces import Shape
from mega_ckpt.training import LOW, MOMENTS, StaysBehindError, Tensors, Training, numbers
from mega_common.errors import CheckpointError
from mega_common.log import logger
from mega_common.model_config import ModelConfig
from mega_common.remote import Place, content_of

CONFIG = "config.json"
LAYOUT = "hf_layout.json"  # in a mega checkpoint's assets: the headers of the files that it was made from
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".ot",
    ".tmp",
    ".distcp",
    ".metadata",
)
_FOUND = ("*.safetensors", "*.bin", "*.ckpt", "*.pth", "latest", "zero")
_TEMPLATES = "additional_chat_templates"


class HfSource(DiskSource):
    """The weights in a HuggingFace folder; quantised ones as the numbers that they stand for. Its `unread` are the keys of
    config.json that nothing reads.

    Raises:
        CheckpointError: from the constructor, naming file, key or tensor, for a folder that cannot be used.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._raw = read_config(folder)
        self.family, described, self.unread = described_by(folder / CONFIG, self._raw)
        files = open_weights(folder)
        self._trained, tensors = files.trained, files.tensors
        self._spoken = spoken(self.family, tensors) if files.foreign else self.family
        headers = files.headers
        if files.foreign or described.vision is None:
            check_counts(self._spoken, described, len(tensors) + described.mtp_layers, folder)
            bare = unprefixed(tensors, self._spoken.table(described))
            headers = headers if bare.keys() == tensors.keys() else {}
            tensors = bare
        disk, quantised = dequantised(tensors, self._raw, folder)
        self._headers = {} if quantised else headers
        model = self._spoken.as_held(described, disk)
        table = checked_table(self._spoken, model, {name: stored.shape for name, stored in disk.items()}, folder)
        super().__init__(folder, model, table, disk, quantised)
        self._table = table
        self._check_copies(table)

    def assets(self) -> Mapping[str, Path | bytes]:
        """Every file that holds no weights, and how the weights were laid out in theirs, if that is how they are read."""
        found = {path.name: content_of(path) for path in _sorted(self.folder.iterdir()) if _travels(path)}
        templates = self.folder / _TEMPLATES
        if templates.is_dir():
            found |= {f"{_TEMPLATES}/{path.name}": content_of(path) for path in _sorted(templates.glob("*.jinja"))}
        if self.quantised:
            found.pop(INDEX, None)
            found[CONFIG] = encode_json({key: value for key, value in self._raw.items() if key not in SCHEME_KEYS})
        if not self._headers:
            return found
        return {**found, LAYOUT: encode_layout({name: header.text for name, header in self._headers.items()})}

    def training(self, dtype: torch.dtype) -> Training | None:
        """What a run with weights of type `dtype` goes on from beside them; None where only a model was saved.

        Raises:
            StaysBehindError: why it cannot be taken from what another trainer saved.
        """
        trained = self._trained()
        if trained is None:
            return None
        if not all(trained.moments.get(kind) for kind in MOMENTS):
            raise StaysBehindError(trained.lacks)
        if trained.steps is None:
            raise StaysBehindError("the moments do not say after how many steps they were saved")
        tensors: dict[str, Tensors] = {kind: self._moments(trained.moments[kind], kind) for kind in MOMENTS}
        if dtype in LOW:
            tensors["main"] = self
        state = numbers(self.model, samples=trained.samples or 0, updates=trained.steps)
        return Training(trained.steps, state, tensors)

    def _moments(self, saved: Mapping[str, Stored], kind: str) -> DiskSource:
        """One of the moments, which lie as the weights do."""
        held = unprefixed(saved, set(self._table))
        shared = self._spoken.copies(self.model).items()
        copies = {copy for copy, name in shared if self._places[name][0][0].name != copy}
        table = {name: disk for name, disk in self._table.items() if name not in copies}
        missing = table.keys() - held.keys()
        if missing:
            raise StaysBehindError(f"its optimizer has no {kind} of {some(missing)}")
        check_table(table, {name: held[name].shape for name in table}, self.folder, f"{kind} of a {self.family.name}")
        return DiskSource(self.folder, self.model, table, held)

    def _check_copies(self, table: Mapping[str, DiskTensor]) -> None:
        """A folder may store a tensor twice, such as tied embeddings; the two must then be one."""
        for copy, name in self._spoken.copies(self.model).items():
            (place, _), *_ = self._places[name]
            if copy not in table or copy == place.name:
                continue
            one, other = (self._disk[each].read() for each in (place.name, copy))
            if one.dtype != other.dtype or not torch.equal(one, other):
                tied = copy == self._spoken.head
                raise CheckpointError(
                    f"{self.folder}: {copy} differs from {place.name}, but {CONFIG} says that they are "
                    + ("tied" if tied else "one"),
                    hint='set "tie_word_embeddings": false in config.json if both are meant' if tied else None,
                )


def checked_table(
    family: Family, model: ModelConfig, held: Mapping[str, Shape], source: object
) -> Mapping[str, DiskTensor]:
    """The family's table for `model`, when `held` (disk names with shapes) are its tensors, beside buffers.

    Raises:
        CheckpointError: naming a tensor that is missing, unknown or of another shape.
    """
    check_counts(family, model, len(held), source)
    table = family.table(model, held)
    weights = {name: shape for name, shape in held.items() if name in table or not family.is_buffer(name)}
    check_table(table, weights, source, family.name)
    return table


def check_counts(family: Family, model: ModelConfig, held: int, source: object) -> None:
    """Check that `model` has no more layers and experts than `held` tensors can be of, before a table of it is made.

    Raises:
        CheckpointError: naming the count.
    """
    layers = model.num_layers + model.mtp_layers
    if layers > held:
        raise CheckpointError(f"{source}: {layers} layers by {CONFIG}, but only {held} tensors")
    if model.moe and family.by_expert and model.moe.num_experts > held:
        raise CheckpointError(f"{source}: {model.moe.num_experts} experts by {CONFIG}, but only {held} tensors")


def check_table(
    table: Mapping[str, DiskTensor], held: Mapping[str, Shape], source: object, kind: str, config: str = CONFIG
) -> None:
    """Check that `held` (disk names with shapes) are the tensors of `table`, that of a `kind` model by `config`.

    Raises:
        CheckpointError: naming a tensor that is missing, unknown or of another shape.
    """
    missing = table.keys() - held.keys()
    if missing:
        others = held.keys() - table.keys()
        hint = (
            f"the files hold {some(others)}, which is not one of a {kind} model with this {config}" if others else None
        )
        raise CheckpointError(f"{source}: the tensor {some(missing)} is missing", hint=hint)
    unknown = held.keys() - table.keys()
    if unknown:
        raise CheckpointError(
            f"{source}: the tensor {some(unknown)} is not one of a {kind} model with this {config}",
            hint="a tensor that is not understood is refused rather than dropped",
        )
    for name, disk in table.items():
        if held[name] != disk.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(held[name])}, but {config} makes it {list(disk.shape)}"
            )


def described_by(path: Place, raw: Mapping[str, Any] | None = None) -> tuple[Family, ModelConfig, list[str]]:
    """The family, the model and the unread keys of the config.json at `path`, which holds `raw`.

    Raises:
        CheckpointError: when it is no JSON mapping, or describes no model that is known.
    """
    raw = read_json(path) if raw is None else raw
    family = family_of(raw, str(path))
    model, unread = family.read_config(raw, str(path)), family.unread_keys(raw)
    return family, with_images(model, partial(_beside, path.parent)), unread


def with_images(model: ModelConfig, read: Callable[[str], Mapping[str, Any]]) -> ModelConfig:
    """The model with its images made ready as its folder says: see `image_processor.section`.

    Raises:
        CheckpointError: when what it says is damaged.
    """
    if model.vision is None:
        return model
    vision = image_processor.prepared(model.vision, image_processor.section(read))
    return model.model_copy(update={"vision": vision})


def warn_of_unread(path: Place, keys: Sequence[str], model: ModelConfig) -> None:
    """A line for all keys of a config.json that nothing reads, and one for what is said of images beside it and is not done."""
    if keys:
        logger.warning("%s: neither transformers nor mega reads %s; carried as it is", path, ", ".join(keys))
    if model.vision is not None:
        said = image_processor.section(partial(_beside, path.parent))
        if undone := list(image_processor.undone(model.vision, said)):
            told = "%s: images are made ready without %s, which its image processor has"
            logger.warning(told, path.parent, ", ".join(undone))


def _beside(folder: Place, name: str) -> dict[str, Any]:
    """The mapping in another file of a folder; empty where there is none."""
    return read_json(folder / name) if (folder / name).is_file() else {}


def has_weights(folder: Place) -> bool:
    """Whether there is any file of weights in a folder, of whatever kind."""
    return any(path.name.endswith((*_WEIGHTS, INDEX)) for path in folder.iterdir())


def read_config(folder: Place) -> dict[str, Any]:
    """The mapping in a folder's config.json, or one that says what LitGPT's own description does.

    Raises:
        CheckpointError: when it is missing or no JSON mapping, with a hint about what the folder looks like.
    """
    path = folder / CONFIG
    if not path.is_file() and (folder / litgpt.FILE).is_file():
        model = litgpt.model_of(folder / litgpt.FILE)
        return family_for(model).write_config(model)
    if not path.is_file():
        hint = "expected a mega checkpoint, a run folder, or a HuggingFace folder with config.json and safetensors"
        weights = [found.name for pattern in _FOUND for found in folder.glob(pattern)]
        if weights:
            hint = f"there are weights ({weights[0]}): put the model's config.json beside them"
        raise CheckpointError(f"{folder}: there is no {CONFIG}", hint=hint)
    return read_json(path)


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
    return (
        path.is_file()
        and not path.name.endswith(_WEIGHTS)
        and path.name not in (LAYOUT, TORCH_INDEX, LATEST, "zero_to_fp32.py")
    )
