"""Optimizer state in a Megatron checkpoint that mega can resume from: tensors in the shapes of the weights.

    optimizer.state.{exp_avg,exp_avg_sq}.<weight>     Adam's moments
    optimizer.state.{fp32_param,param}.<weight>       main weights: of the optimizer in 16 bits, of the distributed one

That is what `torch_dist` has of the plain optimizers, and of the distributed one with `--dist-ckpt-optim-fully-reshardable`.
Facts: Megatron-Core, optimizer/{optimizer,distrib_optimizer}.py and dist_checkpointing/optimizer.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mega_ckpt.canonical_tensors import abbreviate_names
from mega_ckpt.formats.megatron_contents import MegatronContents, MegatronTensorReader
from mega_ckpt.formats.megatron_names import MegatronPart
from mega_ckpt.formats.torch_archive import StoredTensor
from mega_ckpt.training_state import LOW, MOMENTS, ConvertedTraining, OptimizerNotConverted, make_trainer_state
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

_MAIN = ("fp32_param", "param")


def read_optimizer_state(
    contents: MegatronContents, parts: Sequence[MegatronPart], folder: Path, model: ModelConfig, dtype: torch.dtype
) -> ConvertedTraining:
    """Return the optimizer state of `contents` for weights of type `dtype`.

    Raises:
        StaysBehindError: when it has no optimizer, or in a form that does not allow it.
        CheckpointError: when a tensor of it is damaged.
    """
    kinds, trained = dict(contents.optimizer.kinds), [part for part in parts if not part.name.endswith("expert_bias")]
    if not kinds:
        raise OptimizerNotConverted(contents.optimizer.unreadable_reason or "there is no optimizer in the checkpoint")
    main = next((kinds.pop(kind) for kind in _MAIN if kind in kinds), None)
    if kinds.keys() != {*MOMENTS}:
        raise OptimizerNotConverted(f"its optimizer is not Adam: it keeps {', '.join(sorted(kinds))}")
    if dtype in LOW:
        kinds["main"] = main or {}
    for kind, held in kinds.items():
        if missing := {part.name for part in trained} - held.keys():
            raise OptimizerNotConverted(f"its optimizer has no {kind} of {abbreviate_names(missing)}")
    said, counted = _read_objects(contents), (contents.args.get("consumed_train_samples"), contents.scheduled_samples)
    samples, updates = (
        [count for count in counted if isinstance(count, int)],
        _find_numbers(said, "common_step", "step"),
    )
    if contents.iteration is None or not samples or len(updates) != 1:
        raise OptimizerNotConverted("the checkpoint does not say after how many steps and samples it was saved")
    scale, good = _find_numbers(said, "scale"), _find_numbers(said, "growth_tracker")
    kept = [scale.pop(), int(good.pop())] if dtype == torch.float16 and scale and good else None
    state = make_trainer_state(model, samples=samples[0], updates=int(updates.pop()), loss_scale=kept)
    return ConvertedTraining(
        contents.iteration, state, {kind: MegatronTensorReader(trained, held, folder) for kind, held in kinds.items()}
    )


def _read_objects(contents: MegatronContents) -> Any:
    try:
        return contents.optimizer.read_objects()
    except CheckpointError as error:
        raise OptimizerNotConverted(error.message) from None


def _find_numbers(said: Any, *names: str) -> set[float]:
    """Return the numbers stored under one of the names, at any depth."""
    left, seen, out = [said], set[int](), set[float]()
    while left:
        value = left.pop()
        if id(value) in seen or not isinstance(value, Mapping | list | tuple):
            continue
        seen.add(id(value))
        pairs = list(value.items()) if isinstance(value, Mapping) else [("", inner) for inner in value]
        left += [inner for _, inner in pairs]
        for inner in (inner for name, inner in pairs if name in names):
            if isinstance(inner, StoredTensor) and math.prod(inner.shape) == 1:
                out.add(float(inner.read().item()))
            elif isinstance(inner, int | float):
                out.add(float(inner))
    return out
