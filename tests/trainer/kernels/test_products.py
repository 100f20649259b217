"""Products that are added to what is there."""

from __future__ import annotations

import pytest
import torch

from mega_trainer.kernels.products import add_product


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_product_is_added_in_the_precision_of_the_sum(dtype: torch.dtype) -> None:
    a, b = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype)
    before = torch.randn(5, 3, dtype=torch.promote_types(dtype, torch.float32)) * 1000
    out = before.clone()
    add_product(out, a, b)
    assert not out.equal(before)
    torch.testing.assert_close(out - before, (a.double() @ b.double()).to(out.dtype), rtol=1e-2, atol=1e-2)


def test_a_gpus_call_is_one_that_torch_declares() -> None:
    """Shapes and arguments; nothing is computed."""
    with torch.device("meta"):
        out, a, b = torch.empty(4, 6), torch.empty(4, 5, dtype=torch.bfloat16), torch.empty(5, 6, dtype=torch.bfloat16)
    assert torch.addmm(out, a, b, out_dtype=out.dtype, out=out) is out
