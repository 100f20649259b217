"""The mathematics of Muon: a momentum matrix is replaced by the nearest orthogonal one, roughly.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), and "Muon is scalable for LLM training"
(arXiv:2502.16982) for the scale of the update. Pure functions; the optimizer that calls them on whole matrices lives
with the other optimizers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# f(x) = a x + b x^3 + c x^5 with the steepest rise at 0 that keeps [0, 1.2] in place. It does not settle at 1: five rounds
# leave singular values between about 0.7 and 1.2, which trains as well as exact ones.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrix: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """U V^T, roughly, where `matrix` = U S V^T: every singular value that is not tiny comes near 1.

    Newton-Schulz iteration, X <- a X + b (X X^T) X + c (X X^T)^2 X, on the matrix divided by its Frobenius norm.

    Args:
        matrix: [.., M, N]; leading axes are a batch of matrices.
        steps: rounds; each lifts small singular values about 3.4 times.
        dtype: what to compute in.

    Returns:
        [.., M, N] in `matrix`'s dtype. A matrix of zeros stays one.
    """
    x: Tensor = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT  # the products X X^T are then of the shorter side
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def update_scale(rows: int, columns: int) -> float:
    """0.2 sqrt(max(M, N)): brings the root mean square of an orthogonal [M, N] matrix to 0.2, the size of AdamW's updates.

    With it Muon takes AdamW's learning rate and weight decay (arXiv:2502.16982, equation 4).
    """
    return 0.2 * math.sqrt(max(rows, columns))
