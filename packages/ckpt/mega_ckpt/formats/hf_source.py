"""Weight source of a HuggingFace folder: config.json, and the weights of `hf_weight_files`, dequantized by
`quantized_weights`.

Nothing is loaded when a folder is opened; headers, names and shapes are all checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega_ckpt.canonical_tensors import abbreviate_name_list
from mega_ckpt.families import ModelFamily, detect_model_family, find_family_expressing_model, image_processor
from mega_ckpt.families.disk_layouts import DiskTensor
from mega_ckpt.families.trainer_naming import adapt_family_to_tensor_naming
from mega_ckpt.formats import litgpt
from mega_ckpt.formats.disk_source import DiskWeightSource, LazyTensor
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
from mega_ckpt.weight_source import (
    LOW,
    MOMENTS,
    ConvertedTrainingState,
    OptimizerNotConverted,
    TensorReader,
    make_trainer_state,
)
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, read_if_remote
from mega_common.progress_logging import logger

CONFIG = "config.json"
LAYOUT = "hf_layout.json"  # asset of a mega checkpoint: headers of the safetensors files that it was converted from
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
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.ckpt", "*.pth", "latest", "zero")
_TEMPLATES = "additional_chat_templates"


class HfSource(DiskWeightSource):
    """Reader of a model's weights from a HuggingFace folder; quantized weights are dequantized when read.
    The attribute `unread` lists the keys of config.json that neither transformers nor mega reads. `families` come from extensions.

    Raises:
        CheckpointError: from the constructor, naming file, key or tensor, for a folder that cannot be used.
    """

    def __init__(self, folder: Location, families: Sequence[ModelFamily] = ()) -> None:
        self.folder = folder
        self._raw = read_hf_config(folder)
        self.family, described, self.unread = load_hf_config(folder / CONFIG, self._raw, families)
        files = open_weight_files(folder)
        self._read_adam_state, tensors = files.read_adam_state, files.tensors
        self._naming = adapt_family_to_tensor_naming(self.family, tensors) if files.has_foreign_names else self.family
        headers = files.headers
        if files.has_foreign_names or described.vision is None:
            check_tensor_counts(self._naming, described, len(tensors) + described.mtp_layers, folder)
            inner = any(name.startswith(self._naming.inner_prefix[1]) for name in tensors)
            bare = tensors if inner else strip_common_prefix(tensors, self._naming.disk_tensor_table(described))
            headers = headers if bare.keys() == tensors.keys() else {}
            tensors = bare
        disk, quantization = dequantize_tensors(tensors, self._raw, folder)
        self._headers = {} if quantization else headers
        model = self._naming.restrict_to_stored(described, disk)
        table = build_checked_tensor_table(
            self._naming, model, {name: stored.shape for name, stored in disk.items()}, folder
        )
        super().__init__(folder, model, table, disk, quantization)
        self._table = table
        self._check_duplicates(table)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return all files of the HuggingFace folder other than weights.
        If the weights are read unchanged, `hf_layout.json` is included; it keeps the weight files' headers so that they
        can be written again byte for byte.
        """
        found = read_asset_files(self.folder)
        if self.quantization:
            found.pop(INDEX, None)
            found[CONFIG] = encode_json_mapping(
                {key: value for key, value in self._raw.items() if key not in SCHEME_KEYS}
            )
        if not self._headers:
            return found
        return {**found, LAYOUT: encode_hf_headers({name: header.text for name, header in self._headers.items()})}

    def read_training_state(self, dtype: torch.dtype) -> ConvertedTrainingState | None:
        """Return another trainer's optimizer state in the folder, converted to mega's layout; None if it has only a model.
        The state is for a run with weights of type `dtype`.

        Raises:
            OptimizerNotConverted: with the reason, if another trainer's state cannot be converted.
        """
        trained = self._read_adam_state()
        if trained is None:
            return None
        if not all(trained.moments.get(kind) for kind in MOMENTS):
            raise OptimizerNotConverted(trained.missing_reason)
        if trained.steps is None:
            raise OptimizerNotConverted("the number of steps of the Adam moments is missing")
        tensors: dict[str, TensorReader] = {kind: self._moment_source(trained.moments[kind], kind) for kind in MOMENTS}
        if dtype in LOW:
            tensors["main"] = self
        state = make_trainer_state(self.model, samples=trained.samples or 0, updates=trained.steps)
        return ConvertedTrainingState(trained.steps, state, tensors)

    def _moment_source(self, saved: Mapping[str, LazyTensor], kind: str) -> DiskWeightSource:
        """Return one of the moments, which have the layout of the weights."""
        moments = strip_common_prefix(saved, set(self._table))
        shared = self._naming.duplicate_tensors(self.model).items()
        copies = {copy for copy, name in shared if self._locations[name][0][0].name != copy}
        table = {name: disk for name, disk in self._table.items() if name not in copies}
        missing = table.keys() - moments.keys()
        if missing:
            raise OptimizerNotConverted(f"the optimizer state has no {kind} of {abbreviate_name_list(missing)}")
        check_tensor_table(
            table, {name: moments[name].shape for name in table}, self.folder, f"{kind} of a {self.family.name}"
        )
        return DiskWeightSource(self.folder, self.model, table, moments)

    def _check_duplicates(self, table: Mapping[str, DiskTensor]) -> None:
        """Check that both copies of a tensor that is stored twice, such as tied embeddings, are equal."""
        for copy, name in self._naming.duplicate_tensors(self.model).items():
            (original, _), *_ = self._locations[name]
            if copy not in table or copy == original.name:
                continue
            first, second = (self._disk[each].read() for each in (original.name, copy))
            if first.dtype != second.dtype or not torch.equal(first, second):
                tied = copy == self._naming.head
                raise CheckpointError(
                    f"{self.folder}: {copy} differs from {original.name}, but they must be equal by {CONFIG}"
                    + (" (tied embeddings)" if tied else ""),
                    hint='set "tie_word_embeddings": false in config.json to keep both' if tied else None,
                )


