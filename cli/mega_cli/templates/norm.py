"""Norm `my_extension`: a tanh of each element in place of statistics (arXiv:2503.10622). Change it to yours.

y = weight * tanh(gain x)
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from mega_trainer.extend import Extension, NormFunction, StrictConfig


class TanhOptions(StrictConfig):
    """Settings of `model.functions.my_extension` in run.yaml."""

    gain: float = Field(0.5, gt=0, description="factor on the elements")


def normalize(x: Tensor, weight: Tensor | None, eps: float, *, options: TanhOptions) -> Tensor:
    """Return weight * tanh(gain x) of x [.., D]; the weight [D] is None with `model.norm_weight: false`."""
    y = (options.gain * x).tanh()
    return y if weight is None else y * weight


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, norms={"my_extension": NormFunction(normalize, TanhOptions)}
)
