"""Losses of preference pairs, as functions of the log-probabilities of whole answers.

A loss maps the log-probabilities of P pairs under the policy and the reference model to the loss and the rewards of each
pair. Training increases the reward of the chosen answer relative to the rejected one.

Legend: P pairs; 2: the chosen answer, the rejected one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mega_trainer.config.objective_config import ObjectiveConfig


@dataclass(frozen=True)
class PairLogProbs:
    """Log-probabilities of the chosen and the rejected answers of P pairs, each summed over the answer's unmasked
    tokens.

    Attributes:
        policy: [P, 2], under the trained model.
        reference: [P, 2], under the reference model; zero for a loss without a reference.
        tokens: [P, 2], number of unmasked tokens.
        kl: scalar estimate of the policy's KL divergence from the reference: mean log ratio of mismatched answers; only
            for `kto`.
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor
    kl: Tensor


PreferenceLoss = Callable[[PairLogProbs], tuple[Tensor, Tensor]]
"""Function from pairs to their losses [P] and rewards [P, 2]."""


def dpo_loss(pairs: PairLogProbs, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return DPO losses -log sigmoid(r_chosen - r_rejected) [P] and rewards r = beta log(policy / reference) [P, 2]
    (arXiv:2305.18290).
    """
    rewards = beta * (pairs.policy - pairs.reference)
    return _logistic_loss(rewards[:, 0] - rewards[:, 1], label_smoothing), rewards


def ipo_loss(pairs: PairLogProbs, beta: float) -> tuple[Tensor, Tensor]:
    """Return IPO losses (h_chosen - h_rejected - 1 / (2 beta))^2 [P], h the mean log ratio of a token, and rewards [P,
    2] (arXiv:2310.12036, equation 17).
    """
    ratios = pairs.policy - pairs.reference
    means = ratios / pairs.tokens.clamp(min=1)
    return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square(), beta * ratios


def simpo_loss(pairs: PairLogProbs, beta: float, gamma: float, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return SimPO losses -log sigmoid(r_chosen - r_rejected - gamma) [P] and rewards r [P, 2], beta times the mean
    log-probability of a token (arXiv:2405.14734).
    """
    rewards = beta * pairs.policy / pairs.tokens.clamp(min=1)
    return _logistic_loss(rewards[:, 0] - rewards[:, 1] - gamma, label_smoothing), rewards


def kto_loss(
    pairs: PairLogProbs, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return KTO losses and rewards r [P, 2]: half of w (1 - sigmoid(r - beta kl)) for the chosen plus w' (1 -
    sigmoid(beta kl - r)) for the rejected answer, w = `desirable`, w' = `undesirable`.

    The mean over pairs equals the mean over answers (arXiv:2402.01306). An answer without tokens is missing: its loss and
    reward are zero.
    """
    present = pairs.tokens > 0
    rewards = beta * (pairs.policy - pairs.reference)
    gain = rewards - beta * pairs.kl
    losses = torch.stack([desirable * (-gain[:, 0]).sigmoid(), undesirable * gain[:, 1].sigmoid()], 1)
    return losses.where(present, 0).sum(1) / 2, rewards.where(present, 0)


def reward_model_loss(pairs: PairLogProbs, margin: float = 0.0, center: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return reward-model losses -log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2 [P],
    and the scores r [P, 2].

    Bradley and Terry 1952.
    """
    scores = pairs.policy
    loss = -logsigmoid(scores[:, 0] - scores[:, 1] - margin)
    return loss + center * scores.sum(1).square(), scores


def _logistic_loss(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def select_pair_loss(config: ObjectiveConfig) -> PreferenceLoss:
    """Return the loss function that the configuration's objective names (DPO, IPO, SimPO, KTO or reward model), with
    its settings bound.
    """
    smoothing = config.label_smoothing
    losses: Mapping[str, PreferenceLoss] = {
        "dpo": partial(dpo_loss, label_smoothing=smoothing, beta=config.effective_beta),
        "ipo": partial(ipo_loss, beta=config.effective_beta),
        "simpo": partial(simpo_loss, beta=config.effective_beta, gamma=config.gamma, label_smoothing=smoothing),
        "kto": partial(
            kto_loss,
            beta=config.effective_beta,
            desirable=config.desirable_weight,
            undesirable=config.undesirable_weight,
        ),
        "reward": partial(reward_model_loss, margin=config.margin, center=config.center),
    }
    return losses[config.kind]


PAIR_METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected", "kl",
)  # fmt: skip
ANSWER_SHARES = ("chosen", "rejected", "paired")  # share of pairs that have the chosen answer, the rejected one, both


def compute_pair_metrics(pairs: PairLogProbs, rewards: Tensor) -> Tensor:
    """Return the metrics of each of P answer pairs, one row per metric in the order of `PAIR_METRICS` (TRL's names) and
    then `ANSWER_SHARES`: [10, P].

    Missing answers have zeros.
    """
    present = (pairs.tokens > 0).to(rewards.dtype)
    (good, bad), both = rewards.unbind(1), present.prod(1)
    right = (good > bad).to(good.dtype) * both
    return torch.stack([
        good, bad, good - bad, right, *(pairs.policy * present).unbind(1), pairs.kl * present.mean(1),
        *present.unbind(1), both,
    ])  # fmt: skip