def build_checked_tensor_table(
    family: ModelFamily, model: ModelConfig, held: Mapping[str, TensorShape], source: object
) -> Mapping[str, DiskTensor]:
    """Return {disk name: DiskTensor} of `model` in the family's files, checked against a folder's tensors.
    The tensors `held` (disk names with shapes) must be exactly those of the model and buffers.

    Raises:
        CheckpointError: naming a tensor that is missing, unknown or of another shape.
    """
    check_tensor_counts(family, model, len(held), source)
    expected = family.disk_tensor_table(model, held)
    table = {name: disk.fit_to_shape(held.get(name, disk.shape)) for name, disk in expected.items()}
    weights = {name: shape for name, shape in held.items() if name in table or not family.is_buffer_tensor(name)}
    check_tensor_table(table, weights, source, family.name)
    return table


def check_tensor_counts(family: ModelFamily, model: ModelConfig, held: int, source: object) -> None:
    """Raise CheckpointError if a folder has fewer tensors than its config has layers, or experts stored one by one.
    It is a quick check before a tensor table is built; `held` is the number of tensors.

    Raises:
        CheckpointError: with the counts.
    """
    layers = model.num_layers + model.mtp_layers
    if layers > held:
        raise CheckpointError(f"{source}: {CONFIG} has {layers} layers, but there are only {held} tensors")
    if model.moe and family.has_per_expert_tensors and model.moe.num_experts > held:
        raise CheckpointError(
            f"{source}: {CONFIG} has {model.moe.num_experts} experts, but there are only {held} tensors"
        )


