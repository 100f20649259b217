"""Products and other sums into a tensor that may be wider."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_trainer.kernels import gemm_accumulation

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def before(*shape: int, dtype: torch.dtype) -> Tensor:
    """What is there, which only what is added may leave; else it must not be read."""
    return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32))


def check(found: Tensor, there: Tensor, values: Tensor, add: bool, dtype: torch.dtype) -> None:
    """A sum that is rounded on its way may differ by a rounding a term: of at most four here, of numbers up to a few."""
    expected = values.to(dtype).to(there.dtype) + (there if add else 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_go_into_what_is_given(dtype: torch.dtype, add: bool) -> None:
    a, b = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype)
    torch.testing.assert_close(gemm_accumulation.gemm_into(a, b), a @ b)
    there = before(5, 3, dtype=dtype)
    out = there.clone() if add else torch.full_like(there, float("nan"))
    assert gemm_accumulation.gemm_into(a, b, out, add=add) is out
    check(out, there, a.double() @ b.double(), add, dtype)

    values, scale = before(5, 3, dtype=dtype), torch.tensor(0.37, dtype=there.dtype)
    out = there.clone() if add else torch.full_like(there, float("nan"))
    assert gemm_accumulation.write_scaled_values(values, scale, dtype, out, add=add) is out
    check(out, there, values * scale, add, dtype)

    rows, places = torch.randn(2, 4, 3).to(dtype), torch.tensor([[4, 0, 4, 1], [0, 1, 1, 4]])
    out = there.clone() if add else torch.full_like(there, float("nan"))
    assert gemm_accumulation.write_embedding_grad(rows, places, out, add=add) is out
    one_hot = torch.nn.functional.one_hot(places.flatten(), 5).double()
    check(out, there, one_hot.t() @ rows.flatten(0, 1).double(), add, dtype)


@pytest.mark.parametrize("add", [False, True])
def test_what_a_gpu_does_is_the_same(add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ways that a GPU takes, those that a CPU has too; of the others shapes and arguments."""
    monkeypatch.setattr(gemm_accumulation, "_is_gpu", lambda out: True)
    there, scale = before(5, 3, dtype=torch.float32), torch.tensor(0.37)
    rows, places = torch.randn(8, 3).bfloat16(), torch.tensor([4, 0, 4, 1, 0, 1, 1, 4])
    out = there.clone() if add else torch.full_like(there, float("nan"))
    gemm_accumulation.write_embedding_grad(rows, places, out, add=add)
    exact = torch.nn.functional.one_hot(places, 5).float().t() @ rows.float()
    torch.testing.assert_close(out, exact + (there if add else 0))
    out = there.clone() if add else torch.full_like(there, float("nan"))
    gemm_accumulation.write_scaled_values(exact, scale, torch.bfloat16, out, add=add)
    torch.testing.assert_close(out, exact * scale + (there if add else 0))
    with torch.device("meta"):
        sums, a, b = torch.empty(4, 6), torch.empty(4, 5, dtype=torch.bfloat16), torch.empty(5, 6, dtype=torch.bfloat16)
    assert gemm_accumulation.gemm_into(a, b, sums, add=add) is sums
