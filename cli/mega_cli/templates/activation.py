"""Activation `my_extension`: the square of positive elements, with a slope below zero. Change it to yours.

With `ActivationFunction(.., gated=True)` the function has the arguments `(gate, up)`, and the block a gate projection.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from mega_trainer.extend import ActivationFunction, Extension, StrictConfig


class LeakyOptions(StrictConfig):
    """Settings of `model.functions.my_extension` in run.yaml."""

    slope: float = Field(0.25, description="slope of negative elements")


def activate(x: Tensor, *, options: LeakyOptions) -> Tensor:
    """Return max(0, x)^2 - slope max(0, -x) of each element of x."""
    return x.relu().square() - options.slope * (-x).relu()


EXTENSION = Extension(
    name="my-extension",
    version="0.1",
    api=1,
    activations={"my_extension": ActivationFunction(activate, options=LeakyOptions)},
)
