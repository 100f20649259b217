"""What the backward pass computes again instead of keeping it (arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Recompute:
    """Nothing, the cheap and large parts, or whole layers; `layers` bounds `full` to the first so many of each stage."""

    kind: Literal["none", "selective", "full"] = "none"
    layers: int | None = None


def computed(function: Callable[..., Tensor], *inputs: Any, again: bool) -> Tensor:
    """The function of its inputs, which is all that is kept of it if the backward is to compute it `again`.

    Dropout is drawn by what it is for (`mega_trainer.rng`), so there is no state of a generator to restore.
    """
    if not again:
        return function(*inputs)
    y: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y
