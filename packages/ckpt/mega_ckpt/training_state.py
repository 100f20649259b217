"""Optimizer and trainer state that a conversion carries over from another trainer's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_ckpt.tensor_pieces import TensorShape
from mega_common.model_config import ModelConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
LOW = (torch.bfloat16, torch.float16)  # dtypes of weights for which the optimizer keeps fp32 main weights


class OptimizerNotConverted(Exception):
    """Exception for another trainer's optimizer state that cannot be converted; the message is the reason."""


class TensorReader(Protocol):
    """Interface for reading tensors by canonical name, without a model configuration (see `WeightSource`)."""

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical tensor names."""

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global shape of a tensor."""

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of the tensor `name`."""


@dataclass(frozen=True)
class ConvertedTraining:
    """Optimizer and trainer state converted from another trainer's checkpoint, to resume from, without the weights.

    Attributes:
        step: number of optimizer steps, including skipped ones.
        state: the trainer state.
        tensors: tensors by kind, as named in mega checkpoints: `exp_avg`, `exp_avg_sq`, and `main` for 16-bit weights.
    """

    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, TensorReader]


def make_trainer_state(
    model: ModelConfig, *, samples: int, updates: int, loss_scale: list[float] | None = None
) -> dict[str, Any]:
    """Return the JSON trainer state of a mega checkpoint for a run of `model` after `samples` samples and `updates`
    optimizer updates.
    """
    return {
        "consumed_samples": samples,
        "optimizer_steps": updates,
        "loss_average": 0.0,
        "loss_seen": 0,
        "loss_scale": loss_scale,
        "settings": {"model": model.model_dump(mode="json", by_alias=True)},
    }
