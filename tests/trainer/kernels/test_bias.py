"""Scores with an addend by distance: tile by tile, and of one query at the end of its keys, as written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_trainer.kernels import blockwise_attention
from mega_trainer.kernels.attention_masks import ALL, CAUSAL, AttentionMaskSpec, PackedDocumentMask
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, RelativePositionBias
from mega_trainer.kernels.torch_kernels import TorchKernels

B, S, H, K, D = 2, 7, 4, 2, 3
KERNELS = TorchKernels()


def written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, values: Tensor, zero: int) -> Tensor:
    """With the addend of every pair by itself."""
    queries, keys = q.shape[1], k.shape[1]
    rows = [
        torch.stack([values[:, zero + key - (query + keys - queries)] for key in range(keys)], -1)
        for query in range(queries)
    ]
    k, v = (t.repeat_interleave(H // K, 2) for t in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * 0.4 + torch.stack(rows, 1)
    return torch.einsum("bhst,bthd->bshd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("tile", [1 << 20, 2 * B * H * S, 1], ids=["at once", "two rows", "row by row"])
@pytest.mark.parametrize("kind", ["all", "causal", "documents", "one query"])
def test_an_addend_by_distance(monkeypatch: pytest.MonkeyPatch, kind: str, tile: int) -> None:
    monkeypatch.setitem(blockwise_attention.TILE_ELEMENTS, "cpu", tile)
    queries = 1 if kind == "one query" else S
    g = torch.Generator().manual_seed(0)
    shapes = (B, queries, H, D), (B, S, K, D), (B, S, K, D), (H, S + queries - 1)
    q, k, v, values = (torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes)
    packed = PackedDocumentMask.from_lengths([7, 3, 4], ALL, torch.device("cpu"))
    mask: AttentionMaskSpec = {"all": ALL, "causal": CAUSAL, "documents": packed, "one query": ALL}[kind]
    seen = torch.ones(B, 1, queries, S, dtype=torch.bool)
    if kind == "causal":
        seen = seen.tril()
    if kind == "documents":
        seen[1, 0, :3, 3:] = seen[1, 0, 3:, :3] = False
    expected = written_out(q, k, v, seen, values, S - 1)
    dy = torch.randn(expected.shape, generator=g, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, (q, k, v, values), dy)
    for given in (mask, seen):  # the latter product by product
        found = KERNELS.attention(
            q, k, v, given, AttentionScoreTransform(0.4, bias=RelativePositionBias(values, S - 1))
        )
        torch.testing.assert_close(found, expected)
        for mine, other in zip(torch.autograd.grad(found, (q, k, v, values), dy), wanted, strict=True):
            torch.testing.assert_close(mine, other)
