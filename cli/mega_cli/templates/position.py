"""Position encoding `my_extension`: pairs of elements rotate by an angle that grows with the position. Change it to yours.

Legend: B batch, S sequence, H heads of a tensor rank, d head size.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from mega_trainer.extend import Extension, PositionFunction, StrictConfig


class RotationOptions(StrictConfig):
    """Settings of `model.functions.my_extension` in run.yaml."""

    longest: float = Field(1000.0, gt=1, description="longest wavelength in tokens, divided by 2 pi")


def rotate(x: Tensor, positions: Tensor, *, options: RotationOptions) -> Tensor:
    """Return queries or keys x [B, S, H, d], rotated by their positions [B or 1, S]; each token and head stands alone."""
    first, second = x.chunk(2, -1)
    pairs = first.shape[-1]
    speeds = options.longest ** (-torch.arange(pairs, device=x.device, dtype=x.dtype) / pairs)
    angles = positions[..., None, None].to(x.dtype) * speeds
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, positions={"my_extension": PositionFunction(rotate, RotationOptions)}
)
