"""Libraries' attention, both ways, where their kernels are stood in for by products: what they are told must mean the same."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from inspect import Signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library as Operators
from trainer.kernels.published import ARCHIVES, Library

from mega_trainer.kernels import blockwise_attention, flash_attention
from mega_trainer.kernels.attention_masks import ALL, CAUSAL, AttentionMaskSpec, BandMask, PackedDocumentMask
from mega_trainer.kernels.flash_attention import FlashAttention2, FlashAttention3, FlashKernel
from mega_trainer.kernels.flex_attention import FlexAttentionKernel
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.torch_kernels import TorchKernels, reference_attention

B, S, H, K = 2, 6, 4, 2
PUBLISHED = Library(next(ARCHIVES.glob("flash_attn-*.tar.gz")))
MASKS: dict[str, AttentionMaskSpec] = {
    "causal": CAUSAL,
    "window": BandMask(left=2, right=0),
    "documents": PackedDocumentMask.from_lengths([1, 5, 3, 3], CAUSAL, torch.device("cpu")),
    "both": PackedDocumentMask.from_lengths([6, 2, 4], BandMask(left=1, right=0), torch.device("cpu")),
}


class Products:
    """No kernel at all."""

    def supports_call(self, q: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform) -> bool:
        return False

    def supports_uneven_heads(self, d: int, e: int) -> bool:
        return True


def mask_and_scores(given: dict[str, Any], q: Tensor) -> tuple[AttentionMaskSpec, AttentionScoreTransform]:
    """What a library's arguments say, of either version."""
    causal = given.get("causal", given.get("is_causal"))
    left, right = given["window_size_left"], 0 if causal else given["window_size_right"]
    band = BandMask(None if left < 0 else left, None if right < 0 else right)
    how = AttentionScoreTransform(given["softmax_scale"], given["softcap"] or None)
    if given.get("cu_seqlens_q") is None:
        return band, how
    lengths = given["cu_seqlens_q"].diff().tolist()
    assert q.dim() == 3
    assert max(lengths) == given["max_seqlen_q"] == given["max_seqlen_k"]
    assert given["cu_seqlens_k"].equal(given["cu_seqlens_q"])
    return PackedDocumentMask.from_lengths(lengths, band, q.device), how


def forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    mask, how = mask_and_scores(given, q)
    one = [t if t.dim() == 4 else t.unsqueeze(0) for t in (q, k, v)]
    y, lse = blockwise_attention.attend_block(Products(), *one, mask, how)
    return y.view(*q.shape[:-1], v.shape[-1]), lse.transpose(1, 2).reshape(*q.shape[:-3], q.shape[-2], q.shape[-3])


def backward(*operands: Tensor, **given: Any) -> None:
    dy, q, k, v, y, lse, *grads = operands
    mask, how = mask_and_scores(given, q)
    one = [t if t.dim() == 4 else t.unsqueeze(0) for t in (dy, q, k, v, y)]
    lse = lse.view(-1, q.shape[-2], q.shape[-3]).transpose(1, 2)
    assert all(grad.is_contiguous() for grad in grads)
    for grad, made in zip(
        grads, blockwise_attention.attend_block_backward(Products(), *one, lse, mask, how), strict=True
    ):
        grad.copy_(made.view_as(grad))


def taking(signature: Signature, stand_in: Callable[..., Any], operands: int) -> Callable[..., Any]:
    """A function with the published arguments, whose first ones are the operands."""

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = list(bound.arguments.values())
        return stand_in(*values[:operands], **dict(list(bound.arguments.items())[operands:]))

    return function


@pytest.fixture
def flash2(monkeypatch: pytest.MonkeyPatch) -> FlashKernel:
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for way, stand_in, operands in (("forward", forward, 3), ("backward", backward, 9)):
        for kind in ("", "varlen_"):
            name = f"_flash_attn_{kind}{way}"
            signature = PUBLISHED.signature(f"flash_attn.flash_attn_interface.{name}")
            setattr(interface, name, taking(signature, even(stand_in), operands))
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    return FlashAttention2()


