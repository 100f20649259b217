"""Preference losses in training, in one pass for any split of a pair's tokens among ranks.

The last stage of a pipeline has the log-probabilities of a micro-batch's tokens before it computes their gradient, and
context ranks sum them per answer. So any loss that is a function of them reduces to a weight on each token's
log-probability (`MicroBatch.weight_fn`).

Legend: B rows, s positions, P pairs.

A loss maps the log-probabilities of P pairs under the policy and the reference model to the loss and the rewards of each
pair. Training increases the reward of the chosen answer relative to the rejected one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mega_data.batch_loader import StepBatch
from mega_trainer.config.objective_config import ObjectiveConfig
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.objectives.preference_answers import (
    PreferenceAnswers,
    compute_answer_log_prob_sums,
    contributes_answer_sums,
    count_answers,
    count_row_pairs,
    pair_mismatched_answers,
    split_preference_answers,
)
from mega_trainer.objectives.sample_cache import ReferenceModel
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.pipeline.executor import PipelineExecutor


@dataclass(frozen=True)
class PreferenceLogProbs:
    """Log-probabilities, summed over unmasked tokens, of chosen and rejected answers of P preference pairs.

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


PreferenceLoss = Callable[[PreferenceLogProbs], tuple[Tensor, Tensor]]
"""Function from pairs to their losses [P] and rewards [P, 2]."""


