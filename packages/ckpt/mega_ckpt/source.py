"""Weights to load from, whatever they are stored as: a checkpoint of mega, a run's newest one, a folder of
HuggingFace or Megatron, a GGUF file.

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

from mega_ckpt.adapter import (
    AdaptedSource,
    Adapter,
    averaged_names,
    base_of,
    check_base,
    is_adapter_checkpoint,
    row_lengths,
)
from mega_ckpt.checkpoint import AVERAGE, BUFFERS, WEIGHTS
from mega_ckpt.formats.gguf import GgufSource
from mega_ckpt.formats.gguf_file import SUFFIX, is_gguf
from mega_ckpt.formats.hf import CONFIG, HfSource, described_by, has_weights, warn_of_unread
from mega_ckpt.formats.hf_files import holds_weights, read_json
from mega_ckpt.formats.megatron import MegatronSource, is_megatron
from mega_ckpt.formats.peft import CONFIG as PEFT_CONFIG
from mega_ckpt.formats.peft import read_peft
from mega_ckpt.lora import MAGNITUDE, Adapted
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.names import some, tensors_of
from mega_ckpt.pieces import Shape, Sharded, crop
from mega_ckpt.store import Checkpoint, latest
from mega_common.errors import CheckpointError
from mega_common.files import naming
from mega_common.log import logger
from mega_common.model_config import ModelConfig
from mega_common.remote import Place, content_of, place

ASSETS = "assets"
VISION = "vision encoder"
# Tensors that some families carry as buffers, though they are weights of a part that mega has no code for.
_UNCOMPUTED = {
    VISION: r"(model\.)?(visual|vision_tower|vision_model)\.(?!(.*\.)?(head\..*|inv_freq|position_ids)$)",
    "multi-token prediction block": r"(model\.)?mtp\.",
}


class Source(Protocol):
    """A model's weights by canonical name, each tensor whole and global."""

    @property
    def model(self) -> ModelConfig:
        """What the weights are of."""

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of the forward pass."""

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Its stored dtype."""

    def read(self, name: str) -> Tensor:
        """The whole tensor. May be a view of the file: copy it before changing it."""

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """`tensor[offset : offset + shape]`, reading only what is needed. May be a view of the file."""

    def buffers(self) -> Sequence[str]:
        """Tensors of a HuggingFace folder that are no weights (masks and the like), by their names there."""

    def read_buffer(self, name: str) -> Tensor:
        """One of them, as it was."""

    def assets(self) -> Mapping[str, Path | bytes]:
        """Files that travel with the weights, {path inside the assets folder: file or its content}."""


def cast_dtype(source: Source, name: str, wanted: torch.dtype | None) -> torch.dtype:
    """What a tensor becomes in a cast to `wanted`: that, but for whole numbers and for the small steps of a router's
    selection bias, which the hub too keeps in fp32."""
    stored = source.dtype(name)
    kept = not stored.is_floating_point or name.endswith("e_score_correction_bias")
    return stored if wanted is None or kept else wanted


