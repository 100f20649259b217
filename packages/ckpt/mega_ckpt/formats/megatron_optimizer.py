"""What a run of mega goes on from, as far as a checkpoint of Megatron has it in the shapes of the weights.

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

from mega_ckpt.formats.megatron_contents import Contents
from mega_ckpt.formats.megatron_names import Part
from mega_ckpt.formats.megatron_placed import Placed
from mega_ckpt.formats.torch_archive import StoredTensor
from mega_ckpt.names import some
from mega_ckpt.training import LOW, MOMENTS, StaysBehindError, Training, numbers
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

_MAIN = ("fp32_param", "param")


def read_training(
    contents: Contents, parts: Sequence[Part], folder: Path, model: ModelConfig, dtype: torch.dtype
) -> Training:
    """What `contents` has beside weights of type `dtype`.

    Raises:
        StaysBehindError: when it has no optimizer, or in a form that does not allow it.
        CheckpointError: when a tensor of it is damaged.
    """
    kinds, trained = dict(contents.optimizer.kinds), [part for part in parts if not part.name.endswith("expert_bias")]
    if not kinds:
        raise StaysBehindError(contents.optimizer.bound or "there is no optimizer in the checkpoint")
    main = next((kinds.pop(kind) for kind in _MAIN if kind in kinds), None)
    if kinds.keys() != {*MOMENTS}:
        raise StaysBehindError(f"its optimizer is not Adam: it keeps {', '.join(sorted(kinds))}")
    if dtype in LOW:
        kinds["main"] = main or {}
    for kind, held in kinds.items():
        if missing := {part.name for part in trained} - held.keys():
            raise StaysBehindError(f"its optimizer has no {kind} of {some(missing)}")
    said, counted = _said(contents), (contents.args.get("consumed_train_samples"), contents.scheduled)
    samples, updates = [count for count in counted if isinstance(count, int)], _numbers(said, "common_step", "step")
    if contents.iteration is None or not samples or len(updates) != 1:
        raise StaysBehindError("the checkpoint does not say after how many steps and samples it was saved")
    scale, good = _numbers(said, "scale"), _numbers(said, "growth_tracker")
    kept = [scale.pop(), int(good.pop())] if dtype == torch.float16 and scale and good else None
    state = numbers(model, samples=samples[0], updates=int(updates.pop()), loss_scale=kept)
    return Training(contents.iteration, state, {kind: Placed(trained, held, folder) for kind, held in kinds.items()})


def _said(contents: Contents) -> Any:
    try:
        return contents.optimizer.said()
    except CheckpointError as error:
        raise StaysBehindError(error.message) from None


def _numbers(said: Any, *names: str) -> set[float]:
    """The numbers that have one of the names, at any depth."""
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