def dpo_loss(pairs: PreferenceLogProbs, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return DPO losses [P] and rewards [P, 2] of preference pairs (arXiv:2305.18290).
    The losses are -log sigmoid(r_chosen - r_rejected), the rewards r = beta log(policy / reference).
    """
    rewards = beta * (pairs.policy - pairs.reference)
    return _logistic_loss(rewards[:, 0] - rewards[:, 1], label_smoothing), rewards


def ipo_loss(pairs: PreferenceLogProbs, beta: float) -> tuple[Tensor, Tensor]:
    """Return IPO losses [P] and rewards [P, 2] of preference pairs (arXiv:2310.12036, equation 17).
    The losses are (h_chosen - h_rejected - 1 / (2 beta))^2, with h the mean log ratio of a token.
    """
    ratios = pairs.policy - pairs.reference
    means = ratios / pairs.tokens.clamp(min=1)
    return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square(), beta * ratios


def simpo_loss(
    pairs: PreferenceLogProbs, beta: float, gamma: float, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return SimPO losses [P] and rewards [P, 2] of preference pairs (arXiv:2405.14734).
    The losses are -log sigmoid(r_chosen - r_rejected - gamma); the rewards r are beta times the mean log-probability of
    a token.
    """
    rewards = beta * pairs.policy / pairs.tokens.clamp(min=1)
    return _logistic_loss(rewards[:, 0] - rewards[:, 1] - gamma, label_smoothing), rewards


def kto_loss(
    pairs: PreferenceLogProbs, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return KTO losses [P] and rewards [P, 2] of preference pairs (arXiv:2402.01306); missing answers have zeros.
    The losses are half of w (1 - sigmoid(r - beta kl)) for the chosen plus w' (1 - sigmoid(beta kl - r)) for the
    rejected answer, with rewards r, w = `desirable`, w' = `undesirable`.

    The mean over pairs equals the mean over answers (arXiv:2402.01306). An answer without tokens is missing: its loss and
    reward are zero.
    """
    present = pairs.tokens > 0
    rewards = beta * (pairs.policy - pairs.reference)
    gain = rewards - beta * pairs.kl
    losses = torch.stack([desirable * (-gain[:, 0]).sigmoid(), undesirable * gain[:, 1].sigmoid()], 1)
    return losses.where(present, 0).sum(1) / 2, rewards.where(present, 0)


def reward_model_loss(pairs: PreferenceLogProbs, margin: float = 0.0, center: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return reward-model losses [P] of preference pairs, and the scores r [P, 2] of their answers.
    The losses are -log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2.

    Bradley and Terry 1952.
    """
    scores = pairs.policy
    loss = -logsigmoid(scores[:, 0] - scores[:, 1] - margin)
    return loss + center * scores.sum(1).square(), scores


def _logistic_loss(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def select_preference_loss(config: ObjectiveConfig) -> PreferenceLoss:
    """Return the loss function on preference pairs that the configuration's objective names.
    It is DPO, IPO, SimPO, KTO or the reward model's, with its settings bound.
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


def compute_preference_metrics(pairs: PreferenceLogProbs, rewards: Tensor) -> Tensor:
    """Return TRL's metrics (`PAIR_METRICS`) and then `ANSWER_SHARES` of each of P preference pairs, [10, P].

    Missing answers have zeros.
    """
    present = (pairs.tokens > 0).to(rewards.dtype)
    (good, bad), both = rewards.unbind(1), present.prod(1)
    right = (good > bad).to(good.dtype) * both
    return torch.stack([
        good, bad, good - bad, right, *(pairs.policy * present).unbind(1), pairs.kl * present.mean(1),
        *present.unbind(1), both,
    ])  # fmt: skip


MEANINGLESS_METRICS = {"kto": (), "reward": ("kl", "logps/chosen", "logps/rejected")}  # by kind; others: ("kl",)


class PreferenceObjective(TrainingObjective):
    """Objective of preference training: mean of a preference loss (such as DPO) over the answer pairs of a step.

    Args:
        config: configuration of the run.
        executor: executor of the trained model.
        device: device of this rank's part of the model.
        reference: source of the reference model's log-probabilities; None for a loss without a reference.
    """

    metric_names = (*PAIR_METRICS, *ANSWER_SHARES, "tokens")

    def __init__(
        self, config: RunConfig, executor: PipelineExecutor, device: torch.device, reference: ReferenceModel | None
    ) -> None:
        super().__init__(executor.parallel_groups, config.model.mtp_layers)
        self.config, self.executor, self.device, self.reference = config, executor, device, reference
        self.loss, self._reports = select_preference_loss(config.objective), contributes_answer_sums(executor)
        self._sums = torch.zeros(1 + len(self.metric_names), dtype=torch.float64, device=device)

    def count_step_terms(self, batch: StepBatch) -> list[float]:
        """Return the number of preference pairs over all data ranks, then infinity for each MTP layer."""
        counts = torch.tensor(self.count_local_terms(batch), dtype=torch.float64)
        all_reduce(counts, self.groups.world)
        return counts.tolist()

    def count_local_terms(self, batch: StepBatch | None) -> list[float]:
        """Return this rank's share of the step's number of preference pairs, then infinity for each MTP layer.
        The sum over all ranks is the total.
        """
        mtp_terms = [float("inf")] * self.mtp_layers
        if batch is None or any(group.rank for group in (self.groups.tp, self.groups.cp, self.groups.pp)):
            return [0.0, *mtp_terms]
        assert batch.document_ids is not None
        if self.config.objective.kind == "kto":  # pairs may lack an answer
            return [count_answers(batch) / 2, *mtp_terms]
        return [float(count_row_pairs(batch.document_ids).sum()), *mtp_terms]

    def prepare_micro_batches(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Run the reference model if needed; return micro-batches whose tokens are weighted by the loss's gradient.
        Their `weight_fn` computes the weights: the weighted token losses have the gradient of the preference loss.
        """
        self._sums.zero_()
        answers = split_preference_answers(batch, micro, self.groups.cp, scored=self.config.model.score)
        reference_sums = [torch.zeros_like(each.tokens) for each in answers]
        if self.reference is not None:
            reference_sums = self.reference.get_answer_log_prob_sums(batch, micro, answers)
        kl = self._estimate_kl(batch) if self.config.objective.kind == "kto" else self._sums.new_zeros(())
        return [
            replace(one, weight_fn=_TokenWeights(self, each, reference, kl))
            for one, each, reference in zip(micro, answers, reference_sums, strict=True)
        ]

    def _estimate_kl(self, batch: StepBatch) -> Tensor:
        """Return the KL estimate from all answers of the step, at least 0; see `PreferenceLogProbs.kl`.

        A collective call of all ranks.
        """
        assert self.reference is not None
        mismatched = pair_mismatched_answers(batch)
        micro = list(split_micro_batches(mismatched, self.config, self.device, self.groups.cp))
        answers = split_preference_answers(mismatched, micro, self.groups.cp)
        policy = compute_answer_log_prob_sums(self.executor, micro, answers)
        reference = self.reference.get_answer_log_prob_sums(mismatched, micro, answers, "mismatched")
        total = torch.stack([(a - b).sum() for a, b in zip(policy, reference, strict=True)]).sum()
        ratio = torch.stack([total, total.new_tensor(sum(int((each.tokens > 0).sum()) for each in answers))])
        ratio *= self._reports
        all_reduce(ratio, self.groups.world)
        return (ratio[0] / ratio[1]).clamp(min=0)

    def compute_token_weights(
        self, log_probs: Tensor, answers: PreferenceAnswers, reference: Tensor, kl: Tensor
    ) -> Tensor:
        """Return minus the gradient [B, s] of the preference loss in the log-probabilities; add loss and metrics to the sums."""
        with torch.enable_grad():
            policy = answers.sum_log_probs(log_probs).requires_grad_()
            pairs = PreferenceLogProbs(policy, reference, answers.tokens, kl)
            losses, rewards = self.loss(pairs)
            (gradient,) = torch.autograd.grad(losses.sum(), policy)
        if self._reports:
            values = [losses[None], compute_preference_metrics(pairs, rewards), answers.tokens.sum(1)[None]]
            self._sums += torch.cat(values).detach().sum(1)
        return -answers.spread_gradient(gradient).to(log_probs.dtype)

    def append_metric_sums(self, sums: Tensor) -> Tensor:
        """Return this rank's sums of a step with the preference loss in place of the first, and metrics appended."""
        return torch.cat([self._sums[:1], sums[1:], self._sums[1:]])

    def validation_totals(self, executor: PipelineExecutor, sums: Tensor, micro: Sequence[MicroBatch]) -> Tensor:
        """Return this rank's sums of a validation's preference losses and metrics, and the number of pairs.
        The sums are over answer pairs.
        """
        answers = [one.weight_fn.answers for one in micro if isinstance(one.weight_fn, _TokenWeights)]
        pairs = sum(int((each.tokens > 0).sum()) / 2 for each in answers)
        return torch.cat([self._sums, self._sums.new_tensor([pairs * self._reports])])

    def metrics(self, figures: Sequence[float], count: float | None = None) -> Mapping[str, float]:
        """Return the means over preference pairs to write to metrics.jsonl.
        For a step, the number of pairs and of answer tokens is included.
        """
        means = dict(super().metrics(figures, count))
        _divide_by_shares(means)
        tokens, excluded = means.pop("tokens"), MEANINGLESS_METRICS.get(self.config.objective.kind, ("kl",))
        out = {name: value for name, value in means.items() if name not in excluded}
        return out if count is None else {**out, "tokens": tokens * count, "pairs": count}


def _divide_by_shares(means: dict[str, float]) -> None:
    """Convert means over pairs to means over the answers that exist; remove metrics without answers."""
    chosen, rejected, paired = (means.pop(name) for name in ANSWER_SHARES)
    shares = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    for name, share in {**shares, "rewards/accuracies": paired}.items():
        value = means.pop(name)
        if share:
            means[name] = value / share
    if {"rewards/chosen", "rewards/rejected"} <= means.keys():
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    else:
        del means["rewards/margins"]


@dataclass(frozen=True)
class _TokenWeights:
    """Weight function of a micro-batch; see `MicroBatch.weight_fn`."""

    objective: PreferenceObjective
    answers: PreferenceAnswers
    reference: Tensor
    kl: Tensor

    def __call__(self, log_probs: Tensor) -> Tensor:
        return self.objective.compute_token_weights(log_probs, self.answers, self.reference, self.kl)