def even(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """For version 2, whose heads are all of one width."""

    def function(*operands: Tensor, **given: Any) -> Any:
        assert (
            len(
                {t.shape[-1] for t in operands if t.dim() == operands[0].dim() and t is not operands[5 % len(operands)]}
            )
            == 1
        )
        return stand_in(*operands, **given)

    return function


@pytest.fixture
def flash3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashKernel]:
    """Operators with the published schema, so that torch's dispatcher itself checks how they are called."""
    operators = Operators("flash_attn_3", "DEF")
    for name, stand_in, operands in (("fwd", forward, 3), ("bwd", backward, 9)):
        schema = PUBLISHED.schema(f"flash_attn_3::{name}").removeprefix("flash_attn_3::")
        operators.define(schema[: schema.index("->")] + "-> " + ("(Tensor, Tensor)" if name == "fwd" else "()"))
        signature = PUBLISHED.operator(f"flash_attn_3::{name}")
        operators.impl(name, taking(signature, stand_in, operands), "CPU")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    yield FlashAttention3()
    operators._destroy()


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> FlashKernel:
    """As torch computes it without a compiler; it says that it goes backward on GPUs alone, and does here.

    It is traced all the same: anew for each test, for a second soft cap in one process would be traced as a variable, which
    fails. A model has one.
    """
    torch._dynamo.reset()
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    return FlexAttentionKernel(compiled=False)


@pytest.fixture(params=["flash2", "flash3", "flex"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashKernel:
    monkeypatch.setattr(flash_attention, "_on_gpu", lambda x: True)
    monkeypatch.setattr(flash_attention, "supports_fused_attention_on_gpu", lambda q, v: True)  # fp64, too
    made: FlashKernel = request.getfixturevalue(request.param)
    return made


MORE: dict[str, dict[str, Any]] = {
    "plain": {}, "cap": {"softcap": 1.5}, "sinks": {"sinks": torch.tensor([0.3, -1.0, 0.0, 2.0]).double()}
}  # fmt: skip
CASES = [
    *itertools.product(["flash2", "flash3"], MASKS, MORE),
    *[("flex", kind, "cap") for kind in MASKS],  # each is traced, which takes its time
]


def operands(d: int = 8, e: int = 8) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(B, S, H, d), (B, S, K, d), (B, S, K, e)]
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("engine", "kind", "more"), CASES, indirect=["engine"])
def test_attention_is_that_of_plain_products(engine: FlashKernel, kind: str, more: str) -> None:
    kernels, how = TorchKernels(flash=engine), AttentionScoreTransform(0.4, **MORE[more])
    dy = torch.randn(B, S, H, 8, dtype=torch.float64)
    found = []
    for attend in (kernels.attention, reference_attention):
        given = operands()
        y = attend(*given, MASKS[kind], how)
        found.append([y, *torch.autograd.grad(y, given, dy)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("d", "e"), [(16, 8), (192, 128)])
def test_heads_of_two_sizes(engine: FlashKernel, d: int, e: int) -> None:
    test = [TorchKernels(flash=engine).attention, reference_attention]
    mine, theirs = (
        torch.autograd.grad(attend(*(t := operands(d, e)), CAUSAL, AttentionScoreTransform(0.1)).sum(), t)
        for attend in test
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_blocks_of_keys_add_up(engine: FlashKernel) -> None:
    """As the ring has them: each block's backward is told the result of all."""
    kernels, how, (q, k, v) = TorchKernels(flash=engine), AttentionScoreTransform(0.4, softcap=3.0), operands()
    expected = reference_attention(q, k, v, ALL, how)
    halves = slice(0, 2), slice(2, S)
    made = [kernels.attend_block(q.detach(), k[:, half].detach(), v[:, half].detach(), ALL, how) for half in halves]
    lse = torch.logaddexp(made[0][1], made[1][1])
    y = sum(own * (own_lse - lse).exp().unsqueeze(-1) for own, own_lse in made)
    assert isinstance(y, Tensor)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(expected)
    dq, dk, dv = torch.autograd.grad(expected, (q, k, v), dy)
    parts = [
        kernels.attend_block_backward(
            dy, q.detach(), k[:, half].detach(), v[:, half].detach(), y.detach(), lse.detach(), ALL, how
        )
        for half in halves
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    for index, whole in ((1, dk), (2, dv)):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], 1), whole)


def test_gradients_are_reproducible_where_that_is_asked_for(
    flash3: FlashKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    q, k, v = operands()
    call = flash_attention.FlashAttentionCall.from_mask(CAUSAL, AttentionScoreTransform(0.4), S, S)
    monkeypatch.setattr(flash3, "library", type("", (), {"bwd": staticmethod(lambda *_, **how: given.update(how))}))
    for wanted in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda wanted=wanted: wanted)
        flash3.backward(q, q, k, v, q, q, call)
        assert given["deterministic"] is wanted
