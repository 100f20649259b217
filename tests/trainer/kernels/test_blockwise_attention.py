"""Attention block by block against attention at once, and its backward against autograd's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mega_trainer.kernels import blockwise_attention, flash_attention
from mega_trainer.kernels.attention_masks import (
    ALL,
    CAUSAL,
    AttentionMaskSpec,
    BandMask,
    PackedDocumentMask,
    make_rectangle_mask_block,
    materialize_dense_mask,
)
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.torch_kernels import TorchKernels, reference_attention

B, S, H, K, D, E = 2, 6, 4, 2, 8, 3
KERNELS, CPU = TorchKernels(), torch.device("cpu")


def operands(*, keys: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(B, S, H, D), (B, keys, K, D), (B, keys, K, E)]
    return [torch.randn(shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes]


MASKS: dict[str, AttentionMaskSpec] = {
    "causal": CAUSAL,
    "all": ALL,
    "window": BandMask(left=2, right=0),
    "documents": PackedDocumentMask.from_lengths([1, 5, 3, 3], CAUSAL, CPU),
    "both": PackedDocumentMask.from_lengths([6, 2, 4], BandMask(left=1, right=0), CPU),
    "window to both sides": PackedDocumentMask.from_lengths([6, 2, 4], BandMask(left=2, right=1), CPU),
}


@pytest.mark.parametrize("tile", [1 << 20, 2 * B * H * S, 1], ids=["at once", "two rows", "row by row"])
@pytest.mark.parametrize(
    "how", [AttentionScoreTransform(0.4), AttentionScoreTransform(1.5, softcap=2.0)], ids=["plain", "softcap"]
)
@pytest.mark.parametrize("kind", MASKS)
def test_one_block_is_all_of_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, how: AttentionScoreTransform, tile: int
) -> None:
    monkeypatch.setitem(blockwise_attention.TILE_ELEMENTS, "cpu", tile)
    q, k, v = operands()
    mask = MASKS[kind]
    expected = reference_attention(q, k, v, mask, how)
    y, lse = KERNELS.attend_block(q, k, v, mask, how)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    with torch.no_grad():
        parts = KERNELS.attend_block_backward(dy, q, k, v, y, lse, mask, how)
    for part, whole in zip(parts, (q, k, v), strict=True):
        torch.testing.assert_close(part, whole.grad)


@pytest.mark.parametrize("mask", [CAUSAL, BandMask(left=2, right=0), BandMask(left=2), BandMask(left=3, right=1)])
@pytest.mark.parametrize("keys", [S, 15])
def test_a_few_queries_of_a_cache_are_attended_at_once(mask: BandMask, keys: int) -> None:
    q, k, v = (each.detach() for each in operands(keys=keys))
    assert KERNELS.whole is not None
    with torch.no_grad():
        assert KERNELS.whole.supports_call(q, k, v, mask, AttentionScoreTransform(0.4))
        found = KERNELS.attention(q, k, v, mask, AttentionScoreTransform(0.4))
    torch.testing.assert_close(found, reference_attention(q, k, v, mask, AttentionScoreTransform(0.4)))
    assert not KERNELS.whole.supports_call(
        q, k, v, BandMask(left=2, right=0), AttentionScoreTransform(0.4)
    )  # training's, which keep no mask


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "how", [{}, {"softcap": 1.5}, {"sinks": torch.tensor([0.3, -1.0, 0.0, 2.0]).double()}], ids=str
)
def test_attention_as_one_block_has_the_gradients_of_plain_products(kind: str, how: dict[str, Any]) -> None:
    found = []
    for attend in (KERNELS.attention, reference_attention):
        given = [*operands(), *(t.clone().requires_grad_() for t in how.values() if isinstance(t, Tensor))]
        sinks = {"sinks": given[3]} if len(given) > 3 else {}
        y = attend(*given[:3], MASKS[kind], AttentionScoreTransform(0.4, **(how | sinks)))  # type: ignore[arg-type]
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
        found.append([y, *(t.grad for t in given)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@given(st.integers(1, 12), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 20)), st.booleans())
def test_a_rectangle_is_cut_from_the_whole_mask(queries: int, keys: int, window: int | None, behind: bool) -> None:
    gap = 3
    here, there = range(keys + gap, keys + gap + queries), range(keys)
    if behind:
        here, there = range(queries), range(queries + gap, queries + gap + keys)
    whole = torch.zeros(queries, keys, dtype=torch.bool)
    place = torch.tensor(here)[:, None] - torch.tensor(there)
    expected = place.abs() <= (1000 if window is None else window)
    part = make_rectangle_mask_block(slice(None), here, there, BandMask(window, window))
    if part is not None:
        square = materialize_dense_mask(part.mask, (1, len(part.queries)), len(part.keys), CPU)[0, 0]
        assert square.any(1).all()  # every query sees a key
        first, column = part.queries.start - here.start, part.keys.start - there.start
        whole[first : first + len(square), column : column + square.shape[1]] = square
    assert whole.equal(expected)


def test_memory_does_not_grow_with_queries_times_keys() -> None:
    """A window of a long sequence, and many documents: the largest tensor made stays below the operands."""
    length = 4096
    q, k, v = (torch.randn(1, length, 2, 8) for _ in range(3))
    for mask in (
        BandMask(left=31, right=0),
        BandMask(left=31, right=31),
        PackedDocumentMask.from_lengths([64] * (length // 64), CAUSAL, CPU),
    ):
        with Largest() as largest:
            KERNELS.attend_block(q, k, v, mask, AttentionScoreTransform(0.4, softcap=2.0))
        assert largest.elements <= max(q.numel(), 2 * blockwise_attention.TILE_ELEMENTS["cpu"])


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, list | tuple) else [out]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("kind", MASKS)
def test_calls_of_a_gpus_kernels_are_those_that_torch_declares(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Arguments and shapes, both ways, where heads are of uneven widths too. Nothing is computed."""
    monkeypatch.setattr(flash_attention, "_on_gpu", lambda x: True)
    with torch.device("meta"):
        q, k, v = (torch.empty(B, S, n, d, dtype=torch.bfloat16) for n, d in ((H, 16), (K, 16), (K, 8)))
    mask = MASKS[kind]
    if isinstance(mask, PackedDocumentMask):
        mask = replace(mask, cu_seqlens=mask.cu_seqlens.to("meta"))
    y, lse = KERNELS.attend_block(q, k, v, mask, AttentionScoreTransform(0.4))
    assert (y.shape, lse.shape, lse.dtype) == ((B, S, H, 8), (B, S, H), torch.float32)
    grads = KERNELS.attend_block_backward(torch.empty_like(y), q, k, v, y, lse, mask, AttentionScoreTransform(0.4))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    "how",
    [AttentionScoreTransform(0.4), AttentionScoreTransform(0.4, softcap=50.0)],
    ids=["fused", "product by product"],
)
def test_low_precision_keeps_its_sums_wide(how: AttentionScoreTransform) -> None:
    q, k, v = operands(dtype=torch.bfloat16)
    y, lse = KERNELS.attend_block(q, k, v, CAUSAL, how)
    assert lse.dtype == torch.float32
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    expected = reference_attention(*wide, CAUSAL, how)
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    expected.sum().backward()
    dy = torch.ones_like(y, dtype=torch.bfloat16)
    parts = KERNELS.attend_block_backward(dy, q, k, v, y.bfloat16(), lse, CAUSAL, how)
    for part, whole in zip(parts, wide, strict=True):
        torch.testing.assert_close(part.float(), whole.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("query", "value"), [(8, 3), (3, 8)])
def test_heads_of_uneven_widths_are_fused_too(query: int, value: int) -> None:
    """As those of latent attention are."""
    q, k, v = (torch.randn(B, S, K, n, dtype=torch.float64, requires_grad=True) for n in (query, query, value))
    with mock.patch.object(
        blockwise_attention, "_compute_scores", side_effect=AssertionError("made product by product")
    ):
        y, lse = KERNELS.attend_block(q, k, v, CAUSAL, AttentionScoreTransform(0.4))
        parts = KERNELS.attend_block_backward(torch.ones_like(y), q, k, v, y, lse, CAUSAL, AttentionScoreTransform(0.4))
    expected = reference_attention(q, k, v, CAUSAL, AttentionScoreTransform(0.4))
    torch.testing.assert_close(y, expected)
    expected.sum().backward()
    for part, whole in zip(parts, (q, k, v), strict=True):
        torch.testing.assert_close(part, whole.grad)
