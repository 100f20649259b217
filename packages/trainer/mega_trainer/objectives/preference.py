"""Losses of preference pairs in training: one pass, whatever ranks share the tokens of a pair.

The last stage of a pipeline knows the log-probabilities of a micro-batch's tokens before it makes their gradient, and
context ranks sum theirs; so the gradient of any loss of them is the weight that each token's has (`MicroBatch.weigh`).

Legend: B rows, s positions, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_data.loader import StepBatch
from mega_trainer.batch import MicroBatch, micro_batches
from mega_trainer.comm import all_reduce
from mega_trainer.config import RunConfig
from mega_trainer.objectives.answers import Answers, answered, answers_of, counted, mismatched, speaks, sums_by
from mega_trainer.objectives.base import Objective
from mega_trainer.objectives.losses import NAMES, SHARES, Pairs, figures, loss_of
from mega_trainer.objectives.reference import Reference
from mega_trainer.pipeline.run import Executor

UNTOLD = {"kto": (), "reward": ("kl", "logps/chosen", "logps/rejected")}  # figures that mean nothing, by kind


class Preference(Objective):
    """A loss of preference pairs: its mean over the pairs of a step.

    Args:
        config: of the run.
        executor: takes a batch through the model that is trained.
        device: of this rank's part of it.
        reference: tells what the reference model makes of the answers; None for a loss without.
    """

    names = (*NAMES, *SHARES, "tokens")

    def __init__(
        self, config: RunConfig, executor: Executor, device: torch.device, reference: Reference | None
    ) -> None:
        super().__init__(executor.groups, config.model.mtp_layers)
        self.config, self.executor, self.device, self.reference = config, executor, device, reference
        self.loss, self._speaks = loss_of(config.objective), speaks(executor)
        self._sums = torch.zeros(1 + len(self.names), dtype=torch.float64, device=device)

    def counts(self, batch: StepBatch) -> list[float]:
        """See `Objective`: pairs; of further tokens none is asked for."""
        counts = torch.tensor(self.own_counts(batch), dtype=torch.float64)
        all_reduce(counts, self.groups.world)
        return counts.tolist()

    def own_counts(self, batch: StepBatch | None) -> list[float]:
        """See `Objective`."""
        further = [float("inf")] * self.further
        if batch is None or any(group.rank for group in (self.groups.tp, self.groups.cp, self.groups.pp)):
            return [0.0, *further]
        assert batch.document_ids is not None
        if self.config.objective.kind == "kto":  # answers are missing from pairs
            return [answered(batch) / 2, *further]
        return [float(counted(batch.document_ids).sum()), *further]

    def prepared(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """See `Objective`."""
        self._sums.zero_()
        answers = answers_of(batch, micro, self.groups.cp, scored=self.config.model.score)
        known = [torch.zeros_like(each.tokens) for each in answers]
        if self.reference is not None:
            known = self.reference.sums(batch, micro, answers)
        kl = self._kl(batch) if self.config.objective.kind == "kto" else self._sums.new_zeros(())
        return [
            replace(one, weigh=_Weigh(self, each, of_reference, kl))
            for one, each, of_reference in zip(micro, answers, known, strict=True)
        ]

    def _kl(self, batch: StepBatch) -> Tensor:
        """See `Pairs.kl`: of all answers of the step, at least 0. A collective call of all ranks."""
        assert self.reference is not None
        other = mismatched(batch)
        micro = list(micro_batches(other, self.config, self.device, self.groups.cp))
        answers = answers_of(other, micro, self.groups.cp)
        ours, theirs = sums_by(self.executor, micro, answers), self.reference.sums(other, micro, answers, "mismatched")
        total = torch.stack([(a - b).sum() for a, b in zip(ours, theirs, strict=True)]).sum()
        found = torch.stack([total, total.new_tensor(sum(int((each.tokens > 0).sum()) for each in answers))])
        found *= self._speaks
        all_reduce(found, self.groups.world)
        return (found[0] / found[1]).clamp(min=0)

    def weights(self, log_probs: Tensor, answers: Answers, reference: Tensor, kl: Tensor) -> Tensor:
        """Of the labels of a micro-batch [B, s]: minus the gradient of the loss with respect to their log-probabilities."""
        with torch.enable_grad():
            policy = answers.sums(log_probs).requires_grad_()
            pairs = Pairs(policy, reference, answers.tokens, kl)
            losses, rewards = self.loss(pairs)
            (gradient,) = torch.autograd.grad(losses.sum(), policy)
        if self._speaks:
            told = [losses[None], figures(pairs, rewards), answers.tokens.sum(1)[None]]
            self._sums += torch.cat(told).detach().sum(1)
        return -answers.spread(gradient).to(log_probs.dtype)

    def measured(self, sums: Tensor) -> Tensor:
        """See `Objective`."""
        return torch.cat([self._sums[:1], sums[1:], self._sums[1:]])

    def totals(self, executor: Executor, sums: Tensor, micro: Sequence[MicroBatch]) -> Tensor:
        """See `Objective`."""
        answers = [one.weigh.answers for one in micro if isinstance(one.weigh, _Weigh)]
        pairs = sum(int((each.tokens > 0).sum()) / 2 for each in answers)
        return torch.cat([self._sums, self._sums.new_tensor([pairs * self._speaks])])

    def told(self, figures: Sequence[float], count: float | None = None) -> Mapping[str, float]:
        """See `Objective`: means over pairs, and how many pairs and tokens of answers."""
        means = dict(super().told(figures, count))
        _divide_by_shares(means)
        tokens, left_out = means.pop("tokens"), UNTOLD.get(self.config.objective.kind, ("kl",))
        told = {name: value for name, value in means.items() if name not in left_out}
        return told if count is None else {**told, "tokens": tokens * count, "pairs": count}


def _divide_by_shares(means: dict[str, float]) -> None:
    """Make means over pairs means over the answers that are there; a figure that none has is left out."""
    chosen, rejected, paired = (means.pop(name) for name in SHARES)
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
class _Weigh:
    """See `MicroBatch.weigh`."""

    objective: Preference
    answers: Answers
    reference: Tensor
    kl: Tensor

    def __call__(self, log_probs: Tensor) -> Tensor:
        return self.objective.weights(log_probs, self.answers, self.reference, self.kl)
