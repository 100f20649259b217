"""The checks of kernels pass on a CPU where a kernel exists there, and find one that computes something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_trainer.doctor.kernel_checks import KernelCheck, iterate_kernel_checks
from mega_trainer.kernels import gemm_accumulation
from mega_trainer.kernels.torch_kernels import TorchKernels

CPU = torch.device("cpu")
CHECKS = {check.name: check for check in iterate_kernel_checks()}
ON_CPU = {"attention sdpa", "attention varlen", "paged attention gathered", "grouped GEMM", "weight gradients"}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_kernels_pass_or_say_why_they_cannot_run(check: KernelCheck) -> None:
    result = check.run_check(CPU)
    runs = any(check.name.startswith(name) for name in ON_CPU)
    assert result.verdict == ("ok" if runs else "skipped"), result
    assert runs or "requires a GPU" in result.measured


WRONG: dict[str, tuple[object, str, str]] = {
    "attention": (TorchKernels, "attention", "attention sdpa, documents"),
    "paged attention": (TorchKernels, "paged_attention", "paged attention gathered"),
    "a grouped GEMM": (TorchKernels, "grouped_linear", "grouped GEMM, 3+0+13+8 rows"),
    "weight gradients": (gemm_accumulation, "gemm_into", "weight gradients added to fp32"),
}


@pytest.mark.parametrize(("owner", "name", "check"), WRONG.values(), ids=WRONG)
def test_a_kernel_that_is_wrong_by_two_percent_fails(
    owner: object, name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(owner, name)
    calls = list[int]()

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        out: Tensor = real(*args, **kwargs)
        half = name == "grouped_linear" and args[1].dtype == torch.float32  # its reference is the same function
        return out if half else out * 1.02

    monkeypatch.setattr(owner, name, wrong)
    result = CHECKS[check].run_check(CPU)
    assert calls
    assert result.verdict == "failed", result


class GradientOfNan(torch.autograd.Function):
    """Identity whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * float("nan")


@pytest.mark.parametrize("operand", [0, 1, 2])
def test_a_kernel_whose_gradient_is_nan_fails(operand: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TorchKernels.attention

    def wrong(self: TorchKernels, *args: Any) -> Tensor:
        given = list(args)
        given[operand] = GradientOfNan.apply(given[operand])
        return real(self, *given)

    monkeypatch.setattr(TorchKernels, "attention", wrong)
    assert CHECKS["attention sdpa, causal"].run_check(CPU).verdict == "failed"


def test_a_kernel_that_raises_fails_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr(TorchKernels, "attention", broken)
    result = CHECKS["attention sdpa, causal"].run_check(CPU)
    assert (result.verdict, result.measured) == ("failed", "RuntimeError: no kernel image is available")
