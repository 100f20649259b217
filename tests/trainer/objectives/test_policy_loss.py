"""Each variant's loss and gradient are those of its paper, written out token by token."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from mega_trainer.config.objective_config import VARIANTS, LossNormalization, PolicyVariant
from mega_trainer.objectives.policy_loss import (
    PolicySamples,
    compute_answer_loss_factors,
    compute_group_advantages,
    compute_policy_loss,
)

GROUP, LONGEST, KL = 4, 9, 0.3
LENGTHS = [5, 2, 7, 1, 3, 9, 4, 6]  # two groups
REWARDS = [1.0, 0.0, 0.5, 0.0, -1.0, 2.0, 0.25, 2.0]


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New, old and reference log-probabilities [8, 9] that differ enough to be clipped on both sides, and the mask."""
    draws = torch.Generator().manual_seed(3)
    new, old, reference = (-3 * torch.rand(8, 9, generator=draws, dtype=torch.float64) for _ in range(3))
    mask = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).double()
    return new, new + (old - new) * 0.3, reference, mask


def advantages(variant: str) -> list[float]:
    found = []
    for first in (0, GROUP):
        group = REWARDS[first : first + GROUP]
        mean = sum(group) / GROUP
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / GROUP)
        for number, r in enumerate(group):
            others = [each for k, each in enumerate(group) if k != number]
            by_variant = {"dr_grpo": r - mean, "rloo": r - sum(others) / (GROUP - 1)}
            found.append(by_variant.get(variant, (r - mean) / (std + 1e-6)))
    return found


def published(variant: str, new: Tensor, old: Tensor, reference: Tensor | None) -> Tensor:
    """The loss by the formula of the paper: -J, with the KL term of GRPO (equation 4 of arXiv:2402.03300)."""
    low, high = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(
        variant, (0, 0)
    )
    total = new.new_zeros(())
    for i, (length, advantage) in enumerate(zip(LENGTHS, advantages(variant), strict=True)):
        if variant == "gspo":  # equation 5 of arXiv:2507.18071: one ratio of an answer
            s = torch.exp(torch.stack([new[i, t] - old[i, t] for t in range(length)]).sum() / length)
            total = total + torch.min(s * advantage, s.clamp(1 - low, 1 + high) * advantage) / len(LENGTHS)
        if variant == "rloo":  # equation 8 of arXiv:2402.14740, of which this is the gradient
            total = total + advantage * sum(new[i, t] for t in range(length)) / len(LENGTHS)
        for t in range(length):
            term = new.new_zeros(())
            if variant not in ("gspo", "rloo"):
                r = torch.exp(new[i, t]) / torch.exp(old[i, t])
                term = torch.min(r * advantage, r.clamp(1 - low, 1 + high) * advantage)
            if reference is not None:
                quotient = torch.exp(reference[i, t]) / torch.exp(new[i, t])
                term = term - KL * (quotient - torch.log(quotient) - 1)
            share = {"dapo": 1 / sum(LENGTHS), "dr_grpo": 1 / (len(LENGTHS) * LONGEST)}
            total = total + term * share.get(variant, 1 / (len(LENGTHS) * length))
    return -total


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("variant", get_args(PolicyVariant))
def test_loss_and_gradient_equal_the_published_formula(variant: PolicyVariant, kl: bool) -> None:
    if variant == "rloo" and kl:
        pytest.skip("the KL term of RLOO is part of the reward, and refused")
    new, old, reference, mask = case()
    clip, normalization = VARIANTS[variant]
    scale = compute_answer_loss_factors(mask.sum(1), normalization, LONGEST).expand(8, 1)
    weights = compute_group_advantages(torch.tensor(REWARDS, dtype=torch.float64), GROUP, variant)
    samples = PolicySamples(old, mask, weights, scale, reference if kl else None)
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    found = compute_policy_loss(ours, samples, variant, clip, KL if kl else 0.0)
    expected = published(variant, theirs, old, reference if kl else None)
    torch.autograd.backward([found.loss, expected])
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    if variant != "rloo":
        assert 0 < found.clipped < mask.sum()


def test_the_loss_does_not_depend_on_how_answers_are_split_into_micro_batches() -> None:
    new, old, reference, mask = case()
    scale = compute_answer_loss_factors(mask.sum(1), "token", LONGEST).expand(8, 1)
    weights = compute_group_advantages(torch.tensor(REWARDS, dtype=torch.float64), GROUP, "dapo")

    def loss(rows: slice) -> float:
        samples = PolicySamples(old[rows], mask[rows], weights[rows], scale[rows], reference[rows])
        return compute_policy_loss(new[rows], samples, "dapo", (0.2, 0.28), KL).loss.item()

    assert loss(slice(0, 3)) + loss(slice(3, 8)) == pytest.approx(loss(slice(0, 8)), rel=1e-12)


@pytest.mark.parametrize("normalization", get_args(LossNormalization))
def test_an_answer_without_tokens_does_not_count(normalization: LossNormalization) -> None:
    lengths = torch.tensor([3.0, 0.0, 5.0], dtype=torch.float64)
    whole, without = (compute_answer_loss_factors(each, normalization, 9) for each in (lengths, lengths[[0, 2]]))
    torch.testing.assert_close(whole.expand(3, 1)[[0, 2]], without.expand(2, 1))


def test_equal_rewards_have_no_advantage() -> None:
    for variant in get_args(PolicyVariant):
        assert compute_group_advantages(torch.ones(8, dtype=torch.float64), 4, variant).abs().max() == 0
