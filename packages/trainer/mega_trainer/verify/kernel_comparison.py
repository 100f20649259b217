"""Kernels of extensions against mega's: one step of the tiny model in one process with each, in the widest precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from mega_common.extension_entries import Kernel
from mega_trainer.run import build_components
from mega_trainer.verify.case_comparison import TOLERANCE, RankFindings, compare_with_reference_outcome
from mega_trainer.verify.case_trainer import CaseOutcome, CaseTrainer
from mega_trainer.verify.layout_case import LayoutCase

# Largest relative differences by precision, widest first: of losses, gradient norms and gradients.
KERNEL_BOUNDS: Mapping[str, float] = {"fp64": TOLERANCE, "fp32": 3e-5, "bf16": 5e-2}


@dataclass
class KernelFindings:
    """Comparison of an extension's kernel with mega's kernel for the same operation.

    Attributes:
        precision: widest precision in which the kernel computes calls of the tiny model; None if there is none.
        findings: differences of losses and gradients; None without a precision.
        calls: number of calls that it computes.
    """

    precision: str | None = None
    findings: RankFindings | None = None
    calls: int = 0


def compare_kernels(case: LayoutCase, names: Sequence[str]) -> Iterator[KernelFindings]:
    """Yield the comparison of each extension kernel in `names` with mega's, by a training step in this process."""
    for kernel in case.config.registry.select_kernels(names):
        found = KernelFindings()
        for precision in KERNEL_BOUNDS:
            one = replace(case, precision=precision, steps=1, clip=0.0)
            mine, calls = _train_with_kernel(one, kernel)
            if calls:
                wanted, _ = _train_with_kernel(one, None)
                mine.tensors = wanted.tensors = {}  # one update of an optimizer magnifies rounding of small gradients
                found = KernelFindings(precision, compare_with_reference_outcome(mine, wanted), calls)
                break
        yield found


def _train_with_kernel(case: LayoutCase, kernel: Kernel | None) -> tuple[CaseOutcome, int]:
    """Return the results of a step with at most one kernel of an extension, and the number of its calls."""
    calls = 0

    def compute(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        assert kernel is not None
        return kernel.compute(*arguments, **options)

    chosen = [] if kernel is None else [replace(kernel, compute=compute)]
    with mock.patch.object(build_components, "select_extension_kernels", return_value=chosen):
        return CaseTrainer.build(case).run(1), calls
