"""Sources of weights in any format: a mega checkpoint, a run's latest one, a HuggingFace or Megatron folder, a GGUF
file.

A `WeightSource` has canonical tensors, and reads only the requested bytes of its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import abbreviate_name_list, canonical_tensors
from mega_ckpt.checkpoint import AVERAGE, BUFFERS, WEIGHTS
from mega_ckpt.families import ModelFamily
from mega_ckpt.formats.gguf_file import SUFFIX, is_gguf_file
from mega_ckpt.formats.gguf_source import GgufSource
from mega_ckpt.formats.hf_source import CONFIG, HfSource, has_weight_files, load_hf_config, warn_of_unread_config_keys
from mega_ckpt.formats.hf_weight_files import has_readable_weights, read_json_mapping
from mega_ckpt.formats.megatron_source import MegatronSource, is_megatron_folder
from mega_ckpt.formats.peft_adapter import CONFIG as PEFT_CONFIG
from mega_ckpt.formats.peft_adapter import read_peft_adapter
from mega_ckpt.formats.transformers_module import TransformersSource, read_transformers_model_config
from mega_ckpt.lora_adapter import (
    AVERAGES_HINT,
    AdaptedWeightSource,
    SavedAdapter,
    check_adapter_base,
    compute_row_norms,
    find_ema_weight_names,
    fingerprint_base_model,
    is_adapter_checkpoint,
)
from mega_ckpt.lora_tensors import MAGNITUDE, AdaptedModule
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.store import Checkpoint, latest_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorShape, crop_tensor
from mega_ckpt.weight_source import WeightSource as WeightSource
from mega_ckpt.weight_source import find_unsupported_parts as find_unsupported_parts
from mega_ckpt.weight_source import write_file_durably as write_file_durably
from mega_common.bounded_parsing import read_json_file
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, parse_location, read_if_remote
from mega_common.progress_logging import logger

Implementation = Literal["mega", "transformers"]
ASSETS = "assets"
_SENTENCE_MODULES = "modules.json"  # list of the modules of sentence-transformers
_MODEL_HINT = "the manifest describes another model than the weights: save the checkpoint again"


Source = WeightSource  # deprecated name


class MegaWeightSource:
    """Reader of a model's weights from a mega checkpoint.
    With `averaged`, weights are the exponential moving averages kept by `train.ema`.
    """

    def __init__(self, checkpoint: Checkpoint, *, averaged: bool = False) -> None:
        self.checkpoint = checkpoint
        self._averaged = find_ema_weight_names(checkpoint) if averaged else frozenset()
        self.model: ModelConfig = checkpoint.model
        shapes = {key.removeprefix(WEIGHTS): checkpoint.tensor_shape(key) for key in checkpoint.tensor_keys(WEIGHTS)}
        self._names = _check_tensors(self.model, shapes, checkpoint.folder)

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical tensor names of the checkpoint's model, in the order of the forward pass."""
        return self._names

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global (unsharded) shape of a tensor of the mega checkpoint."""
        return self.checkpoint.tensor_shape(WEIGHTS + name)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor of the mega checkpoint."""
        return self.checkpoint.tensor_dtype(WEIGHTS + name)

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor of the mega checkpoint, by its canonical name."""
        shape = self.tensor_shape(name)
        return self.read_tensor_slice(name, (0,) * len(shape), shape)

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of the canonical tensor `name` of a mega checkpoint.
        The result is a view of the file, unless it is assembled from several chunks.
        """
        if name in self._averaged:
            return self.checkpoint.read_tensor(AVERAGE + name, offset, shape).to(self.tensor_dtype(name))
        key = WEIGHTS + name
        for chunk in self.checkpoint.tensor_entry(key).chunks:
            starts = [o - c for o, c in zip(offset, chunk.offset, strict=True)]
            if all(s >= 0 and s + n <= m for s, n, m in zip(starts, shape, chunk.shape, strict=True)):
                return crop_tensor(self.checkpoint.mmap_tensor_chunk(key, chunk), starts, shape)
        return self.checkpoint.read_tensor(key, offset, shape)

    def buffer_names(self) -> Sequence[str]:
        """Return the names of the buffers (tensors that are not weights) that came from a HuggingFace folder."""
        return [key.removeprefix(BUFFERS) for key in self.checkpoint.tensor_keys(BUFFERS)]

    def read_buffer(self, name: str) -> Tensor:
        """Read one buffer (a tensor that is not a weight) of a mega checkpoint, unchanged."""
        return self.checkpoint.read_tensor(BUFFERS + name)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files that accompany the weights of a mega checkpoint.
        They are the tokenizer, config.json and so on, as {relative path: file or content}.
        """
        names = [name for name in self.checkpoint.manifest.files if name.startswith(f"{ASSETS}/")]
        return {name.removeprefix(f"{ASSETS}/"): read_if_remote(self.checkpoint.files / name) for name in names}


def _check_tensors(model: ModelConfig, shapes: Mapping[str, TensorShape], folder: Location) -> Sequence[str]:
    """Return the canonical names of `model`, after checking that `shapes` are those of its tensors."""
    if model.num_layers > len(shapes):
        raise CheckpointError(f"{folder}: has {model.num_layers} layers, but only {len(shapes)} tensors of weights")
    expected = canonical_tensors(model)
    if missing := expected.keys() - shapes.keys():
        raise CheckpointError(f"{folder}: the tensor {abbreviate_name_list(missing)} is missing", hint=_MODEL_HINT)
    if unknown := shapes.keys() - expected.keys():
        raise CheckpointError(
            f"{folder}: the tensor {abbreviate_name_list(unknown)} is not part of the model", hint=_MODEL_HINT
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(f"{folder}: {name} has shape {list(shapes[name])} instead of {list(shape)}")
    return list(expected)


def open_weight_source(
    path: str | Location,
    *,
    settings: Mapping[str, Any] | None = None,
    averaged: bool = False,
    implementation: Implementation = "mega",
    families: Sequence[ModelFamily] = (),
) -> WeightSource:
    """Open the weights of a model at `path`, in any format that mega reads.
    It is a mega checkpoint, a run folder (its latest checkpoint), a HuggingFace or a Megatron folder, a GGUF file or a
    folder with one.

    `settings` are fields of `ModelConfig` that are missing in a Megatron checkpoint, or override it. `averaged` selects
    the exponential moving averages of the weights that a run keeps (`train.ema`). `implementation: transformers` opens a
    HuggingFace folder as a module of transformers, with the tensor names of that module. `families` come from extensions.

    Raises:
        CheckpointError: when it is none of these, damaged or not supported.
    """
    folder = parse_location(path)
    if isinstance(folder, Path) and is_gguf_file(folder):
        return GgufSource(folder)
    if not folder.is_dir():
        problem = "must be a folder, not a file" if folder.exists() else "no such folder"
        if folder.name.endswith(".nemo") and folder.exists():
            raise CheckpointError(
                f"{folder}: a NeMo archive must be unpacked first",
                hint=f"run tar xf {folder.name} -C FOLDER, and give FOLDER",
            )
        raise CheckpointError(
            f"{folder}: {problem}",
            hint="give a mega checkpoint, a run folder, a HuggingFace or a Megatron folder, or a GGUF file",
        )
    if isinstance(folder, Path) and (inner := _find_transformer_folder(folder)) is not None:
        logger.info("%s: sentence-transformers folder, whose transformer is read from %s", folder, inner.name)
        return open_weight_source(inner, settings=settings, averaged=averaged, families=families)
    if (folder / PEFT_CONFIG).is_file():
        if has_readable_weights(folder):  # transformers would ignore these weights and load the adapter's base
            raise CheckpointError(
                f"{folder}: a folder with an adapter ({PEFT_CONFIG}) must not have weights of a model",
                hint="move the adapter's files to a separate folder",
            )
        return _open_with_named_base(folder, read_json_mapping(folder / PEFT_CONFIG).get("base_model_name_or_path"))
    found = _find_checkpoint(folder)
    if found is not None:
        checkpoint = Checkpoint.open_folder(found)
        if is_adapter_checkpoint(checkpoint):
            return _open_with_named_base(found, checkpoint.trainer_state.get("base", {}).get("path"), averaged=averaged)
        return MegaWeightSource(checkpoint, averaged=averaged)
    if averaged:
        raise CheckpointError(f"{folder}: has no exponential moving average (EMA) of the weights", hint=AVERAGES_HINT)
    if any((folder / name).exists() for name in ("checkpoints", "run.yaml")) and not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder}: the run has no complete checkpoint", hint="train to its first checkpoint")
    if isinstance(folder, Path) and is_megatron_folder(folder):
        return MegatronSource(folder, settings)
    if isinstance(folder, Path) and not has_readable_weights(folder) and (inside := list(folder.glob(f"*{SUFFIX}"))):
        return GgufSource(_single_gguf_model(folder, inside))
    if implementation == "transformers":
        return TransformersSource(folder)
    return HfSource(folder, families)


open_source = open_weight_source  # deprecated name


def _find_transformer_folder(folder: Path) -> Path | None:
    """Return the subfolder of the transformer in a folder of sentence-transformers, such as `0_Transformer`; else None.

    Raises:
        CheckpointError: when `modules.json` is not JSON, or names a folder that is missing or elsewhere.
    """
    if not (folder / _SENTENCE_MODULES).is_file() or (folder / "config.json").exists():
        return None
    listing = read_json_file(folder / _SENTENCE_MODULES, CheckpointError)
    first = listing[0] if isinstance(listing, list) and listing else None
    name = first.get("path") if isinstance(first, dict) else None
    if not isinstance(name, str) or not name:
        return None
    inner = folder / name
    if not inner.resolve().is_relative_to(folder.resolve()) or inner.resolve() == folder.resolve():
        raise CheckpointError(f"{folder / _SENTENCE_MODULES}: path {name!r} must be inside the folder")
    if not inner.is_dir():
        raise CheckpointError(
            f"{folder / _SENTENCE_MODULES}: path {name!r} must be a folder", hint="download the folder again"
        )
    return inner


def open_weights_with_adapter(
    path: str | Location, base: str | Location, *, averaged: bool = False, families: Sequence[ModelFamily] = ()
) -> AdaptedWeightSource:
    """Open the weights at `base` merged with the LoRA adapter at `path`.
    The adapter is a mega run or checkpoint, or a PEFT folder; `families` come from extensions.

    Raises:
        CheckpointError: when there is no adapter, or it was trained on other weights.
    """
    folder = parse_location(path)
    base_source = open_weight_source(base, families=families)
    if (folder / PEFT_CONFIG).is_file():
        return AdaptedWeightSource(base_source, read_peft_adapter(folder, base_source))
    found = _find_checkpoint(folder)
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder", hint="give the folder of an adapter, or a run with `lora`")
    if found is None or not is_adapter_checkpoint(checkpoint := Checkpoint.open_folder(found)):
        inside = [path.parent.name for path in folder.glob(f"*/{PEFT_CONFIG}")] if isinstance(folder, Path) else []
        raise CheckpointError(
            f"{folder}: must be an adapter, found neither {PEFT_CONFIG} nor a checkpoint of an adapter",
            hint=f"give one of the adapters inside: {', '.join(sorted(inside))}"
            if inside
            else f"give a run with `lora`, or a folder with {PEFT_CONFIG}",
        )
    adapter = SavedAdapter.from_checkpoint(checkpoint, averaged=averaged)
    check_adapter_base(adapter.base_fingerprint, fingerprint_base_model(str(base), base_source), str(folder))
    return AdaptedWeightSource(base_source, adapter)


def _open_with_named_base(folder: Location, base: object, *, averaged: bool = False) -> WeightSource:
    """Open an adapter merged into the base that it names."""
    hint = "merge it with its base: mega ckpt merge-adapter BASE ADAPTER OUT"
    if not isinstance(base, str):
        raise CheckpointError(f"{folder}: the adapter does not name its base", hint=hint)
    try:
        open_weight_source(base)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: the base of the adapter cannot be opened: {error.message}", hint=hint
        ) from error
    return open_weights_with_adapter(folder, base, averaged=averaged)


def read_model_config(
    path: str | Location,
    *,
    warn: bool = False,
    implementation: Implementation = "mega",
    families: Sequence[ModelFamily] = (),
) -> ModelConfig:
    """Return the model configuration at `path`.

    It may be that of any weights that `open_weight_source` opens, of a HuggingFace folder without weights, or of a
    config.json. With `warn`, unsupported parts are logged (`warn_of_unsupported_parts`). `families` come from
    extensions.

    Raises:
        CheckpointError: when there is no model, or an unsupported one.
    """
    folder = parse_location(path)
    config = folder if folder.name.endswith(".json") else folder / CONFIG
    if implementation == "transformers" and _find_checkpoint(folder) is None:
        return read_transformers_model_config(read_json_mapping(config))
    if config is not folder and not (
        _find_checkpoint(folder) is None and config.is_file() and not has_weight_files(folder)
    ):
        source = open_weight_source(folder, families=families)
        if warn:
            warn_of_unsupported_parts(source)
        return source.model
    _, model, unread = load_hf_config(config, families=families)
    if warn:
        warn_of_unread_config_keys(config, unread, model)
    return model


def warn_of_unsupported_parts(source: WeightSource, *, training: bool = False) -> None:
    """Log warnings of parts of a model that mega does not read or run.
    They are config.json keys of a HuggingFace folder that nothing reads, and components of the model that mega does not
    run.

    Args:
        source: the weights to convert, to run or, with `training`, to start a run from.
        training: a training run starts from them; its checkpoints lack these parts.
    """
    if isinstance(source, HfSource):
        warn_of_unread_config_keys(source.folder / CONFIG, source.unread, source.model)
    effect = (
        "neither trained nor saved with the run" if training else "copied by a conversion, but neither run nor trained"
    )
    for part, names in find_unsupported_parts(source.buffer_names()).items():
        logger.warning(
            "the %s of this model (%s) is not supported: it is %s", part, abbreviate_name_list(names), effect
        )


def _single_gguf_model(folder: Path, files: Sequence[Path]) -> Path:
    """Return the only GGUF model of a folder: its file, or the first of its split files."""
    firsts = [path for path in files if not re.search(r"-of-\d{5}\.gguf$", path.name) or "-00001-of-" in path.name]
    if len(firsts) != 1:
        names = ", ".join(sorted(path.name for path in firsts))
        raise CheckpointError(f"{folder}: has several GGUF files: {names}", hint="give one of the files")
    return firsts[0]


def resolve_run_to_checkpoint(path: str | Location) -> Location:
    """Return the mega checkpoint at `path`, or the latest one if `path` is a run folder; else `path` itself."""
    folder = parse_location(path)
    return _find_checkpoint(folder) or folder


def _find_checkpoint(folder: Location) -> Location | None:
    if (folder / MANIFEST).is_file():
        return folder
    return latest_checkpoint(folder / "checkpoints") or latest_checkpoint(folder)


def load_weights(source: WeightSource, tensors: Mapping[str, ShardedTensor]) -> None:
    """Fill this rank's slices of canonical tensors in place from the weights of `source`.
    They are cast to each slice's dtype. Only the ranges that the slices contain are read.

    Raises:
        CheckpointError: when the source lacks a tensor or has it in another shape.
    """
    hint = (
        "give weights of a model of the same size and settings, or take the settings from the folder of the weights:"
        " model: {from: FOLDER}, without other keys"
    )
    if missing := tensors.keys() - set(source.tensor_names()):
        raise CheckpointError(
            f"the weights to load have no tensor {abbreviate_name_list(missing)}, which the model requires", hint=hint
        )
    for name, sharded in tensors.items():
        if source.tensor_shape(name) != sharded.shape:
            raise CheckpointError(
                f"{name} has shape {list(source.tensor_shape(name))} in the weights to load, but the model requires "
                f"{list(sharded.shape)}",
                hint=hint,
            )
        _fill_boxes(name, sharded, source.read_tensor_slice)


def load_adapter_weights(adapter: SavedAdapter, tensors: Mapping[str, ShardedTensor]) -> None:
    """Fill this rank's slices of LoRA adapter tensors in place from a saved adapter.

    Raises:
        CheckpointError: when it lacks one of them or has it in another shape.
    """
    for name, sharded in tensors.items():
        saved = adapter.shapes.get(name)
        if saved != sharded.shape:
            problem = "is missing" if saved is None else f"has shape {list(saved)}"
            raise CheckpointError(
                f"{name} {problem} in the adapter to start from, but this run requires {list(sharded.shape)}",
                hint="set lora.modules and lora.ranks as the adapter was trained",
            )
        _fill_boxes(name, sharded, adapter.read_tensor_slice)


def init_dora_magnitudes(
    base: WeightSource, modules: Mapping[str, AdaptedModule], tensors: Mapping[str, ShardedTensor]
) -> None:
    """Fill this rank's slices of DoRA magnitudes in `tensors` with the row norms of a base model's weights.
    They are filled in place. Other tensors are left alone.
    """
    for name, sharded in tensors.items():
        if name.endswith(MAGNITUDE):
            (weight,) = modules[name.removesuffix(MAGNITUDE)].weights
            _fill_boxes(weight, sharded, lambda matrix, offset, shape: compute_row_norms(base, matrix, *offset, *shape))


@torch.no_grad()
def _fill_boxes(name: str, sharded: ShardedTensor, read: Callable[[str, TensorShape, TensorShape], Tensor]) -> None:
    """Copy the slice that `read` returns into each box."""
    for box in sharded.boxes:
        box.tensor.copy_(read(name, box.offset, tuple(box.tensor.shape)))


def copy_assets(source: WeightSource, folder: Path) -> None:
    """Write the files that accompany the weights of a model into `folder`.
    They are the tokenizer, config.json and so on, for a training run to copy into its checkpoints.
    """
    for name, content in source.asset_files().items():
        write_file_durably(folder / name, content)