class MegaSource:
    """The weights in a checkpoint of mega; `averaged` the averages that a run with `train.ema` has kept of them."""

    def __init__(self, checkpoint: Checkpoint, *, averaged: bool = False) -> None:
        self.checkpoint = checkpoint
        self._averaged = averaged_names(checkpoint) if averaged else frozenset()
        self.model: ModelConfig = checkpoint.model
        held = {key.removeprefix(WEIGHTS) for key in checkpoint.keys(WEIGHTS)}
        self._names = _checked(self.model, {name: checkpoint.shape(WEIGHTS + name) for name in held}, checkpoint.folder)

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of the forward pass."""
        return self._names

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""
        return self.checkpoint.shape(WEIGHTS + name)

    def dtype(self, name: str) -> torch.dtype:
        """Its stored dtype."""
        return self.checkpoint.dtype(WEIGHTS + name)

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it: a view of the file, unless it is assembled from several chunks."""
        if name in self._averaged:
            return self.checkpoint.read(AVERAGE + name, offset, shape).to(self.dtype(name))
        key = WEIGHTS + name
        for chunk in self.checkpoint.entry(key).chunks:
            starts = [o - c for o, c in zip(offset, chunk.offset, strict=True)]
            if all(s >= 0 and s + n <= m for s, n, m in zip(starts, shape, chunk.shape, strict=True)):
                return crop(self.checkpoint.chunk(key, chunk), starts, shape)
        return self.checkpoint.read(key, offset, shape)

    def buffers(self) -> Sequence[str]:
        """What came from a HuggingFace folder without being a weight."""
        return [key.removeprefix(BUFFERS) for key in self.checkpoint.keys(BUFFERS)]

    def read_buffer(self, name: str) -> Tensor:
        """One of them."""
        return self.checkpoint.read(BUFFERS + name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """The files of the assets folder."""
        names = [name for name in self.checkpoint.manifest.files if name.startswith(f"{ASSETS}/")]
        places = {name.removeprefix(f"{ASSETS}/"): self.checkpoint.files / name for name in names}
        return {name: content_of(path) for name, path in places.items()}


def _checked(model: ModelConfig, held: Mapping[str, Shape], folder: Place) -> Sequence[str]:
    """The canonical names of `model`, when `held` are exactly its tensors."""
    if model.num_layers > len(held):
        raise CheckpointError(f"{folder}: {model.num_layers} layers, but only {len(held)} tensors of weights")
    expected = tensors_of(model)
    for what, names in (
        ("has no tensor", expected.keys() - held.keys()),
        ("has a tensor", held.keys() - expected.keys()),
    ):
        if names:
            raise CheckpointError(f"{folder}: {what} {some(names)}", hint="its manifest says that it is another model")
    for name, shape in expected.items():
        if held[name] != shape:
            raise CheckpointError(f"{folder}: {name} has shape {list(held[name])} instead of {list(shape)}")
    return list(expected)


def open_source(path: str | Place, *, settings: Mapping[str, Any] | None = None, averaged: bool = False) -> Source:
    """Open what lies at `path`: a checkpoint of mega, a run folder (its newest checkpoint), a HuggingFace or a Megatron
    folder, a GGUF file or a folder with one.

    `settings` are fields of `ModelConfig` that a checkpoint of Megatron lacks, or that replace what it says. `averaged` takes the
    averages that a run has kept of its weights (`train.ema`).

    Raises:
        CheckpointError: when it is none of these, or one that cannot be used.
    """
    folder = place(path)
    if isinstance(folder, Path) and is_gguf(folder):
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
    if (folder / PEFT_CONFIG).is_file():
        if holds_weights(folder):  # transformers would load the adapter's base, and not these weights
            raise CheckpointError(
                f"{folder}: holds the weights of a model and an adapter ({PEFT_CONFIG}), and only one can be meant",
                hint="move the adapter's files into a folder of their own",
            )
        return _beside(folder, read_json(folder / PEFT_CONFIG).get("base_model_name_or_path"))
    found = _checkpoint_in(folder)
    if found is not None:
        checkpoint = Checkpoint.open(found)
        if is_adapter_checkpoint(checkpoint):
            return _beside(found, checkpoint.state.get("base", {}).get("path"), averaged=averaged)
        return MegaSource(checkpoint, averaged=averaged)
    if averaged:
        raise CheckpointError(f"{folder}: has no averages of weights", hint="a run with train.ema keeps them")
    is_run = any((folder / name).exists() for name in ("checkpoints", "run.yaml"))
    if is_run and not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder}: a run folder without a complete checkpoint")
    if isinstance(folder, Path) and is_megatron(folder):
        return MegatronSource(folder, settings)
    if isinstance(folder, Path) and not holds_weights(folder) and (inside := list(folder.glob(f"*{SUFFIX}"))):
        return GgufSource(_only_model(folder, inside))
    return HfSource(folder)


def open_adapted(path: str | Place, base: str | Place, *, averaged: bool = False) -> AdaptedSource:
    """The model of the weights at `base` and an adapter at `path`, which is a run's or a folder of PEFT's.

    Raises:
        CheckpointError: when there is no adapter, or it was trained beside other weights.
    """
    folder = place(path)
    held = open_source(base)
    if (folder / PEFT_CONFIG).is_file():
        return AdaptedSource(held, read_peft(folder, held))
    found = _checkpoint_in(folder)
    if found is None or not is_adapter_checkpoint(checkpoint := Checkpoint.open(found)):
        inside = [path.parent.name for path in folder.glob(f"*/{PEFT_CONFIG}")] if isinstance(folder, Path) else []
        raise CheckpointError(
            f"{folder}: holds no adapter",
            hint=f"give one of the adapters inside: {', '.join(sorted(inside))}"
            if inside
            else f"give a run with `lora`, or a folder with {PEFT_CONFIG}",
        )
    adapter = Adapter.of_checkpoint(checkpoint, averaged=averaged)
    check_base(adapter.base, base_of(str(base), held), str(folder))
    return AdaptedSource(held, adapter)


def _beside(folder: Place, base: object, *, averaged: bool = False) -> Source:
    """The model of an adapter and of the base that it names."""
    hint = "mega ckpt merge-adapter BASE ADAPTER OUT puts the two together, wherever they are"
    if not isinstance(base, str):
        raise CheckpointError(f"{folder}: holds an adapter, and does not say beside which weights", hint=hint)
    try:
        open_source(base)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: holds an adapter, whose base is not there: {error.message}", hint=hint
        ) from error
    return open_adapted(folder, base, averaged=averaged)


