"""Weights in 4 bits, packed and unpacked by bitsandbytes."""

from __future__ import annotations

import sys

import pytest
import torch

from mega_common.errors import ConfigError
from mega_trainer.kernels.nf4_quantizer import BLOCK, Nf4Quantizer
from mega_trainer.parallel.parameter_info import QuantizedFrozenWeight


@pytest.fixture
def nf4() -> Nf4Quantizer:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return Nf4Quantizer()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_is_near_the_one_that_was_packed_and_the_same_in_any_part_of_rows_and_columns(
    nf4: Nf4Quantizer, dtype: torch.dtype
) -> None:
    values = torch.randn(3, 6, 2 * BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, scales = nf4.pack_weight(values)
    assert packed.shape == (3, 6, BLOCK)
    assert scales.shape == (3, 6, 2)
    found = nf4.unpack_weight(packed, scales, dtype)
    assert found.dtype == dtype
    largest = values.unflatten(-1, (2, BLOCK)).abs().amax(-1, keepdim=True)
    off = (found - values).unflatten(-1, (2, BLOCK)).abs() / largest
    assert 0 < off.max() < 0.16  # half of the widest gap between neighboring quantiles is 0.152
    for part in (slice(1, 2), slice(None)), (slice(2, 5), slice(BLOCK, None)):
        own = nf4.unpack_weight(*nf4.pack_weight(values[:, *part]), dtype)
        assert torch.equal(own, found[:, *part])
    assert torch.equal(nf4.unpack_weight(*nf4.pack_weight(found), dtype), found)


def test_rows_that_blocks_do_not_fill_and_a_missing_library_are_told(
    nf4: Nf4Quantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"those of a\.weight have 96 on a rank"):
        QuantizedFrozenWeight("a.weight", (4, 96), torch.float32, torch.device("cpu"), nf4)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match="requires bitsandbytes, which cannot be imported") as told:
        Nf4Quantizer()
    assert "qlora" in str(told.value.hint)
