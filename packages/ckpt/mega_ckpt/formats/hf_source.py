"""Weight source of a HuggingFace folder: config.json, and the weights of `hf_weight_files`, dequantized by
`quantized_weights`.

Nothing is loaded when a folder is opened; headers, names and shapes are all checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega_ckpt.canonical_tensors import abbreviate_names
from mega_ckpt.families import ModelFamily, family_for_model, family_of_config, image_processor
from mega_ckpt.families.disk_layouts import DiskTensor
from mega_ckpt.families.trainer_naming import adapt_to_naming
from mega_ckpt.formats import litgpt
from mega_ckpt.formats.disk_source import DiskSource, LazyTensor
from mega_ckpt.formats.foreign_checkpoint import LATEST, strip_common_prefix
from mega_ckpt.formats.hf_weight_files import (
    INDEX,
    TORCH_INDEX,
    check_file_name,
    encode_json_mapping,
    open_weight_files,
    read_json_mapping,
)
from mega_ckpt.formats.quantized_weights import SCHEME_KEYS, dequantize_tensors
from mega_ckpt.formats.safetensors_file import SafetensorsHeader
from mega_ckpt.tensor_pieces import TensorShape
from mega_ckpt.training_state import (
    LOW,
    MOMENTS,
    ConvertedTraining,
    OptimizerNotConverted,
    TensorReader,
    make_trainer_state,
)
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, read_if_remote
from mega_common.progress_logging import logger

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
    """The weights in a HuggingFace folder, dequantized. `unread` are the keys of config.json that nothing reads.

    Raises:
        CheckpointError: from the constructor, naming file, key or tensor, for a folder that cannot be used.
    """

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._raw = read_hf_config(folder)
        self.family, described, self.unread = load_hf_config(folder / CONFIG, self._raw)
        files = open_weight_files(folder)
        self._read_adam_state, tensors = files.read_adam_state, files.tensors
        self._disk_family = adapt_to_naming(self.family, tensors) if files.has_foreign_names else self.family
        headers = files.headers
        if files.has_foreign_names or described.vision is None:
            check_tensor_counts(self._disk_family, described, len(tensors) + described.mtp_layers, folder)
            bare = strip_common_prefix(tensors, self._disk_family.disk_tensor_table(described))
            headers = headers if bare.keys() == tensors.keys() else {}
            tensors = bare
        disk, quantised = dequantize_tensors(tensors, self._raw, folder)
        self._headers = {} if quantised else headers
        model = self._disk_family.restrict_to_stored(described, disk)
        table = checked_tensor_table(
            self._disk_family, model, {name: stored.shape for name, stored in disk.items()}, folder
        )
        super().__init__(folder, model, table, disk, quantised)
        self._table = table
        self._check_duplicates(table)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return all files without weights, and the layout of the weight files if the weights are read from it."""
        paths = _sorted(self.folder.iterdir())
        check_settings_files(paths)
        found = {path.name: read_if_remote(path) for path in paths if _is_asset(path)}
        templates = self.folder / _TEMPLATES
        if templates.is_dir():
            found |= {f"{_TEMPLATES}/{path.name}": read_if_remote(path) for path in _sorted(templates.glob("*.jinja"))}
        if self.quantization:
            found.pop(INDEX, None)
            found[CONFIG] = encode_json_mapping(
                {key: value for key, value in self._raw.items() if key not in SCHEME_KEYS}
            )
        if not self._headers:
            return found
        return {**found, LAYOUT: encode_hf_layout({name: header.text for name, header in self._headers.items()})}

    def read_training_state(self, dtype: torch.dtype) -> ConvertedTraining | None:
        """Return the optimizer state for a run with weights of type `dtype`; None if only a model was saved.

        Raises:
            StaysBehindError: why it cannot be taken from what another trainer saved.
        """
        trained = self._read_adam_state()
        if trained is None:
            return None
        if not all(trained.moments.get(kind) for kind in MOMENTS):
            raise OptimizerNotConverted(trained.missing_reason)
        if trained.steps is None:
            raise OptimizerNotConverted("the moments do not say after how many steps they were saved")
        tensors: dict[str, TensorReader] = {kind: self._moment_source(trained.moments[kind], kind) for kind in MOMENTS}
        if dtype in LOW:
            tensors["main"] = self
        state = make_trainer_state(self.model, samples=trained.samples or 0, updates=trained.steps)
        return ConvertedTraining(trained.steps, state, tensors)

    def _moment_source(self, saved: Mapping[str, LazyTensor], kind: str) -> DiskSource:
        """Return one of the moments, which have the layout of the weights."""
        held = strip_common_prefix(saved, set(self._table))
        shared = self._disk_family.duplicate_tensors(self.model).items()
        copies = {copy for copy, name in shared if self._places[name][0][0].name != copy}
        table = {name: disk for name, disk in self._table.items() if name not in copies}
        missing = table.keys() - held.keys()
        if missing:
            raise OptimizerNotConverted(f"its optimizer has no {kind} of {abbreviate_names(missing)}")
        check_tensor_table(
            table, {name: held[name].shape for name in table}, self.folder, f"{kind} of a {self.family.name}"
        )
        return DiskSource(self.folder, self.model, table, held)

    def _check_duplicates(self, table: Mapping[str, DiskTensor]) -> None:
        """Check that a tensor stored twice, such as tied embeddings, is the same in both places."""
        for copy, name in self._disk_family.duplicate_tensors(self.model).items():
            (place, _), *_ = self._places[name]
            if copy not in table or copy == place.name:
                continue
            one, other = (self._disk[each].read() for each in (place.name, copy))
            if one.dtype != other.dtype or not torch.equal(one, other):
                tied = copy == self._disk_family.head
                raise CheckpointError(
                    f"{self.folder}: {copy} differs from {place.name}, but {CONFIG} says that they are "
                    + ("tied" if tied else "one"),
                    hint='set "tie_word_embeddings": false in config.json if both are meant' if tied else None,
                )