def check_tensor_table(
    table: Mapping[str, DiskTensor], held: Mapping[str, TensorShape], source: object, kind: str, config: str = CONFIG
) -> None:
    """Raise CheckpointError unless the tensors `held` in a folder have exactly the names and shapes of `table`.
    `kind` and `config` name the model family and its settings file in errors.

    Raises:
        CheckpointError: naming a tensor that is missing, unknown or of another shape.
    """
    missing = table.keys() - held.keys()
    if missing:
        others = held.keys() - table.keys()
        hint = (
            f"the files have the tensor {abbreviate_name_list(others)}, which a {kind} model with this {config} has not"
            if others
            else None
        )
        if min(_layer_numbers(missing)) > (last := max(_layer_numbers(held), default=-1)) >= 0:
            hint = f"{config} has more layers than the weights, which have {last + 1}: correct its number of layers"
        raise CheckpointError(f"{source}: the tensor {abbreviate_name_list(missing)} is missing", hint=hint)
    unknown = held.keys() - table.keys()
    if unknown:
        raise CheckpointError(
            f"{source}: the tensor {abbreviate_name_list(unknown)} is not part of a {kind} model with this {config}",
            hint="unknown tensors are never dropped: check that the files and the configuration belong together",
        )
    for name, disk in table.items():
        if held[name] != disk.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(held[name])}, but {config} requires {list(disk.shape)}"
            )


def _layer_numbers(names: Iterable[str]) -> set[int]:
    """Return the first number in each tensor name, as in model.layers.2.mlp, and -1 for names without one."""
    return {int(found[1]) if (found := re.search(r"\.(\d+)\.", name)) else -1 for name in names}


def load_hf_config(
    path: Location, raw: Mapping[str, Any] | None = None, families: Sequence[ModelFamily] = ()
) -> tuple[ModelFamily, ModelConfig, list[str]]:
    """Return the model family, the model configuration, and the keys of a config.json that nothing reads.
    The file is at `path`; `raw` is its content, if already read. `families` come from extensions.

    Raises:
        CheckpointError: when it is not a JSON mapping, or describes an unsupported model.
    """
    raw = read_json_mapping(path) if raw is None else raw
    family = detect_model_family(raw, str(path), families)
    model, unread = family.read_config_json(raw, str(path)), family.unread_keys(raw)
    return family, add_image_settings(model, partial(_read_sibling, path.parent)), unread


def add_image_settings(model: ModelConfig, read: Callable[[str], Mapping[str, Any]]) -> ModelConfig:
    """Return `model` with the image preprocessing settings of its HuggingFace folder.
    `read` returns the content of the JSON file of a given name, empty if the file is missing.

    Raises:
        CheckpointError: when a settings file is damaged.
    """
    if model.vision is None:
        return model
    vision = image_processor.update_config_from_image_processor(
        model.vision, image_processor.read_image_processor_settings(read)
    )
    vision = image_processor.add_image_prompt_text_settings(vision, read)
    return model.model_copy(update={"vision": vision})


def warn_of_unread_config_keys(path: Location, keys: Sequence[str], model: ModelConfig) -> None:
    """Log warnings of config.json keys that nothing reads, and of image settings that mega does not apply.

    The unread keys are `keys`; the image settings are those of the folder's image processor.
    """
    if keys:
        logger.warning("%s: neither transformers nor mega reads %s; kept unchanged", path, ", ".join(keys))
    if model.vision is not None:
        settings = image_processor.read_image_processor_settings(partial(_read_sibling, path.parent))
        if ignored := list(image_processor.find_unsupported_image_settings(model.vision, settings)):
            logger.warning(
                "%s: these settings of its image processor are not supported and ignored: %s",
                path.parent, ", ".join(ignored),
            )  # fmt: skip


def _read_sibling(folder: Location, name: str) -> dict[str, Any]:
    """Return the mapping in another file of a folder; empty if the file is missing."""
    return read_json_mapping(folder / name) if (folder / name).is_file() else {}


def has_weight_files(folder: Location) -> bool:
    """Return whether a folder has weight files of any format, even one that mega cannot read."""
    return any(path.name.endswith((*_WEIGHTS, INDEX)) for path in folder.iterdir())


