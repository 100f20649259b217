"""Head and cross entropy in chunks, over a split vocabulary, against torch's on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.nn import functional as F

from mega_trainer.distributed.comm import CommGroup, CommTrafficCounter
from mega_trainer.kernels import gemm_accumulation
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.model import vocab_parallel_loss
from mega_trainer.model.vocab_parallel_loss import fused_linear_cross_entropy


def inputs(tokens: int, vocab: int, width: int = 5, rows: int | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Hidden states, a head of `rows` rows whose padding is not zero, labels, and weights that are partly zero."""
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(tokens, width, generator=g, dtype=torch.float64, requires_grad=True),
        "head": torch.randn(rows or vocab, width, generator=g, dtype=torch.float64, requires_grad=True),
        "labels": torch.randint(0, vocab, (tokens,), generator=g),
        "weights": (torch.rand(tokens, generator=g) * 2 - 0.6).clamp(min=0),
    }


def expected(
    given: dict[str, torch.Tensor], vocab: int, scale: float, softcap: float | None = None
) -> list[torch.Tensor]:
    logits = given["hidden"] @ given["head"][:vocab].t() + (given["bias"][:vocab] if "bias" in given else 0.0)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, given["labels"], reduction="none")
    total = (losses * given["weights"]).sum()
    leaves = [given[name] for name in ("hidden", "head", "bias") if name in given]
    return [total, losses, *torch.autograd.grad(total * scale, leaves)]


@settings(deadline=None)
@given(
    st.integers(1, 70), st.integers(2, 30), st.integers(0, 9), st.sampled_from([1, 16 * 30, 32 * 30, 1 << 22]),
    st.sampled_from([None, 0.5, 30.0]), st.booleans(),
)  # fmt: skip
def test_is_torchs_cross_entropy(
    tokens: int, vocab: int, padding: int, chunk: int, softcap: float | None, biased: bool
) -> None:
    data = inputs(tokens, vocab, rows=vocab + padding)
    if biased:
        data["bias"] = torch.linspace(-1, 1, vocab + padding, dtype=torch.float64).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vocab_parallel_loss.CHUNK_ELEMENTS, "cpu", chunk)
        patch.setitem(vocab_parallel_loss.LEAF_ELEMENTS, False, chunk // 2)  # so that a chunk may be of several pieces
        total, losses = fused_linear_cross_entropy(**data, group=CommGroup("tp"), vocab_size=vocab, softcap=softcap)
    (total * 0.25).backward()
    found = [total, losses, *(data[name].grad for name in ("hidden", "head", "bias") if name in data)]
    for mine, reference in zip(found, expected(data, vocab, 0.25, softcap), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_is_the_same_compiled() -> None:
    plain, made = inputs(40, 30, rows=32), inputs(40, 30, rows=32)
    found = fused_linear_cross_entropy(**plain, group=CommGroup("tp"), vocab_size=30)
    compiled = fused_linear_cross_entropy(
        **made, group=CommGroup("tp"), vocab_size=30, leaves=FusibleFunctionCompiler(compiled=True)
    )
    for total, _ in (found, compiled):
        total.backward()
    torch.testing.assert_close(compiled, found, rtol=1e-12, atol=1e-12)
    for name in ("hidden", "head"):
        torch.testing.assert_close(made[name].grad, plain[name].grad, rtol=1e-12, atol=1e-12)


def test_padding_and_masked_tokens_have_no_gradient() -> None:
    data = inputs(20, 7, rows=12)
    data["weights"][::2] = 0
    total, losses = fused_linear_cross_entropy(**data, group=CommGroup("tp"), vocab_size=7)
    total.backward()
    hidden, head = data["hidden"].grad, data["head"].grad
    assert hidden is not None
    assert head is not None
    assert (head[7:] == 0).all()
    assert (hidden[::2] == 0).all()
    assert not losses.requires_grad


def test_huge_logits_are_no_trouble() -> None:
    data = inputs(6, 5)
    with torch.no_grad():
        data["hidden"] *= 1e4
    total, _ = fused_linear_cross_entropy(**data, group=CommGroup("tp"), vocab_size=5)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(data["hidden"].grad).all()


def test_without_gradients_none_are_made() -> None:
    data = {name: tensor.detach() for name, tensor in inputs(6, 5).items()}
    total, _ = fused_linear_cross_entropy(**data, group=CommGroup("tp"), vocab_size=5)
    assert not total.requires_grad


def test_an_evaluation_multiplies_for_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters want gradients there too, but nobody asks for them."""
    made: list[torch.Tensor] = []
    real = gemm_accumulation.gemm_into
    monkeypatch.setattr(gemm_accumulation, "gemm_into", lambda *args, **options: made.append(real(*args, **options)))
    data = inputs(6, 5)
    with torch.no_grad():
        fused_linear_cross_entropy(**data, group=CommGroup("tp"), vocab_size=5)
    assert not made
    fused_linear_cross_entropy(**data, group=CommGroup("tp"), vocab_size=5)
    assert made


def test_low_precision_sums_in_fp32() -> None:
    data = inputs(64, 40)
    exact = expected(data, 40, 1.0)
    low = {k: v.detach().bfloat16().requires_grad_() if v.dtype == torch.float64 else v for k, v in data.items()}
    total, losses = fused_linear_cross_entropy(**low, group=CommGroup("tp"), vocab_size=40)
    total.backward()
    assert total.dtype == losses.dtype == torch.float32
    assert low["head"].grad.dtype == torch.bfloat16
    torch.testing.assert_close(total.double(), exact[0], rtol=1e-2, atol=0.0)
    torch.testing.assert_close(low["head"].grad.double(), exact[3], rtol=0.05, atol=0.15)


VOCABS = (2, 3, 9, 13, 16)  # of some, ranks hold padding alone
CAPS = {2: None, 3: 0.7, 9: 2.0, 13: None, 16: 5.0}


def split_head() -> dict[int, Any]:
    """Each rank's loss, and gradients: of the hidden state a part, of the head its rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out: dict[int, Any] = {}
    for vocab in VOCABS:
        log = CommTrafficCounter()
        group = CommGroup("tp", tuple(range(ranks)), rank, dist.group.WORLD, log=log)
        rows = -(-vocab // ranks)
        data = inputs(40, vocab, rows=rows * ranks)
        head = data["head"].detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vocab_parallel_loss.CHUNK_ELEMENTS, "cpu", 16 * rows)
            total, _ = fused_linear_cross_entropy(
                **{**data, "head": head}, group=group, vocab_size=vocab, softcap=CAPS[vocab]
            )
        total.backward()
        out[vocab] = (total.item(), data["hidden"].grad, head.grad, log.counts["tp", "all_reduce"][0])
    return out


def test_a_vocabulary_split_over_ranks() -> None:
    found = run_ranks(split_head, 4)
    for vocab in VOCABS:
        data = inputs(40, vocab, rows=-(-vocab // 4) * 4)
        total, _, hidden, head = expected(data, vocab, 1.0, CAPS[vocab])
        assert all(rank[vocab][0] == pytest.approx(total.item(), rel=1e-12) for rank in found)
        torch.testing.assert_close(sum(rank[vocab][1] for rank in found), hidden)
        torch.testing.assert_close(torch.cat([rank[vocab][2] for rank in found]), head)
        assert found[0][vocab][3] == 2 * 3  # two sums for each of three chunks
