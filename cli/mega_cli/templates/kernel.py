"""Kernel `my_extension`: RMSNorm. Change it to yours, such as a call of a Triton kernel in a `torch.autograd.Function`.

docs/extensions.md has the operations and their arguments. `rms_norm` is differentiable; calls that `supports` refuses are
computed by mega.
"""

from __future__ import annotations

from torch import Tensor

from mega_trainer.extend import Extension, Kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """Return the RMSNorm of x [.., D]."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def supports(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> bool:
    """Return whether the kernel computes a call: not in 16 bits, whose statistics need fp32, and not `1 + weight`."""
    return not zero_centered and x.dtype == weight.dtype and x.dtype.itemsize >= 4


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, kernels={"my_extension": Kernel("rms_norm", rms_norm, supports)}
)
