"""Attention block by block against attention at once, and its backward against autograd's."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from mega_trainer.kernels import blocks
from mega_trainer.kernels.base import Scores, Seen
from mega_trainer.kernels.torch import TorchKernels, plain_attention

B, S, H, K, D, E = 2, 6, 4, 2, 8, 3
KERNELS = TorchKernels()


def operands(*, keys: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(B, S, H, D), (B, keys, K, D), (B, keys, K, E)]
    return [torch.randn(shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes]


def kinds() -> Iterator[tuple[Seen, Tensor | None]]:
    """What is seen, and the same as a mask of all."""
    drawn = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.5
    yield "causal", None
    yield "all", torch.ones(1, 1, S, S, dtype=torch.bool)
    yield (mask := drawn | torch.eye(S, dtype=torch.bool)), mask


@pytest.mark.parametrize("tile", [1 << 20, 2 * B * H * S, 1], ids=["at once", "two rows", "row by row"])
@pytest.mark.parametrize("how", [Scores(0.4), Scores(1.5, softcap=2.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize(("seen", "mask"), kinds(), ids=["causal", "all", "mask"])
def test_one_block_is_all_of_it(
    monkeypatch: pytest.MonkeyPatch, seen: Seen, mask: Tensor | None, how: Scores, tile: int
) -> None:
    monkeypatch.setitem(blocks.TILE_ELEMENTS, "cpu", tile)
    q, k, v = operands()
    expected = plain_attention(q, k, v, mask, how)
    y, lse = KERNELS.attend_block(q, k, v, seen, how)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    with torch.no_grad():
        parts = KERNELS.attend_block_backward(dy, q, k, v, y, lse, seen, how)
    for part, whole in zip(parts, (q, k, v), strict=True):
        torch.testing.assert_close(part, whole.grad)


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    q, k, v = operands(keys=5)
    mask = torch.ones(1, 1, S, 5, dtype=torch.bool)
    mask[..., 2, :] = False
    y, lse = KERNELS.attend_block(q, k, v, mask, Scores(1.0, softcap=3.0))
    assert torch.isneginf(lse[:, 2]).all()
    assert not y[:, 2].any()
    assert y.isfinite().all()
    total = lse.logaddexp(torch.zeros_like(lse))  # with what other blocks gave
    parts = KERNELS.attend_block_backward(
        torch.ones_like(y), q, k, v, torch.ones_like(y), total, mask, Scores(1.0, 3.0)
    )
    assert all(part.isfinite().all() for part in parts)
    assert not parts[0][:, 2].any()


@pytest.mark.parametrize("how", [Scores(0.4), Scores(0.4, softcap=50.0)], ids=["fused", "product by product"])
def test_low_precision_keeps_its_sums_wide(how: Scores) -> None:
    q, k, v = operands(dtype=torch.bfloat16)
    y, lse = KERNELS.attend_block(q, k, v, "causal", how)
    assert lse.dtype == torch.float32
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    expected = plain_attention(*wide, None, how)
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    expected.sum().backward()
    dy = torch.ones_like(y, dtype=torch.bfloat16)
    parts = KERNELS.attend_block_backward(dy, q, k, v, y.bfloat16(), lse, "causal", how)
    for part, whole in zip(parts, wide, strict=True):
        torch.testing.assert_close(part.float(), whole.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("query", "value"), [(8, 3), (3, 8)])
def test_heads_of_uneven_widths_are_fused_too(query: int, value: int) -> None:
    """As those of latent attention are."""
    q, k, v = (torch.randn(B, S, K, n, dtype=torch.float64, requires_grad=True) for n in (query, query, value))
    with mock.patch.object(blocks, "_scores", side_effect=AssertionError("made product by product")):
        y, lse = KERNELS.attend_block(q, k, v, "causal", Scores(0.4))
        parts = KERNELS.attend_block_backward(torch.ones_like(y), q, k, v, y, lse, "causal", Scores(0.4))
    expected = plain_attention(q, k, v, None, Scores(0.4))
    torch.testing.assert_close(y, expected)
    expected.sum().backward()
    for part, whole in zip(parts, (q, k, v), strict=True):
        torch.testing.assert_close(part, whole.grad)
