"""Each kernel against plain products, by the checks of `mega doctor`; a library that is not installed is skipped."""

from __future__ import annotations

import pytest
import torch

from mega_trainer.doctor.kernel_checks import KernelCheck, iterate_kernel_checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("check", iterate_kernel_checks(), ids=lambda check: check.name)
def test_a_kernel_computes_what_plain_products_do(check: KernelCheck) -> None:
    result = check.run_check(torch.device("cuda"))
    if result.verdict == "skipped":
        pytest.skip(result.measured)
    assert result.verdict == "ok", result
