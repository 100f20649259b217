"""Rounding of the weights of a linear layer that keeps its outputs on calibration data (GPTQ, arXiv:2210.17323).

A weight W [O, I] is rounded to Q so that (W - Q) X is small for the layer's inputs X [I, tokens], by their second moments
H = X X^T [I, I]. Columns are rounded one after the other, in descending order of H's diagonal, and the error of each is
compensated in the columns that are not rounded yet: with the Cholesky factor U of H^-1 = U^T U,

    e_i = (W_i - Q_i) / U_ii        W_j -= e_i U_ij    for j > i

Scales are computed before and stay fixed, so that columns are stored in their original order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_common.errors import CheckpointError

DAMPING = 0.01  # share of the mean of H's diagonal that is added to it
_BLOCK = 128  # columns whose errors are compensated in the others at once


@dataclass(frozen=True)
class InputSecondMoments:
    """Second moments of the inputs of a linear layer, prepared for rounding its weight.

    Attributes:
        order: columns of the weight in the order of rounding, int64 [I].
        factor: U, upper triangular, of the moments in that order, fp32 [I, I].
        importance: mean square of each input over the mean of all, fp32 [I].
    """

    order: Tensor
    factor: Tensor
    importance: Tensor

    @classmethod
    def prepare(cls, moments: Tensor) -> InputSecondMoments:
        """Damp, order and factorize second moments X X^T [I, I] of calibration data, for rounding a weight.

        Raises:
            CheckpointError: when they are not finite.
        """
        if not moments.isfinite().all():
            raise CheckpointError("the calibration data give activations that are not finite", hint="use other texts")
        whole = moments.double()
        mean = whole.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
        damped = whole + torch.eye(len(whole), dtype=torch.float64) * (DAMPING * mean)
        order = damped.diagonal().argsort(descending=True)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
        factor = torch.linalg.cholesky(inverse, upper=True)
        return cls(order, factor.float(), (damped.diagonal() / mean).float())

    def compensate_rounding_error(
        self, rows: Tensor, scales: Tensor, round_trip: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return rows [R, I] of a weight changed by GPTQ's error compensation, ready to be rounded to the nearest codes.

        Args:
            rows: the weights, fp32.
            scales: the scale of each weight [R, I], or what else `round_trip` requires of it, [.., R, I].
            round_trip: returns the values that the codes of weights [R] stand for, from the weights and their scales.
        """
        left, scales = rows[:, self.order], scales[..., self.order]
        found = torch.empty_like(left)
        for begin in range(0, left.shape[1], _BLOCK):
            end = min(begin + _BLOCK, left.shape[1])
            block, errors = left[:, begin:end].clone(), torch.empty(len(left), end - begin)
            for column in range(end - begin):
                at = begin + column
                weights = block[:, column]
                found[:, at] = weights
                errors[:, column] = (weights - round_trip(weights, scales[..., at])) / self.factor[at, at]
                block[:, column + 1 :] -= errors[:, column, None] * self.factor[at, at + 1 : end]
            left[:, end:] -= errors @ self.factor[begin:end, end:]
        return torch.empty_like(found).index_copy_(1, self.order, found)
