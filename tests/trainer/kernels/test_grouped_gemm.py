"""Products by groups of rows, against one group at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.torch_kernels import TorchKernels

counts = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@given(counts)
def test_each_row_meets_its_groups_matrix(counts: list[int]) -> None:
    rows = GroupedRows.from_counts(counts, torch.device("cpu"))
    group = [index for index, count in enumerate(counts) for _ in range(count)]
    x, y = torch.randn(len(group), 6, dtype=torch.float64), torch.randn(len(group), 4, dtype=torch.float64)
    weight = torch.randn(len(counts), 4, 6, dtype=torch.float64)
    kernels = TorchKernels()
    expected = torch.stack([weight[g] @ x[i] for i, g in enumerate(group)]) if group else y
    torch.testing.assert_close(kernels.grouped_linear(x, weight, rows), expected)
    sums = torch.zeros(len(counts), 4, 6, dtype=torch.float64)
    for i, g in enumerate(group):
        sums[g] += torch.outer(y[i], x[i])
    torch.testing.assert_close(kernels.grouped_wgrad(y, x, rows), sums)


def test_torchs_own_kernel_means_the_same() -> None:
    """It is used on GPUs; on a CPU it takes fp32, by which its conventions can be checked."""
    rows = GroupedRows.from_counts([3, 0, 5], torch.device("cpu"))
    x, y, weight = torch.randn(8, 16), torch.randn(8, 24), torch.randn(3, 24, 16)
    kernels = TorchKernels()
    torch.testing.assert_close(F.grouped_mm(x, weight.mT, offs=rows.ends), kernels.grouped_linear(x, weight, rows))
    torch.testing.assert_close(F.grouped_mm(y.t(), x, offs=rows.ends), kernels.grouped_wgrad(y, x, rows))
