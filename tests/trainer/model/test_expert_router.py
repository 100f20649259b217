"""The choice of experts, its losses and its bias, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig, MoeConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.model.expert_router import (
    ExpertRouter,
    compute_router_logits,
    drop_choices_over_capacity,
    select_experts,
    sinkhorn_normalize,
    update_selection_bias,
)
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.expert_routing import MicroBatchRouting, RoutedTokens, compute_routing_metrics

ALONE = (CommGroup("tp"), CommGroup("cp"))


def moe(**fields: Any) -> MoeConfig:
    return MoeConfig.model_validate({"num_experts": 6, "top_k": 2, "ffn_hidden_size": 4, **fields})


def router(**fields: Any) -> ExpertRouter:
    config = ModelConfig.model_validate({
        "num_layers": 1, "hidden_size": 5, "ffn_hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9,
        "init_std": 1.0, "moe": moe(**fields).model_dump(),
    })  # fmt: skip
    made = ExpertRouter(LayerBuilder(config, dtype=torch.float64), 0)
    initialize_weights(made, 1)
    return made


def tokens(matter: Tensor) -> RoutedTokens:
    rows, length = matter.shape
    row = torch.arange(rows).repeat_interleave(length)
    return RoutedTokens(row, torch.arange(length).repeat(rows), matter.flatten(), rows, length)


MATTER = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, [False] * 7])


def routing(matter: Tensor = MATTER) -> MicroBatchRouting:
    return MicroBatchRouting(matter, None, sequence_weight=1 / len(matter), batch_weight=1.0)


def test_weights_are_the_scores_of_the_best() -> None:
    x = torch.randn(7, 5, dtype=torch.float64)
    for score, normalize in [("softmax", True), ("softmax", False), ("sigmoid", True), ("sigmoid", False)]:
        it = router(score=score, normalize=normalize, scaling=2.0)
        chosen, weights, _ = it(x, tokens(torch.ones(1, 7, dtype=torch.bool)), None)
        logits = x @ it.weight.t()
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        best, expected = scores.topk(2).indices, scores.topk(2).values
        torch.testing.assert_close(chosen, best)
        expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
        torch.testing.assert_close(weights, 2 * expected)


def test_a_bias_of_the_choice_changes_no_weight() -> None:
    it = router(selection_bias=True, score="sigmoid", normalize=False)
    assert it.selection is not None
    it.selection.values[4] = 10.0
    x = torch.randn(7, 5, dtype=torch.float64)
    chosen, weights, _ = it(x, tokens(torch.ones(1, 7, dtype=torch.bool)), None)
    assert (chosen[:, 0] == 4).all()
    torch.testing.assert_close(weights[:, 0], (x @ it.weight.t()).sigmoid()[:, 4])


@pytest.mark.parametrize(("kind", "expected"), [("max", {0, 1}), ("top2", {2, 3})])
def test_only_the_best_groups_are_chosen_from(kind: str, expected: set[int]) -> None:
    """Three groups of two: the first has the best expert, the second the best pair."""
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.5, 0.1]])
    chosen = select_experts(scores, moe(groups=3, top_groups=1, group_score=kind), None)
    assert set(chosen.flatten().tolist()) == expected


def losses(it: ExpertRouter, x: Tensor, scope: str) -> tuple[float, float]:
    """The two losses as they are defined, by loops: a mean over sequences, or the one over the batch."""
    logits = (x @ it.weight.t()).view(*MATTER.shape, -1)
    scores = logits.softmax(-1) if it.moe.score == "softmax" else logits.sigmoid()
    p, chosen = scores / scores.sum(-1, keepdim=True), scores.topk(it.moe.top_k).indices
    rows = [[(row, at) for at in range(MATTER.shape[1]) if MATTER[row, at]] for row in range(len(MATTER))]
    aux = z = 0.0
    for group in [[place for row in rows for place in row]] if scope == "batch" else rows:
        load = [sum(expert in chosen[place] for place in group) for expert in range(6)]
        mass = [sum(p[place][expert].item() for place in group) for expert in range(6)]
        aux += 6 / (it.moe.top_k * max(len(group), 1) ** 2) * sum(n * m for n, m in zip(load, mass, strict=True))
    for group in rows:
        z += sum(logits[place].logsumexp(-1).item() ** 2 for place in group) / max(len(group), 1)
    return aux / (1 if scope == "batch" else len(rows)), z / len(rows)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_losses_are_those_of_the_formulas(score: str, scope: str) -> None:
    it = router(aux_loss=0.3, aux_loss_scope=scope, z_loss=0.2, score=score)
    x, told = torch.randn(21, 5, dtype=torch.float64), routing()
    _, weights, _ = it(x, tokens(MATTER), told)
    found = compute_routing_metrics(it.moe, told.loads[0].unsqueeze(0), 1.0)
    aux, z = losses(it, x, scope)
    assert found["aux_loss"] == pytest.approx(0.3 * aux)
    assert found["z_loss"] == pytest.approx(0.2 * z)
    (weights.sum() * 0).backward()
    gradient, step = it.weight.grad, 1e-6
    assert gradient is not None
    with torch.no_grad():
        it.weight[2, 3] += step
        more = losses(it, x, scope)
        it.weight[2, 3] -= 2 * step
        less = losses(it, x, scope)
    slope = (0.3 * (more[0] - less[0]) + 0.2 * (more[1] - less[1])) / (2 * step)
    assert gradient[2, 3].item() == pytest.approx(slope, rel=1e-5)


def test_tokens_that_do_not_matter_go_nowhere_and_count_nowhere() -> None:
    it, told = router(aux_loss=0.1), routing()
    chosen, *_ = it(torch.randn(21, 5, dtype=torch.float64), tokens(MATTER), told)
    assert ((chosen >= 0).all(-1) == MATTER.flatten()).all()
    assert told.loads[0][0] == MATTER.sum()
    assert told.loads[0][5:].sum() == 2 * MATTER.sum()


SINKHORN = {"sinkhorn": True, "normalize": False}


@pytest.mark.parametrize(("top_k", "score"), [(1, "sigmoid"), (2, "softmax")])
def test_a_balanced_choice_is_of_training_alone_and_changes_no_weight(top_k: int, score: str) -> None:
    """A bias of all tokens for one expert; in a sequence of 4, 12 and none of the 16 tokens that matter."""
    it = router(top_k=top_k, score=score, **SINKHORN)
    matter = torch.arange(16) < torch.tensor([[4], [12], [0]])
    x = torch.randn(48, 5, dtype=torch.float64)
    x[:, 0] += 4.0
    scores = torch.nn.functional.linear(x, it.weight)
    scores = scores.sigmoid() if score == "sigmoid" else scores.softmax(-1)
    by_score, *_ = it(x, tokens(matter), None)
    assert by_score[matter.flatten()].equal(scores.topk(top_k).indices[matter.flatten()])
    told = routing(matter)
    chosen, weights, _ = it(x, tokens(matter), told)
    there = matter.flatten()
    torch.testing.assert_close(weights[there], scores[there].gather(1, chosen[there]))
    loads, even = told.loads[0][5:], 16 * top_k / 6
    assert loads.sum() == 16 * top_k
    assert loads.max() <= 2 * even < torch.bincount(by_score[by_score >= 0], minlength=6).max()


def test_each_sequence_is_balanced_by_itself() -> None:
    it, x = router(score="softmax", **SINKHORN), torch.randn(21, 5, dtype=torch.float64)
    together, *_ = it(x, tokens(MATTER), routing())
    alone = [it(x[7 * r : 7 * r + 7], tokens(MATTER[r : r + 1]), routing(MATTER[r : r + 1]))[0] for r in range(3)]
    assert together.equal(torch.cat(alone))


def test_the_scaled_matrix_has_even_rows_and_columns() -> None:
    logits = torch.randn(2, 9, 4, dtype=torch.float64) * 5
    logits[1, 6:] = float("-inf")  # no tokens
    scaled = sinkhorn_normalize(logits)
    assert not scaled[1, 6:].any()
    for part, count in ((scaled[0], 9), (scaled[1, :6], 6)):
        torch.testing.assert_close(part.sum(0), torch.full((4,), 0.25, dtype=torch.float64), rtol=1e-3, atol=0)
        torch.testing.assert_close(part.sum(1), torch.full((count,), 1 / count, dtype=torch.float64), rtol=1e-2, atol=0)
    assert sinkhorn_normalize(torch.tensor([[[200.0, -200.0], [150.0, 100.0]]])).isfinite().all()


def test_logits_of_bf16_are_not_rounded_and_their_gradients_hardly() -> None:
    x, weight = (torch.randn(n, 32, dtype=torch.bfloat16, requires_grad=True) for n in (20, 6))
    logits, same = compute_router_logits(x, weight)
    wide, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = wide @ wide_weight.t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    dy, dx = torch.randn(20, 6), torch.randn(20, 32, dtype=torch.bfloat16)
    found = torch.autograd.grad((logits, same), (x, weight), (dy, dx))
    wanted = torch.autograd.grad((exact, wide * 1), (wide, wide_weight), (dy.double(), dx.double()))
    for one, right in zip(found, wanted, strict=True):
        assert ((one - right).abs() <= right.abs() * 2**-8 + 1e-4).all()  # that of the result alone


def test_what_does_not_go_with_sinkhorn_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as told:
        MoeConfig.parse({"num_experts": 6, "top_k": 1, "ffn_hidden_size": 4, "sinkhorn": True, "aux_loss": 0.1})
    text = str(told.value)
    for part in ("score: sigmoid", "normalize: false", "aux_loss: 0.0"):
        assert part in text


def test_metrics() -> None:
    even = torch.tensor(
        [[4.0, 1.0, 4 * math.log(2), 0.5, 0.25, 0.0, 4.0, 4.0], [4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 6.0, 2.0]]
    )
    moe = MoeConfig.parse({"num_experts": 2, "top_k": 2, "ffn_hidden_size": 4})
    assert compute_routing_metrics(moe, even, 0.5) == pytest.approx({
        "aux_loss": 1.0, "z_loss": 0.5, "expert_load_max": 1.5, "expert_load_min": 0.5, "drop_rate": 1 / 16,
        "router_entropy": math.log(2) / 2,
    })  # fmt: skip


def test_the_bias_moves_towards_an_even_load() -> None:
    it = router(selection_bias=True, bias_rate=0.25)
    update_selection_bias([it], torch.tensor([[0.0] * 6, [4.0, 2.0, 2.0, 2.0, 2.0, 0.0]]), [3, 0])
    assert it.selection is not None
    assert it.selection.values.tolist() == [-0.25, 0.0, 0.0, 0.0, 0.0, 0.25]


def test_an_expert_takes_the_first_of_each_sequence() -> None:
    matter = torch.tensor([[True] * 4, [True, True, False, False]])
    chosen = torch.tensor([[0, 1], [0, 2], [3, 0], [0, 1], [5, 0], [0, 5], [-1, -1], [-1, -1]])
    # ceil(1.5 x 2 x 4 / 6) = 2 of the first sequence, ceil(1.5 x 2 x 2 / 6) = 1 of the second
    kept = drop_choices_over_capacity(chosen, tokens(matter), moe(capacity_factor=1.5), ALONE)
    assert kept.tolist() == [[0, 1], [0, 2], [3, -1], [-1, 1], [5, 0], [-1, -1], [-1, -1], [-1, -1]]


def test_the_order_of_tokens_does_not_matter_to_the_capacity() -> None:
    matter = torch.ones(3, 8, dtype=torch.bool)
    at = tokens(matter)
    chosen = torch.rand(24, 6).topk(2).indices
    kept = drop_choices_over_capacity(chosen, at, moe(capacity_factor=0.8), ALONE)
    order = torch.randperm(24)
    moved = RoutedTokens(at.row[order], at.position[order], at.affects_loss_mask, 3, 8)
    assert torch.equal(drop_choices_over_capacity(chosen[order], moved, moe(capacity_factor=0.8), ALONE), kept[order])
    assert (kept < 0).any()