def read_hf_config(folder: Location) -> dict[str, Any]:
    """Return the mapping in a HuggingFace folder's config.json, or one derived from LitGPT's model_config.yaml.

    Raises:
        CheckpointError: when it is missing or no JSON mapping, with a hint about what the folder looks like.
    """
    path = folder / CONFIG
    if not path.is_file() and (folder / litgpt.FILE).is_file():
        model = litgpt.read_litgpt_config(folder / litgpt.FILE)
        return find_family_expressing_model(model).write_config_json(model)
    if not path.is_file():
        hint = "expected a mega checkpoint, a run folder, or a HuggingFace folder with config.json and safetensors"
        weights = [found.name for pattern in _WEIGHT_PATTERNS for found in folder.glob(pattern)]
        if tokens := sorted(found.name for found in folder.glob("*.idx")):
            hint = f"the folder has token files ({tokens[0]}), not a model; " + hint
        elif weights:
            hint = f"the folder has weights ({weights[0]}): add the model's config.json"
        elif folder.name.startswith("mp_rank_"):
            hint = f"the folder has one rank of a Megatron checkpoint: give its parent, {folder.parent}"
        raise CheckpointError(f"{folder}: {CONFIG} is missing", hint=hint)
    return read_json_mapping(path)


def encode_hf_headers(headers: Mapping[str, bytes]) -> bytes:
    """Return the bytes of `hf_layout.json`, which has the headers of HuggingFace safetensors files.
    A mega checkpoint keeps in it the headers of the files that it was converted from. `headers` is {file name: header}.
    """
    files = {name: text.decode() for name, text in headers.items()}
    return json.dumps({"files": files}, indent=1, ensure_ascii=False).encode()


def decode_hf_headers(content: bytes) -> dict[str, SafetensorsHeader]:
    """Return {file name: header} from `hf_layout.json`, the headers of HuggingFace safetensors files.
    A mega checkpoint keeps in it the headers of the files that it was converted from.

    Raises:
        CheckpointError: when it is damaged, or names a file outside its folder.
    """
    try:
        files = {str(name): str(text).encode() for name, text in json.loads(content)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{LAYOUT}: damaged ({error})") from None
    for name in files:
        check_file_name(name, LAYOUT)
    return {name: SafetensorsHeader.parse_header(text, Path(name)) for name, text in files.items()}


def _sorted(paths: Iterable[Location]) -> list[Location]:
    return sorted(paths, key=str)


def check_settings_files(paths: Iterable[Location]) -> None:
    """Raise CheckpointError if a .json or .jinja path of a folder is a dangling link, a folder or a FIFO."""
    for path in paths:
        if isinstance(path, Path) and path.suffix in (".json", ".jinja") and not path.is_file():
            reason = "a dangling link" if path.is_symlink() and not path.exists() else "a folder or a FIFO"
            raise CheckpointError(
                f"{path}: must be a file, not {reason}", hint="copy or download it again, or remove it"
            )


def read_asset_files(folder: Location) -> dict[str, Path | bytes]:
    """Return {relative path: file or content} of the tokenizer, template and other files that accompany a model's weights.

    Raises:
        CheckpointError: as `check_settings_files`.
    """
    paths = _sorted(folder.iterdir())
    check_settings_files(paths)
    found = {path.name: path for path in paths if _is_asset_file(path)} | find_additional_templates(folder)
    return {name: read_if_remote(path) for name, path in found.items()}


def find_additional_templates(folder: Location) -> dict[str, Location]:
    """Return the chat templates of a folder other than the default one, by their relative paths."""
    templates = folder / _TEMPLATES
    paths = _sorted(templates.glob("*.jinja")) if templates.is_dir() else []
    return {f"{_TEMPLATES}/{path.name}": path for path in paths}


def _is_asset_file(path: Location) -> bool:
    return (
        path.is_file()
        and not path.name.endswith(_WEIGHTS)
        and path.name not in (LAYOUT, TORCH_INDEX, LATEST, "zero_to_fp32.py")
    )