def checked_tensor_table(
    family: ModelFamily, model: ModelConfig, held: Mapping[str, TensorShape], source: object
) -> Mapping[str, DiskTensor]:
    """Return the family's disk tensors for `model`, after checking that `held` (disk names with shapes) are these and
    buffers.

    Raises:
        CheckpointError: naming a tensor that is missing, unknown or of another shape.
    """
    check_tensor_counts(family, model, len(held), source)
    table = family.disk_tensor_table(model, held)
    weights = {name: shape for name, shape in held.items() if name in table or not family.is_buffer_tensor(name)}
    check_tensor_table(table, weights, source, family.name)
    return table


def check_tensor_counts(family: ModelFamily, model: ModelConfig, held: int, source: object) -> None:
    """Check that `held` tensors suffice for the layers and experts of `model`, before a table is built.

    Raises:
        CheckpointError: naming the count.
    """
    layers = model.num_layers + model.mtp_layers
    if layers > held:
        raise CheckpointError(f"{source}: {layers} layers by {CONFIG}, but only {held} tensors")
    if model.moe and family.has_per_expert_tensors and model.moe.num_experts > held:
        raise CheckpointError(f"{source}: {model.moe.num_experts} experts by {CONFIG}, but only {held} tensors")


def check_tensor_table(
    table: Mapping[str, DiskTensor], held: Mapping[str, TensorShape], source: object, kind: str, config: str = CONFIG
) -> None:
    """Check that `held` (disk names with shapes) are the tensors of `table`, for a `kind` model by `config`.

    Raises:
        CheckpointError: naming a tensor that is missing, unknown or of another shape.
    """
    missing = table.keys() - held.keys()
    if missing:
        others = held.keys() - table.keys()
        hint = (
            f"the files hold {abbreviate_names(others)}, which is not one of a {kind} model with this {config}"
            if others
            else None
        )
        raise CheckpointError(f"{source}: the tensor {abbreviate_names(missing)} is missing", hint=hint)
    unknown = held.keys() - table.keys()
    if unknown:
        raise CheckpointError(
            f"{source}: the tensor {abbreviate_names(unknown)} is not one of a {kind} model with this {config}",
            hint="a tensor that is not understood is refused rather than dropped",
        )
    for name, disk in table.items():
        if held[name] != disk.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(held[name])}, but {config} makes it {list(disk.shape)}"
            )


def load_hf_config(path: Location, raw: Mapping[str, Any] | None = None) -> tuple[ModelFamily, ModelConfig, list[str]]:
    """Return the family, the model and the unread keys of the config.json at `path`, which holds `raw`.

    Raises:
        CheckpointError: when it is no JSON mapping, or describes no model that is known.
    """
    raw = read_json_mapping(path) if raw is None else raw
    family = family_of_config(raw, str(path))
    model, unread = family.read_config_json(raw, str(path)), family.unread_keys(raw)
    return family, with_image_settings(model, partial(_read_sibling, path.parent)), unread


