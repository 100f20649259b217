"""Transformer Engine's product and attention, stood in for by torch's: what they are told must mean the same."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_trainer.kernels import te_kernels
from mega_trainer.kernels.attention_masks import ALL, CAUSAL, AttentionMaskSpec, BandMask, PackedDocumentMask
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.te_kernels import TeAttention, TeLinearKernels
from mega_trainer.kernels.torch_kernels import TorchKernels, reference_attention


class Quantised:
    """A tensor in eight bits, of which some products' form is there."""

    def __init__(self, values: Tensor, forms: dict[str, bool]) -> None:
        self.values, self.forms = values, forms


class Quantizer:
    forms: dict[str, bool]

    def set_usage(self, **forms: bool) -> None:
        self.forms = forms

    def __call__(self, x: Tensor) -> Quantised:
        return Quantised(x, self.forms)


def general_gemm(
    a: Tensor | Quantised,
    b: Tensor | Quantised,
    *,
    layout: str,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    accumulate: bool = False,
    bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """Column by column, as cuBLAS has it: B op(A), where A's letter T and B's letter N are plain PyTorch tensors."""
    first, second = (t.values if isinstance(t, Quantised) else t for t in (a, b))
    for factor, summed_last in ((a, layout[0] == "T"), (b, layout[1] == "N")):
        if isinstance(factor, Quantised):
            assert factor.forms["rowwise" if summed_last else "columnwise"]
    made = (second.t() if layout[1] == "T" else second) @ (first.t() if layout[0] == "T" else first)
    made = made.to(out_dtype) if bias is None else made.to(out_dtype) + bias
    if out is not None:
        made = out.copy_(out + made if accumulate else made)
    return made, None, None, None


@pytest.fixture(params=[None, "blockwise"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TeLinearKernels:
    modules = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    extensions = ModuleType("cpp_extensions")
    extensions.general_gemm = general_gemm  # type: ignore[attr-defined]
    modules["transformer_engine.pytorch"].cpp_extensions = extensions  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(te_kernels, "_make_quantizers", lambda *_: (Quantizer(), Quantizer(), Quantizer()))
    return TeLinearKernels(recipe=request.param)


def test_the_three_products_of_a_linear_layer_are_torchs(kernels: TeLinearKernels) -> None:
    x, dy, weight, bias = torch.randn(2, 3, 8), torch.randn(2, 3, 5), torch.randn(5, 8), torch.randn(5)
    plain = TorchKernels()
    for more in ((), (bias,)):
        torch.testing.assert_close(kernels.linear_forward(x, weight, *more), plain.linear_forward(x, weight, *more))
    given, made = kernels.prepare_gradient(dy), kernels.prepare_weight(weight)
    torch.testing.assert_close(kernels.linear_forward(x, made), plain.linear_forward(x, weight))
    for factor in (weight, made):
        torch.testing.assert_close(kernels.linear_dgrad(given, factor), plain.linear_dgrad(dy, weight))
    torch.testing.assert_close(kernels.linear_wgrad(given, x), plain.linear_wgrad(dy, x))


@pytest.mark.parametrize("add", [False, True])
def test_a_weights_gradient_goes_into_the_wider_buffer(kernels: TeLinearKernels, add: bool) -> None:
    x, dy = torch.randn(2, 3, 8), torch.randn(2, 3, 5)
    mine, theirs = torch.ones(5, 8, dtype=torch.float64), torch.ones(5, 8, dtype=torch.float64)
    assert kernels.linear_wgrad(kernels.prepare_gradient(dy), x, mine, add=add) is mine
    TorchKernels().linear_wgrad(dy, x, theirs, add=add)
    torch.testing.assert_close(mine, theirs)


class DotProductAttention:
    """As documented: bshd or thd, causal with a window, or the same of each document."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: tuple[int, int],
        *,
        num_gqa_groups: int,
        qkv_format: str,
        attn_mask_type: str,
        window_size: tuple[int, int],
        softmax_scale: float,
    ) -> None:
        self.heads, self.groups, self.sizes = num_attention_heads, num_gqa_groups, kv_channels
        self.documents = {"thd": True, "bshd": False}[qkv_format]
        assert attn_mask_type == ("padding_causal" if self.documents else "causal")
        self.left, self.right = window_size
        self.scale = softmax_scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **documents: Any) -> Tensor:
        assert (self.heads, self.groups, self.sizes) == (q.shape[-2], k.shape[-2], (k.shape[-1], v.shape[-1]))
        band = BandMask(None if self.left < 0 else self.left, self.right)
        mask: AttentionMaskSpec = band
        if self.documents:
            assert q.dim() == 3
            starts = documents["cu_seqlens_q"]
            mask = PackedDocumentMask.from_lengths(starts.diff().tolist(), band, q.device)
            assert documents["cu_seqlens_kv"] is starts
            assert documents["max_seqlen_q"] == documents["max_seqlen_kv"] == max(mask.lengths)
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        y = reference_attention(q, k, v, mask, AttentionScoreTransform(self.scale)).flatten(-2)
        return y[0] if self.documents else y


MASKS: dict[str, AttentionMaskSpec] = {
    "causal": CAUSAL,
    "window": BandMask(left=2, right=0),
    "documents": PackedDocumentMask.from_lengths([1, 5, 3, 3], CAUSAL, torch.device("cpu")),
    "both": PackedDocumentMask.from_lengths([6, 2, 4], BandMask(left=1, right=0), torch.device("cpu")),
}


@pytest.mark.parametrize("kind", MASKS)
def test_attention_is_that_of_plain_products(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.pytorch = module  # type: ignore[attr-defined]
    module.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr(TeAttention, "supports_call", lambda *_: True)
    kernels = TorchKernels(whole=TeAttention())
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 4)
    for how in (AttentionScoreTransform(0.4), AttentionScoreTransform(0.7), AttentionScoreTransform(0.4)):
        torch.testing.assert_close(
            kernels.attention(q, k, v, MASKS[kind], how), reference_attention(q, k, v, MASKS[kind], how)
        )


def test_what_it_does_not_know_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_kernels, "supports_fused_attention_on_gpu", lambda q, v: True)
    q, k = torch.empty(2, 6, 4, 8), torch.empty(2, 5, 2, 8)
    cases = {(CAUSAL, q): True, (BandMask(left=2, right=0), q): True, (ALL, q): False, (CAUSAL, k): False}
    for (mask, keys), expected in cases.items():
        assert TeAttention.supports_call(None, q, keys, keys, mask, AttentionScoreTransform(1.0)) is expected  # type: ignore[arg-type]
    assert not TeAttention.supports_call(None, q, q, q, CAUSAL, AttentionScoreTransform(1.0, softcap=2.0))  # type: ignore[arg-type]
