"""Weights to load from in any format: a mega checkpoint, a run's latest one, a HuggingFace or Megatron folder, a GGUF
file.

A `Source` speaks of canonical tensors only, and reads no more of a file than what is asked of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import abbreviate_names, canonical_tensors
from mega_ckpt.checkpoint import AVERAGE, BUFFERS, WEIGHTS
from mega_ckpt.formats.gguf_file import SUFFIX, is_gguf_file
from mega_ckpt.formats.gguf_source import GgufSource
from mega_ckpt.formats.hf_source import CONFIG, HfSource, has_weight_files, load_hf_config, warn_of_unread_keys
from mega_ckpt.formats.hf_weight_files import has_readable_weights, read_json_mapping
from mega_ckpt.formats.megatron_source import MegatronSource, is_megatron_folder
from mega_ckpt.formats.peft_adapter import CONFIG as PEFT_CONFIG
from mega_ckpt.formats.peft_adapter import read_peft_adapter
from mega_ckpt.formats.sentence_modules import find_transformer_folder
from mega_ckpt.lora_adapter import (
    AdaptedSource,
    SavedAdapter,
    averaged_weights,
    check_adapter_base,
    compute_row_norms,
    fingerprint_base,
    is_adapter_checkpoint,
)
from mega_ckpt.lora_tensors import MAGNITUDE, AdaptedModule
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.store import Checkpoint, latest_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorShape, crop_tensor
from mega_common.atomic_files import add_path_to_errors
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, parse_location, read_if_remote
from mega_common.progress_logging import logger

ASSETS = "assets"
VISION = "vision encoder"
# Tensors that some families carry as buffers, though they are weights of a part that mega has no code for.
_UNCOMPUTED = {
    VISION: r"(model\.)?(visual|vision_tower|vision_model)\.(?!(.*\.)?(head\..*|inv_freq|position_ids)$)",
    "multi-token prediction block": r"(model\.)?mtp\.",
}


class WeightSource(Protocol):
    """Interface of a model's weights by canonical name, each tensor whole and global."""

    @property
    def model(self) -> ModelConfig:
        """Configuration of the model."""

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical names, in the order of the forward pass."""

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global shape of a tensor."""

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor. The result may be a view of the file: copy it before changing it."""

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]`, and only the bytes it needs. The result may be a view of the file."""

    def buffer_names(self) -> Sequence[str]:
        """Return the tensors of a HuggingFace folder that are not weights (masks and so on), by their names there."""

    def read_buffer(self, name: str) -> Tensor:
        """Read one buffer, unchanged."""

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files that travel with the weights, {path inside the assets folder: file or content}."""


def cast_dtype(source: WeightSource, name: str, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after a cast to `wanted`: integers, and a router's selection bias (small steps, fp32
    on the hub too), keep theirs.
    """
    stored = source.tensor_dtype(name)
    kept = not stored.is_floating_point or name.endswith("e_score_correction_bias")
    return stored if wanted is None or kept else wanted