def model_at(path: str | Place, *, tell: bool = False) -> ModelConfig:
    """The model at `path`: of what `open_source` takes, of a HuggingFace folder without weights, of a config.json itself.

    With `tell`, `tell_unread`.

    Raises:
        CheckpointError: when there is no model, or one that cannot be expressed.
    """
    folder = place(path)
    config = folder if folder.name.endswith(".json") else folder / CONFIG
    if config is not folder and not (_checkpoint_in(folder) is None and config.is_file() and not has_weights(folder)):
        source = open_source(folder)
        if tell:
            tell_unread(source)
        return source.model
    _, model, unread = described_by(config)
    if tell:
        warn_of_unread(config, unread, model)
    return model


def tell_unread(source: Source, *, training: bool = False) -> None:
    """Warn of keys of a HuggingFace folder that nothing reads, and of parts of the model that mega does not run.

    Args:
        source: the weights to convert, to run or, with `training`, to start a run from.
        training: whether checkpoints of a run follow, which have no such parts.
    """
    if isinstance(source, HfSource):
        warn_of_unread(source.folder / CONFIG, source.unread, source.model)
    fate = (
        "neither trained nor saved with the run" if training else "copied by a conversion, but neither run nor trained"
    )
    for part, names in uncomputed_parts(source.buffers()).items():
        logger.warning("the %s of this model (%s) is not supported: it is %s", part, some(names), fate)


def uncomputed_parts(buffers: Iterable[str]) -> dict[str, list[str]]:
    """Group the tensors among `buffers` that belong to parts of a model which mega does not run, by part."""
    found: dict[str, list[str]] = {}
    for name in buffers:
        part = next((part for part, pattern in _UNCOMPUTED.items() if re.match(pattern, name)), None)
        if part is not None:
            found.setdefault(part, []).append(name)
    return found


def _only_model(folder: Path, files: Sequence[Path]) -> Path:
    """The GGUF file of a folder, or the first of those that are one model."""
    firsts = [path for path in files if not re.search(r"-of-\d{5}\.gguf$", path.name) or "-00001-of-" in path.name]
    if len(firsts) != 1:
        names = ", ".join(sorted(path.name for path in firsts))
        raise CheckpointError(f"{folder}: holds several GGUF files: {names}", hint="name one of them")
    return firsts[0]


def checkpoint_folder(path: str | Place) -> Place:
    """The mega checkpoint at `path`, or the newest one of the run there; else `path`, which is then none."""
    folder = place(path)
    return _checkpoint_in(folder) or folder


def _checkpoint_in(folder: Place) -> Place | None:
    if (folder / MANIFEST).is_file():
        return folder
    return latest(folder / "checkpoints") or latest(folder)


def load_weights(source: Source, tensors: Mapping[str, Sharded]) -> None:
    """Fill boxes of canonical tensors, in place, cast to each box's dtype; reads only what the boxes cover.

    Raises:
        CheckpointError: when the source lacks a tensor or has it in another shape.
    """
    held = set(source.keys())
    for name, sharded in tensors.items():
        if name not in held:
            raise CheckpointError(f"the weights to load have no tensor {name}", hint="they are of another model")
        if source.shape(name) != sharded.shape:
            raise CheckpointError(
                f"{name} has shape {list(source.shape(name))} in the weights to load, but {list(sharded.shape)} here",
                hint="they are of another model",
            )
        _fill(name, sharded, source.read_slice)


def load_adapter(adapter: Adapter, tensors: Mapping[str, Sharded]) -> None:
    """The same from an adapter: all of its tensors, of which `tensors` are those that are here.

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
        _fill(name, sharded, adapter.read)


def load_magnitudes(base: Source, modules: Mapping[str, Adapted], tensors: Mapping[str, Sharded]) -> None:
    """Fill the magnitudes among `tensors`, those of new adapters beside `base`: the lengths of its rows."""
    for name, sharded in tensors.items():
        if name.endswith(MAGNITUDE):
            (weight,) = modules[name.removesuffix(MAGNITUDE)].weights
            _fill(weight, sharded, lambda matrix, offset, shape: row_lengths(base, matrix, *offset, *shape))


@torch.no_grad()
def _fill(name: str, sharded: Sharded, read: Callable[[str, Shape, Shape], Tensor]) -> None:
    """Copy into each box what `read` gives of it."""
    for box in sharded.boxes:
        box.tensor.copy_(read(name, box.offset, tuple(box.tensor.shape)))


def copy_assets(source: Source, folder: Path) -> None:
    """Write the files that travel with the weights into `folder`, so that a training run can hand them on."""
    for name, content in source.assets().items():
        put_file(folder / name, content)


def put_file(path: Path, content: Path | bytes) -> None:
    """Write or copy a small file, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        content = content.read_bytes()
    with naming(path), open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
