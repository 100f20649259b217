"""What a run goes on from beside its weights, as far as a checkpoint of another trainer has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_ckpt.pieces import Shape
from mega_common.model_config import ModelConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
LOW = (torch.bfloat16, torch.float16)  # weights beside which the optimizer keeps main ones


class StaysBehindError(Exception):
    """Why the optimizer's state cannot be taken along."""


class Tensors(Protocol):
    """Canonical tensors to read from."""

    def keys(self) -> Sequence[str]:
        """Their names."""

    def shape(self, name: str) -> Shape:
        """Global shape of one."""

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it."""


@dataclass(frozen=True)
class Training:
    """What a run goes on from beside its weights.

    Attributes:
        step: optimizer steps done, skipped ones included.
        state: the numbers that the trainer resumes from.
        tensors: by kind, as checkpoints of mega call it: `exp_avg`, `exp_avg_sq`, and `main` beside weights in 16 bits.
    """

    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensors]


def numbers(model: ModelConfig, *, samples: int, updates: int, loss_scale: list[float] | None = None) -> dict[str, Any]:
    """The numbers of a run of `model` that has read so many samples and made so many updates."""
    return {
        "consumed_samples": samples,
        "optimizer_steps": updates,
        "loss_average": 0.0,
        "loss_seen": 0,
        "loss_scale": loss_scale,
        "settings": {"model": model.model_dump(mode="json", by_alias=True)},
    }