class MegaSource:
    """Weights in a mega checkpoint; with `averaged`, the averages kept by `train.ema`."""

    def __init__(self, checkpoint: Checkpoint, *, averaged: bool = False) -> None:
        self.checkpoint = checkpoint
        self._averaged = averaged_weights(checkpoint) if averaged else frozenset()
        self.model: ModelConfig = checkpoint.model
        held = {key.removeprefix(WEIGHTS) for key in checkpoint.tensor_keys(WEIGHTS)}
        self._names = _check_tensors(
            self.model, {name: checkpoint.tensor_shape(WEIGHTS + name) for name in held}, checkpoint.folder
        )

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical names, in the order of the forward pass."""
        return self._names

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global shape of a tensor."""
        return self.checkpoint.tensor_shape(WEIGHTS + name)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        return self.checkpoint.tensor_dtype(WEIGHTS + name)

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor."""
        shape = self.tensor_shape(name)
        return self.read_tensor_slice(name, (0,) * len(shape), shape)

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read a rectangle of a tensor: a view of the file, unless it is assembled from several chunks."""
        if name in self._averaged:
            return self.checkpoint.read_tensor(AVERAGE + name, offset, shape).to(self.tensor_dtype(name))
        key = WEIGHTS + name
        for chunk in self.checkpoint.tensor_entry(key).chunks:
            starts = [o - c for o, c in zip(offset, chunk.offset, strict=True)]
            if all(s >= 0 and s + n <= m for s, n, m in zip(starts, shape, chunk.shape, strict=True)):
                return crop_tensor(self.checkpoint.map_chunk(key, chunk), starts, shape)
        return self.checkpoint.read_tensor(key, offset, shape)

    def buffer_names(self) -> Sequence[str]:
        """Return the names of the buffers that came from a HuggingFace folder."""
        return [key.removeprefix(BUFFERS) for key in self.checkpoint.tensor_keys(BUFFERS)]

    def read_buffer(self, name: str) -> Tensor:
        """Read one buffer."""
        return self.checkpoint.read_tensor(BUFFERS + name)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files that travel with the weights, {path inside the assets folder: file or content}."""
        names = [name for name in self.checkpoint.manifest.files if name.startswith(f"{ASSETS}/")]
        places = {name.removeprefix(f"{ASSETS}/"): self.checkpoint.files / name for name in names}
        return {name: read_if_remote(path) for name, path in places.items()}


def _check_tensors(model: ModelConfig, held: Mapping[str, TensorShape], folder: Location) -> Sequence[str]:
    """Return the canonical names of `model`, after checking that `held` are exactly its tensors."""
    if model.num_layers > len(held):
        raise CheckpointError(f"{folder}: {model.num_layers} layers, but only {len(held)} tensors of weights")
    expected = canonical_tensors(model)
    for what, names in (
        ("has no tensor", expected.keys() - held.keys()),
        ("has a tensor", held.keys() - expected.keys()),
    ):
        if names:
            raise CheckpointError(
                f"{folder}: {what} {abbreviate_names(names)}", hint="its manifest says that it is another model"
            )
    for name, shape in expected.items():
        if held[name] != shape:
            raise CheckpointError(f"{folder}: {name} has shape {list(held[name])} instead of {list(shape)}")
    return list(expected)


def open_weight_source(
    path: str | Location, *, settings: Mapping[str, Any] | None = None, averaged: bool = False
) -> WeightSource:
    """Open the weights at `path`: a mega checkpoint, a run folder (its latest checkpoint), a HuggingFace or a Megatron
    folder, a GGUF file or a folder with one.

    `settings` are fields of `ModelConfig` that a checkpoint of Megatron lacks, or that replace what it says. `averaged` takes the
    averages that a run has kept of its weights (`train.ema`).

    Raises:
        CheckpointError: when it is none of these, or one that cannot be used.
    """
    folder = parse_location(path)
    if isinstance(folder, Path) and is_gguf_file(folder):
        return GgufSource(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        if folder.name.endswith(".nemo") and folder.exists():
            raise CheckpointError(
                f"{folder}: is an archive of NeMo", hint=f"tar xf {folder.name} -C FOLDER, and give that"
            )
        raise CheckpointError(
            f"{folder}: {what}",
            hint="give a mega checkpoint, a run folder, a HuggingFace or a Megatron folder, or a GGUF file",
        )
    if isinstance(folder, Path) and (inner := find_transformer_folder(folder)) is not None:
        logger.info("%s: sentence-transformers folder, whose transformer is read from %s", folder, inner.name)
        return open_weight_source(inner, settings=settings, averaged=averaged)
    if (folder / PEFT_CONFIG).is_file():
        if has_readable_weights(folder):  # transformers would load the adapter's base, and not these weights
            raise CheckpointError(
                f"{folder}: holds the weights of a model and an adapter ({PEFT_CONFIG}), and only one can be meant",
                hint="move the adapter's files into a folder of their own",
            )
        return _open_with_named_base(folder, read_json_mapping(folder / PEFT_CONFIG).get("base_model_name_or_path"))
    found = _find_checkpoint(folder)
    if found is not None:
        checkpoint = Checkpoint.open_folder(found)
        if is_adapter_checkpoint(checkpoint):
            return _open_with_named_base(found, checkpoint.trainer_state.get("base", {}).get("path"), averaged=averaged)
        return MegaSource(checkpoint, averaged=averaged)
    if averaged:
        raise CheckpointError(f"{folder}: has no averages of weights", hint="a run with train.ema keeps them")
    is_run = any((folder / name).exists() for name in ("checkpoints", "run.yaml"))
    if is_run and not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder}: a run folder without a complete checkpoint")
    if isinstance(folder, Path) and is_megatron_folder(folder):
        return MegatronSource(folder, settings)
    if isinstance(folder, Path) and not has_readable_weights(folder) and (inside := list(folder.glob(f"*{SUFFIX}"))):
        return GgufSource(_single_gguf_model(folder, inside))
    return HfSource(folder)


def load_with_adapter(path: str | Location, base: str | Location, *, averaged: bool = False) -> AdaptedSource:
    """Open the weights at `base` merged with the adapter at `path`, a run's or a PEFT folder.

    Raises:
        CheckpointError: when there is no adapter, or it was trained beside other weights.
    """
    folder = parse_location(path)
    held = open_weight_source(base)
    if (folder / PEFT_CONFIG).is_file():
        return AdaptedSource(held, read_peft_adapter(folder, held))
    found = _find_checkpoint(folder)
    if found is None or not is_adapter_checkpoint(checkpoint := Checkpoint.open_folder(found)):
        inside = [path.parent.name for path in folder.glob(f"*/{PEFT_CONFIG}")] if isinstance(folder, Path) else []
        raise CheckpointError(
            f"{folder}: holds no adapter",
            hint=f"give one of the adapters inside: {', '.join(sorted(inside))}"
            if inside
            else f"give a run with `lora`, or a folder with {PEFT_CONFIG}",
        )
    adapter = SavedAdapter.from_checkpoint(checkpoint, averaged=averaged)
    check_adapter_base(adapter.base_fingerprint, fingerprint_base(str(base), held), str(folder))
    return AdaptedSource(held, adapter)


def _open_with_named_base(folder: Location, base: object, *, averaged: bool = False) -> WeightSource:
    """Open an adapter merged into the base that it names."""
    hint = "mega ckpt merge-adapter BASE ADAPTER OUT puts the two together, wherever they are"
    if not isinstance(base, str):
        raise CheckpointError(f"{folder}: holds an adapter, and does not say beside which weights", hint=hint)
    try:
        open_weight_source(base)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: holds an adapter, whose base is not there: {error.message}", hint=hint
        ) from error
    return load_with_adapter(folder, base, averaged=averaged)


def read_model_config(path: str | Location, *, warn: bool = False) -> ModelConfig:
    """Return the model configuration at `path`: of any weights that `open_weight_source` opens, of a HuggingFace folder
    without weights, or of a config.json.

    With `warn`, `warn_of_unsupported_parts`.

    Raises:
        CheckpointError: when there is no model, or one that cannot be expressed.
    """
    folder = parse_location(path)
    config = folder if folder.name.endswith(".json") else folder / CONFIG
    if config is not folder and not (
        _find_checkpoint(folder) is None and config.is_file() and not has_weight_files(folder)
    ):
        source = open_weight_source(folder)
        if warn:
            warn_of_unsupported_parts(source)
        return source.model
    _, model, unread = load_hf_config(config)
    if warn:
        warn_of_unread_keys(config, unread, model)
    return model


def warn_of_unsupported_parts(source: WeightSource, *, training: bool = False) -> None:
    """Warn of config keys of a HuggingFace folder that nothing reads, and of parts of the model that mega does not run.

    Args:
        source: the weights to convert, to run or, with `training`, to start a run from.
        training: whether checkpoints of a run follow, which have no such parts.
    """
    if isinstance(source, HfSource):
        warn_of_unread_keys(source.folder / CONFIG, source.unread, source.model)
    fate = (
        "neither trained nor saved with the run" if training else "copied by a conversion, but neither run nor trained"
    )
    for part, names in find_unsupported_parts(source.buffer_names()).items():
        logger.warning("the %s of this model (%s) is not supported: it is %s", part, abbreviate_names(names), fate)


def find_unsupported_parts(buffers: Iterable[str]) -> dict[str, list[str]]:
    """Group the tensors in `buffers` that belong to parts of a model which mega does not run, by part."""
    found: dict[str, list[str]] = {}
    for name in buffers:
        part = next((part for part, pattern in _UNCOMPUTED.items() if re.match(pattern, name)), None)
        if part is not None:
            found.setdefault(part, []).append(name)
    return found


def _single_gguf_model(folder: Path, files: Sequence[Path]) -> Path:
    """Return the only GGUF model of a folder: its file, or the first of its split files."""
    firsts = [path for path in files if not re.search(r"-of-\d{5}\.gguf$", path.name) or "-00001-of-" in path.name]
    if len(firsts) != 1:
        names = ", ".join(sorted(path.name for path in firsts))
        raise CheckpointError(f"{folder}: holds several GGUF files: {names}", hint="name one of them")
    return firsts[0]


def resolve_checkpoint(path: str | Location) -> Location:
    """Return the mega checkpoint at `path`, or the latest one of the run there; else `path` itself."""
    folder = parse_location(path)
    return _find_checkpoint(folder) or folder


def _find_checkpoint(folder: Location) -> Location | None:
    if (folder / MANIFEST).is_file():
        return folder
    return latest_checkpoint(folder / "checkpoints") or latest_checkpoint(folder)


def load_weights(source: WeightSource, tensors: Mapping[str, ShardedTensor]) -> None:
    """Fill boxes of canonical tensors in place, cast to each box's dtype; reads only the ranges that the boxes cover.

    Raises:
        CheckpointError: when the source lacks a tensor or has it in another shape.
    """
    held = set(source.tensor_names())
    for name, sharded in tensors.items():
        if name not in held:
            raise CheckpointError(f"the weights to load have no tensor {name}", hint="they are of another model")
        if source.tensor_shape(name) != sharded.shape:
            raise CheckpointError(
                f"{name} has shape {list(source.tensor_shape(name))} in the weights to load, but {list(sharded.shape)} here",
                hint="they are of another model",
            )
        _fill_boxes(name, sharded, source.read_tensor_slice)


def load_adapter_weights(adapter: SavedAdapter, tensors: Mapping[str, ShardedTensor]) -> None:
    """Fill boxes of adapter tensors in place, from a saved adapter.

    Raises:
        CheckpointError: when it lacks one of them or has it in another shape.
    """
    for name, sharded in tensors.items():
        held = adapter.shapes.get(name)
        if held != sharded.shape:
            has = "no such tensor" if held is None else f"{list(held)}"
            raise CheckpointError(
                f"{name} is {list(sharded.shape)} here, and the adapter to start from has {has}",
                hint="lora.modules and lora.ranks must be those that it was trained with",
            )
        _fill_boxes(name, sharded, adapter.read_tensor_slice)


def init_dora_magnitudes(
    base: WeightSource, modules: Mapping[str, AdaptedModule], tensors: Mapping[str, ShardedTensor]
) -> None:
    """Fill the DoRA magnitudes in `tensors`, of new adapters, with the row norms of `base`."""
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
    """Write the files that travel with the weights into `folder`, for a training run to pass on."""
    for name, content in source.asset_files().items():
        write_file_durably(folder / name, content)


def write_file_durably(path: Path, content: Path | bytes) -> None:
    """Write or copy a small file and flush it to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        content = content.read_bytes()
    with add_path_to_errors(path), open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
