"""Weights-only checkpoints made from others: `prune_checkpoint` drops the optimizer, `average_checkpoints` takes a
weighted mean.

Both stream a slab of a tensor at a time into a hidden folder beside the destination, which one rename turns into it:
the new checkpoint is complete or not there.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mega_ckpt.checkpoint import BUFFERS, WEIGHTS, Checkpoint
from mega_ckpt.checkpoint_folders import make_durable_folder, wrap_disk_errors
from mega_ckpt.families import is_same_model
from mega_ckpt.lora_adapter import is_adapter_checkpoint
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.source import MegaSource, open_weight_source, resolve_checkpoint
from mega_ckpt.stream_checkpoint import write_weights
from mega_common.atomic_files import create_atomic_folder
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, RemotePath, parse_location


@wrap_disk_errors()
def prune_checkpoint(source: str | Location, destination: str | Location) -> None:
    """Write a copy of a mega checkpoint to `destination` without the optimizer and the trainer state.

    Weights and assets are the same to the byte, and the step stays; the optimizer's tensors and the trainer's state are
    left out. The provenance gains `pruned`, which tells from where.

    Args:
        source: a mega checkpoint, or a run folder for its newest one.
        destination: the folder to make.

    Raises:
        CheckpointError: when the source is no complete mega checkpoint or is damaged, or `destination` exists. Nothing
            is left behind then.
    """
    with create_output_folder(destination) as folder:
        checkpoint = Checkpoint.open_folder(resolve_checkpoint(source))
        if is_adapter_checkpoint(checkpoint):
            raise CheckpointError(
                f"{checkpoint.folder}: holds an adapter, which is no model without its base",
                hint="mega ckpt convert --to peft writes the adapter alone, --to mega the model with it",
            )
        held = MegaSource(checkpoint)
        note = {"source": str(checkpoint.folder), "without": sorted(_non_model_groups(checkpoint))}
        provenance = {**checkpoint.manifest.provenance, "pruned": note}
        write_weights(held, folder, "pruning", step=checkpoint.step, provenance=provenance)


@wrap_disk_errors()
def average_checkpoints(
    sources: Sequence[str | Location], destination: str | Location, *, weights: Sequence[float] | None = None
) -> None:
    """Write the weighted mean of the weights of several checkpoints of one model to `destination`, a mega checkpoint.

    Each tensor is summed in fp32, or in fp64 where a source has it in fp64, and written in the dtype of the first
    source (arXiv:2203.05482). The assets and buffers are the first one's. The result is no state of any run: its step
    is 0. The provenance has the sources and their shares as `average`.

    Args:
        sources: two or more mega checkpoints, run folders (their newest checkpoint) or HuggingFace folders; of an adapter
            the model that its base is with it.
        destination: the folder to make.
        weights: one positive number a source, which are divided by their sum; default: all alike.

    Raises:
        ConfigError: when there are fewer than two sources, or the weights do not fit.
        CheckpointError: when a source cannot be used or is of another model, or `destination` exists. Nothing is left
            behind then.
    """
    shares = _normalize_weights(len(sources), weights)
    with create_output_folder(destination) as folder:
        opened = [open_weight_source(path) for path in sources]
        for path, source in zip(sources[1:], opened[1:], strict=True):
            _check_same_model(opened[0].model, source.model, sources[0], path)

        def weighted_mean(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
            wide = torch.float64 if any(one.tensor_dtype(name) == torch.float64 for one in opened) else torch.float32
            total = torch.zeros(shape, dtype=wide)
            for one, share in zip(opened, shares, strict=True):
                total.add_(one.read_tensor_slice(name, offset, shape).to(wide), alpha=share)
            return total

        note = [
            {"source": str(resolve_checkpoint(path)), "weight": share}
            for path, share in zip(sources, shares, strict=True)
        ]
        write_weights(opened[0], folder, "averaging", read=weighted_mean, provenance={"average": note})


def _non_model_groups(checkpoint: Checkpoint) -> set[str]:
    """Return the groups of tensors that are not part of the model: "optimizer/exp_avg" and so on."""
    kept = (WEIGHTS, BUFFERS)
    return {key.rpartition("/")[0] or key for key in checkpoint.tensor_keys() if not key.startswith(kept)}


def _normalize_weights(count: int, weights: Sequence[float] | None) -> list[float]:
    """Return the weight of each source in the mean; the weights sum to 1."""
    if count < 2:
        raise ConfigError("an average needs two or more checkpoints")
    weights = [1.0] * count if weights is None else weights
    if len(weights) != count:
        raise ConfigError(f"{len(weights)} weights for {count} checkpoints", hint="give one number a checkpoint")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"a weight of {weight}: expected a positive number")
    return [weight / math.fsum(weights) for weight in weights]


def _check_same_model(one: ModelConfig, other: ModelConfig, first: str | Location, path: str | Location) -> None:
    """Reject a source of a different model, and name the settings that differ."""
    if is_same_model(one, other):
        return
    apart = [
        f"{name} is {getattr(other, name)} instead of {getattr(one, name)}"
        for name in ModelConfig.model_fields
        if not is_same_model(one, one.model_copy(update={name: getattr(other, name)}))
    ]
    raise CheckpointError(
        f"{path}: not the same model as {first}: {', '.join(apart)}", hint="only weights of one model have a mean"
    )


@contextlib.contextmanager
def create_output_folder(destination: str | Location) -> Iterator[Location]:
    """Yield a folder to fill; it is renamed to `destination` on success and removed on error."""
    there = parse_location(destination)
    if isinstance(there, RemotePath):
        if (there / MANIFEST).is_file():
            raise CheckpointError(f"{there}: exists already", hint="choose another place")
        folder = there / secrets.token_hex(4)
        try:
            yield folder
        except Exception:
            folder.delete_objects()
            raise
        return
    final = Path(os.path.abspath(there))
    if final.exists():
        raise CheckpointError(f"{destination}: exists already", hint="choose another folder")
    make_durable_folder(final.parent)
    with create_atomic_folder(final) as temporary:
        yield temporary
