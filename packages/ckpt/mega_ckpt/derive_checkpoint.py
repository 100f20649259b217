"""Weights-only checkpoints derived from others: `copy_checkpoint_without_training_state` drops the optimizer, `average_checkpoints` computes a
weighted mean.

Both stream a slab of a tensor at a time into a hidden folder next to the destination, which is renamed at the end: the
new checkpoint is complete or does not exist.
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
from mega_ckpt.checkpoint_folders import convert_os_errors_to_checkpoint_errors, make_durable_folder
from mega_ckpt.families import is_equivalent_config
from mega_ckpt.lora_adapter import is_adapter_checkpoint
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.source import MegaWeightSource, open_weight_source, resolve_run_to_checkpoint
from mega_ckpt.stream_checkpoint import write_weights_as_checkpoint
from mega_common.atomic_files import create_atomic_folder
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, RemotePath, parse_location


@convert_os_errors_to_checkpoint_errors()
def copy_checkpoint_without_training_state(source: str | Location, destination: str | Location) -> None:
    """Write a copy of the mega checkpoint at `source` to `destination` without the optimizer and trainer state.

    Weights, assets and the step are unchanged. The provenance gets an entry `pruned` with the source.

    Args:
        source: a mega checkpoint, or a run folder for its latest one.
        destination: the folder to create.

    Raises:
        CheckpointError: when the source is not a complete mega checkpoint or is damaged, or `destination` exists. No files
            are left then.
    """
    with create_new_checkpoint_folder(destination) as folder:
        checkpoint = Checkpoint.open_folder(resolve_run_to_checkpoint(source))
        if is_adapter_checkpoint(checkpoint):
            raise CheckpointError(
                f"{checkpoint.folder}: must be the checkpoint of a full model, not of an adapter",
                hint="use mega ckpt convert: --to peft writes the adapter, --to mega the merged model",
            )
        source_weights = MegaWeightSource(checkpoint)
        note = {"source": str(checkpoint.folder), "without": sorted(_non_model_groups(checkpoint))}
        provenance = {**checkpoint.manifest.provenance, "pruned": note}
        write_weights_as_checkpoint(source_weights, folder, "pruning", step=checkpoint.step, provenance=provenance)


@convert_os_errors_to_checkpoint_errors()
def average_checkpoints(
    sources: Sequence[str | Location], destination: str | Location, *, weights: Sequence[float] | None = None
) -> None:
    """Write the weighted mean of the weights of several checkpoints of one model to the new folder `destination`.

    The result is `destination`, a new mega checkpoint of step 0. Each tensor is summed in fp32, or in fp64 if a source
    has it in fp64, and written in the dtype of the first source (arXiv:2203.05482). Assets and buffers come from the
    first source. The provenance has the sources and their weights as `average`.

    Args:
        sources: two or more mega checkpoints, run folders (their latest checkpoint) or HuggingFace folders; an adapter
            is merged into its base.
        destination: the folder to create.
        weights: one positive number per source, which are divided by their sum; default: equal weights.

    Raises:
        ConfigError: when there are fewer than two sources, or the number of weights differs.
        CheckpointError: when a source cannot be used or has another model, or `destination` exists. No files are left
            then.
    """
    shares = _normalize_weights(len(sources), weights)
    with create_new_checkpoint_folder(destination) as folder:
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
            {"source": str(resolve_run_to_checkpoint(path)), "weight": share}
            for path, share in zip(sources, shares, strict=True)
        ]
        write_weights_as_checkpoint(opened[0], folder, "averaging", read=weighted_mean, provenance={"average": note})


def _non_model_groups(checkpoint: Checkpoint) -> set[str]:
    """Return the groups of tensors that are not part of the model: "optimizer/exp_avg" and so on."""
    kept = (WEIGHTS, BUFFERS)
    return {key.rpartition("/")[0] or key for key in checkpoint.tensor_keys() if not key.startswith(kept)}


def _normalize_weights(count: int, weights: Sequence[float] | None) -> list[float]:
    """Return the weight of each source in the mean; the weights sum to 1."""
    if count < 2:
        raise ConfigError(
            f"an average requires at least two checkpoints, found {count}",
            hint="give each by its folder, e.g. runs/a/checkpoints/step-00000100 runs/a/checkpoints/step-00000200",
        )
    weights = [1.0] * count if weights is None else weights
    if len(weights) != count:
        raise ConfigError(
            f"--weights must have one number for each of the {count} checkpoints, found {len(weights)}",
            hint=f"e.g. --weights {','.join(['1'] * count)}, or leave it out for the plain mean",
        )
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"--weights must be positive numbers, found {weight:g}",
                hint="leave out checkpoints that should not count",
            )
    return [weight / math.fsum(weights) for weight in weights]


def _check_same_model(one: ModelConfig, other: ModelConfig, first: str | Location, path: str | Location) -> None:
    """Reject a source of a different model, and name the settings that differ."""
    if is_equivalent_config(one, other):
        return
    differences = [
        f"{name} is {getattr(other, name)} instead of {getattr(one, name)}"
        for name in ModelConfig.model_fields
        if not is_equivalent_config(one, one.model_copy(update={name: getattr(other, name)}))
    ]
    raise CheckpointError(
        f"{path}: not the same model as {first}: {', '.join(differences)}", hint="average checkpoints of one model"
    )


@contextlib.contextmanager
def create_new_checkpoint_folder(destination: str | Location) -> Iterator[Location]:
    """Context manager that yields a temporary folder, renamed to `destination` on success and removed on error.
    Raises CheckpointError if `destination` exists already.
    """
    location = parse_location(destination)
    if isinstance(location, RemotePath):
        if (location / MANIFEST).is_file():
            raise CheckpointError(f"{location}: exists already", hint="choose another destination")
        folder = location / secrets.token_hex(4)
        try:
            yield folder
        except Exception:
            folder.delete_objects()
            raise
        return
    final = Path(os.path.abspath(location))
    if final.exists():
        raise CheckpointError(f"{destination}: exists already", hint="choose another folder")
    make_durable_folder(final.parent)
    with create_atomic_folder(final) as temporary:
        yield temporary
