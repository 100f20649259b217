"""Result of one optimizer step, and the scalars that ranks sum together with its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepScalars:
    """Scalars that the all-reduce of a step's loss also sums over all ranks.
    They are stop requests, failed saves, images, and tokens of the next step; one rank's share or the sum.

    Attributes:
        stop_requested: 1 on a rank that wants to end the run after this step.
        terminated: 1 on a rank that has received SIGTERM.
        save_failed: 1 on a rank whose background save has failed.
        images: images of the step's samples.
        next_tokens: number of loss terms of the next step, as `count_step_tokens` returns it.
    """

    stop_requested: float = 0.0
    terminated: float = 0.0
    save_failed: float = 0.0
    images: float = 0.0
    next_tokens: Sequence[float] = ()

    def to_list(self) -> list[float]:
        """Return all scalars of the step in one list, for the all-reduce."""
        return [self.stop_requested, self.terminated, self.save_failed, self.images, *self.next_tokens]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> StepScalars:
        """Return the scalars of a step from a list made by `to_list`."""
        stop_requested, terminated, save_failed, images, *next_tokens = values
        return cls(stop_requested, terminated, save_failed, images, next_tokens)


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, equal on all ranks: loss, gradient norm, token count and further metrics.

    Attributes:
        loss: mean per token.
        grad_norm: before clipping.
        tokens: number of tokens in the loss.
        updated: False if loss or gradient were not finite, or the loss was rejected.
        mtp_loss: mean over the MTP layers of their mean losses per token.
        pair_loss: mean loss per sample of segment-order prediction.
        loss_scale: fp16 loss scale of this step.
        overflowed: the gradient overflowed fp16 at a loss scale that can still be lowered.
        routing: metrics of mixture-of-experts routing (`compute_routing_metrics`), and `indexer_loss`, the weighted loss of
            the indexers of sparse attention.
        scalars: sums over all ranks of the scalars that each rank added.
        objective_metrics: further means of the objective, per token.
    """

    loss: float
    grad_norm: float
    tokens: float
    updated: bool
    mtp_loss: float | None = None
    pair_loss: float | None = None
    loss_scale: float | None = None
    overflowed: bool = False
    routing: Mapping[str, float] = field(default_factory=dict)
    scalars: StepScalars = field(default_factory=StepScalars)
    objective_metrics: Sequence[float] = ()

    @property
    def is_finite(self) -> bool:
        """True if the loss and the gradient norm of the step are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)