def with_image_settings(model: ModelConfig, read: Callable[[str], Mapping[str, Any]]) -> ModelConfig:
    """Return the model with the image preprocessing settings of its folder; see `image_processor_section`.

    Raises:
        CheckpointError: when what it says is damaged.
    """
    if model.vision is None:
        return model
    vision = image_processor.apply_image_processor(model.vision, image_processor.image_processor_section(read))
    return model.model_copy(update={"vision": vision})


def warn_of_unread_keys(path: Location, keys: Sequence[str], model: ModelConfig) -> None:
    """Warn of keys of a config.json that nothing reads, and of image preprocessing settings that are not applied."""
    if keys:
        logger.warning("%s: neither transformers nor mega reads %s; carried as it is", path, ", ".join(keys))
    if model.vision is not None:
        said = image_processor.image_processor_section(partial(_read_sibling, path.parent))
        if undone := list(image_processor.unsupported_image_settings(model.vision, said)):
            told = "%s: images are made ready without %s, which its image processor has"
            logger.warning(told, path.parent, ", ".join(undone))


def _read_sibling(folder: Location, name: str) -> dict[str, Any]:
    """Return the mapping in another file of a folder; empty if there is none."""
    return read_json_mapping(folder / name) if (folder / name).is_file() else {}


def has_weight_files(folder: Location) -> bool:
    """Return whether there is any file of weights in a folder, of any kind."""
    return any(path.name.endswith((*_WEIGHTS, INDEX)) for path in folder.iterdir())


def read_hf_config(folder: Location) -> dict[str, Any]:
    """Return the mapping in a folder's config.json, or one derived from LitGPT's model_config.yaml.

    Raises:
        CheckpointError: when it is missing or no JSON mapping, with a hint about what the folder looks like.
    """
    path = folder / CONFIG
    if not path.is_file() and (folder / litgpt.FILE).is_file():
        model = litgpt.read_litgpt_config(folder / litgpt.FILE)
        return family_for_model(model).write_config_json(model)
    if not path.is_file():
        hint = "expected a mega checkpoint, a run folder, or a HuggingFace folder with config.json and safetensors"
        weights = [found.name for pattern in _FOUND for found in folder.glob(pattern)]
        if weights:
            hint = f"there are weights ({weights[0]}): put the model's config.json beside them"
        raise CheckpointError(f"{folder}: there is no {CONFIG}", hint=hint)
    return read_json_mapping(path)


def encode_hf_layout(headers: Mapping[str, bytes]) -> bytes:
    """Return `hf_layout.json`: the header of each safetensors file, byte for byte."""
    files = {name: text.decode() for name, text in headers.items()}
    return json.dumps({"files": files}, indent=1, ensure_ascii=False).encode()


def decode_hf_layout(content: bytes) -> dict[str, SafetensorsHeader]:
    """Return the headers in a `hf_layout.json`, {file name: SafetensorsHeader}.

    Raises:
        CheckpointError: when it is not one, or names a file outside its folder.
    """
    try:
        files = {str(name): str(text).encode() for name, text in json.loads(content)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{LAYOUT}: damaged ({error})") from None
    for name in files:
        check_file_name(name, LAYOUT)
    return {name: SafetensorsHeader.parse_header(text, Path(name)) for name, text in files.items()}


def _sorted(places: Iterable[Location]) -> list[Location]:
    return sorted(places, key=str)


def check_settings_files(paths: Iterable[Location]) -> None:
    """Check that settings and templates of a folder are files: one that cannot be read is not one that is absent.

    Raises:
        CheckpointError: naming a dangling link, or a folder or FIFO of such a name.
    """
    for path in paths:
        if isinstance(path, Path) and path.suffix in (".json", ".jinja") and not path.is_file():
            reason = "a link to a file that is not there" if path.is_symlink() and not path.exists() else "not a file"
            raise CheckpointError(f"{path}: is {reason}", hint="copy or download it again, or remove it")


def _is_asset(path: Location) -> bool:
    return (
        path.is_file()
        and not path.name.endswith(_WEIGHTS)
        and path.name not in (LAYOUT, TORCH_INDEX, LATEST, "zero_to_fp32.py")
    )
