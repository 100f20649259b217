"""Reinforcement learning in a run: answers sampled by the model in training, their rewards, and the policy loss on them.

The answers to sample k depend on the weights and on (seed, k) alone, so any layout and a resumed run sample the same ones.
`output`/rollouts/samples-K.jsonl has the answers from sample K on, one line each, with rewards and log-probabilities; a run
that resumes between two rollouts (`rollout_steps` above 1) reads them there.

Legend: n rows of this data rank, S positions, s positions of a context rank, N answers of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_common.atomic_files import open_atomic_file
from mega_common.errors import DataError
from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.data.prompt_dataset import PromptDataset
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.objectives.policy_loss import (
    PolicySamples,
    compute_answer_loss_factors,
    compute_group_advantages,
    compute_policy_loss,
)
from mega_trainer.objectives.preference_answers import contributes_answer_sums
from mega_trainer.objectives.reward_process import RewardPool
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.pipeline.executor import PipelineExecutor

ROUND = 1 << 40  # more than the samples of a run; sets the draws of the rounds of resampling apart


@dataclass(frozen=True)
class Rollout:
    """Answer to a prompt, sampled by the model in training.

    Attributes:
        sample: number of the sample in the run.
        prompt, tokens: token ids of the prompt and of the answer, with its end token.
        log_probs: of each token of the answer, as sampled.
        text: the answer without end token.
        truncated: the answer reached the largest number of tokens.
        reward: None before it is computed.
        failed: the reward function failed, and the reward is 0.
    """

    sample: int
    prompt: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    text: str
    truncated: bool
    reward: float | None = None
    failed: bool = False


class LiveRewardModel:
    """Reward model that scores whole texts, prompt and answer with its end token, in the layout of the run.

    Args:
        config: configuration of the run with the reward model as its model.
        executor: executor of the reward model.
        device: device of this rank's part of it.
    """

    def __init__(self, config: RunConfig, executor: PipelineExecutor, device: torch.device) -> None:
        self._config, self._executor, self._device = config, executor, device

    @torch.no_grad()
    def compute_rewards(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return the score of each answer, fp64 [N], equal on all ranks. A collective call of all ranks."""
        groups, length = self._executor.parallel_groups, self._config.data.seq_length
        texts = [[*one.prompt, *one.tokens] for one in rollouts]
        texts += [texts[-1]] * (-len(texts) % (groups.dp.size * self._config.batch.micro))
        share = len(texts) // groups.dp.size
        own = range(groups.dp.rank * share, (groups.dp.rank + 1) * share)
        batch = pad_texts_to_rows([[*texts[k], 0] for k in own], [1] * share, length, own)
        micro = list(split_micro_batches(batch, self._config, self._device, groups.cp))
        self._executor.run_operations(micro, 1.0)
        scores = torch.zeros(len(texts), length, dtype=torch.float64, device=self._device)
        if groups.tp.rank == 0:
            positions = get_context_rank_token_indices(length, groups.cp).to(self._device)
            for number, losses in self._executor.losses.items():
                scores[torch.tensor(micro[number].samples, device=self._device)[:, None], positions] = -losses.double()
        last = torch.tensor([len(text) - 1 for text in texts], device=self._device)
        rewards = scores.gather(1, last[:, None])[: len(rollouts), 0].contiguous()
        all_reduce(rewards, groups.world)
        return rewards


# Samples an answer for each (sample number, prompt), in order and equal on all ranks. A collective call of all ranks.
RolloutGenerator = Callable[[PipelineExecutor, Sequence[tuple[int, Sequence[int]]]], list[Rollout]]


class PolicyObjective(TrainingObjective):
    """Objective of reinforcement learning: a policy loss on answers that the model samples before the step.

    Args:
        config: configuration of the run.
        executor: executor of the trained model.
        device: device of this rank's part of the model.
        prompts: prompts of the run.
        generate: samples the answers.
        reference: executor of the reference model; None without a KL term.
        reward_model: None for rewards by a function.

    Raises:
        ConfigError: when the reward function cannot be loaded.
    """

    metric_names = ("policy/clip_fraction", "policy/kl", "policy/ratio_error")

    def __init__(
        self,
        config: RunConfig,
        executor: PipelineExecutor,
        device: torch.device,
        prompts: PromptDataset,
        generate: RolloutGenerator,
        reference: PipelineExecutor | None,
        reward_model: LiveRewardModel | None = None,
    ) -> None:
        super().__init__(executor.parallel_groups, config.model.mtp_layers)
        objective = config.objective
        self.config, self.executor, self.device, self.reference = config, executor, device, reference
        self._prompts, self._generate, self._reports = prompts, generate, contributes_answer_sums(executor)
        self._reward_model, self._reward_pool = reward_model, None
        if objective.rewards is not None and self.groups.world.rank == 0:
            self._reward_pool = RewardPool(objective.rewards, objective.reward_timeout, objective.reward_workers)
        self._rollouts: dict[int, Rollout] = {}  # by sample
        self._sums = torch.zeros(1 + len(self.metric_names), dtype=torch.float64, device=device)
        self._step_metrics: dict[str, float] = {}

    def count_step_terms(self, batch: StepBatch) -> list[float]:
        """Return 1, as the loss is normalized over the answers already, then infinity per MTP layer, to drop its loss."""
        return [1.0, *[float("inf")] * self.mtp_layers]

    def count_local_terms(self, batch: StepBatch | None) -> list[float]:
        """Return this rank's share of the step's loss terms, 1 on the first rank, else 0; infinity for MTP layers.
        Without a batch, every rank's share is 0.
        """
        counts = batch is not None and self.groups.world.rank == 0
        return [float(counts), *[float("inf")] * self.mtp_layers]

    def prepare_micro_batches(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Sample answers to the step's prompts, or reuse a rollout's, and return micro-batches of this rank's answers.
        They have a function that computes the weights of their tokens; `batch` has the prompts. A collective call of
        all ranks.

        Raises:
            DataError: when the reward function fails for all answers, or answers to resume with are missing.
        """
        self._sums.zero_()
        share = len(batch.sample_ids)
        first = int(batch.sample_ids[0]) - self.groups.dp.rank * share
        step = self._step_rollouts(range(first, first + share * self.groups.dp.size))
        samples = self._policy_samples(step)
        own = slice(self.groups.dp.rank * share, (self.groups.dp.rank + 1) * share)
        rows = pad_texts_to_rows(
            [[*one.prompt, *one.tokens] for one in step[own]],
            [len(one.prompt) for one in step[own]],
            self.config.data.seq_length,
            [one.sample for one in step[own]],
        )
        micro = list(split_micro_batches(rows, self.config, self.device, self.groups.cp))
        references: list[Tensor | None] = [None] * len(micro)
        if self.reference is not None:
            references = [*self._reference_log_probs(self.reference, micro)]
        prepared, start = [], own.start
        for one, reference in zip(micro, references, strict=True):
            part = slice(start, start := start + len(one.samples))
            chosen = PolicySamples(
                samples.old[part], samples.mask[part], samples.advantages[part], samples.scale[part], reference
            )
            prepared.append(replace(one, weight_fn=_PolicyTokenWeights(self, chosen)))
        return prepared

    def _step_rollouts(self, samples: range) -> list[Rollout]:
        """Return the answers of a step: sampled now, or those of an earlier step with the same rollout."""
        settings, size = self.config.objective, len(samples) * self.config.objective.rollout_steps
        first = samples.start - samples.start % size if settings.rollout_steps > 1 else samples.start
        path = Path(self.config.output) / "rollouts" / f"samples-{first:012}.jsonl"
        if samples.start % settings.group_size:
            raise DataError(
                f"objective.group_size = {settings.group_size} must divide the number of consumed samples, {samples.start}",
                hint="resume with the group size of the run's earlier steps",
            )
        if samples.start == first:
            self._rollouts = {one.sample: one for one in self._sample_answers(range(first, first + size))}
            if self.groups.world.rank == 0:
                write_rollouts(path, [*self._rollouts.values()])
        elif samples.start not in self._rollouts:
            self._rollouts = {one.sample: one for one in read_rollouts(path)}
        return [self._rollouts[sample] for sample in samples]

    def _sample_answers(self, samples: range) -> list[Rollout]:
        """Return new answers with rewards, of which groups of equal rewards are replaced by answers to other prompts in
        at most `resample` rounds; equal on all ranks.
        """
        size = self.config.objective.group_size
        found = self._sample_round(samples, 0)
        for number in range(1, self.config.objective.resample + 1):
            groups = [found[first : first + size] for first in range(0, len(found), size)]
            equal = [one.sample for group in groups if has_equal_rewards(group) for one in group]
            if not equal:
                break
            replaced = {one.sample: one for one in self._sample_round(equal, number)}
            found = [replaced.get(one.sample, one) for one in found]
        if all(one.failed for one in found):
            raise DataError(
                f"objective.rewards = {self.config.objective.rewards} fails for all answers of a step",
                hint="see the warnings above, and correct the function",
            )
        return found

    def _sample_round(self, samples: Sequence[int], number: int) -> list[Rollout]:
        """Return answers with rewards; each round `number` has its own prompts and draws for the same samples."""
        located = [self._prompts.locate_prompt(sample, number) for sample in samples]
        draws = [sample + number * ROUND for sample in samples]
        prompts = [self._prompts.prompts[index] for index in located]
        with self.executor.phase("rollout"):
            rollouts = self._generate(self.executor, list(zip(draws, prompts, strict=True)))
        rewards = self._compute_rewards(rollouts, [self._prompts.records[index] for index in located])
        failed = rewards.isnan()
        values, flags = rewards.nan_to_num(0.0).tolist(), failed.tolist()
        return [
            replace(one, sample=sample, reward=reward, failed=flag)
            for one, sample, reward, flag in zip(rollouts, samples, values, flags, strict=True)
        ]

    def _compute_rewards(self, rollouts: Sequence[Rollout], records: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the rewards of answers to the prompts of `records`, fp64 [N], equal on all ranks; NaN where the function
        failed.
        """
        if self._reward_model is not None:
            return self._reward_model.compute_rewards(rollouts)
        rewards = torch.zeros(len(rollouts), dtype=torch.float64)
        if self._reward_pool is not None:
            calls = [(record["prompt"], one.text, record) for one, record in zip(rollouts, records, strict=True)]
            found = self._reward_pool.compute_rewards(calls)
            rewards = torch.tensor(
                [float("nan") if reward is None else reward for reward in found], dtype=torch.float64
            )
        rewards = rewards.to(self.device)
        all_reduce(rewards, self.groups.world)
        return rewards

    def _policy_samples(self, step: Sequence[Rollout]) -> PolicySamples:
        """Return log-probabilities, masks and advantages of all N answers of a step, and set its metrics."""
        settings, shape = self.config.objective, (len(step), self.config.data.seq_length)
        old, mask = np.zeros(shape), np.zeros(shape)
        for row, one in enumerate(step):
            here = slice(len(one.prompt) - 1, len(one.prompt) - 1 + len(one.tokens))
            old[row, here] = one.log_probs
            mask[row, here] = not (settings.mask_truncated and one.truncated)
        rewards = torch.tensor([one.reward for one in step], dtype=torch.float64)
        spread = rewards.view(-1, settings.group_size).std(1, correction=0)
        if settings.resample:
            mask *= (spread > 0).numpy().repeat(settings.group_size)[:, None]
        advantages = compute_group_advantages(rewards, settings.group_size, settings.variant)
        masks = torch.from_numpy(mask)
        scale = compute_answer_loss_factors(masks.sum(1), settings.effective_normalization, settings.max_new_tokens)
        self._step_metrics = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(spread.mean()),
            "reward/equal_groups": float((spread == 0).double().mean()),
            "reward/failed": sum(one.failed for one in step) / len(step),
            "answer/length": sum(len(one.tokens) for one in step) / len(step),
            "answer/truncated": sum(one.truncated for one in step) / len(step),
            "tokens": float(mask.sum()),
        }
        scale = scale.expand(len(step), 1)
        return PolicySamples(*(each.to(self.device) for each in (torch.from_numpy(old), masks, advantages, scale)))

    @torch.no_grad()
    def _reference_log_probs(self, reference: PipelineExecutor, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the reference model's log-probabilities [B, S] of each micro-batch; zero except on the last stage."""
        reference.run_operations(micro, 1.0)
        if reference.last_stage_index not in reference.stages:
            return [one.weights.new_zeros(len(one.samples), self.config.data.seq_length) for one in micro]
        return [self._gather_rows(-reference.losses[number]) for number in range(len(micro))]

    def _gather_rows(self, values: Tensor) -> Tensor:
        """Return whole rows fp64 [B, S] from the positions [B, s] of the context ranks, on each of them."""
        rows = values.new_zeros(len(values), self.config.data.seq_length, dtype=torch.float64)
        rows[:, self._own_positions] = values.detach().double()
        all_reduce(rows, self.groups.cp)
        return rows

    @property
    def _own_positions(self) -> Tensor:
        return get_context_rank_token_indices(self.config.data.seq_length, self.groups.cp).to(self.device)

    def compute_token_weights(self, log_probs: Tensor, samples: PolicySamples) -> Tensor:
        """Return minus the gradient [B, s] of the policy loss in the log-probabilities; add loss and metrics to the sums."""
        settings = self.config.objective
        with torch.enable_grad():
            rows = self._gather_rows(log_probs).requires_grad_()
            found = compute_policy_loss(rows, samples, settings.variant, settings.policy_clip_range, settings.kl)
            (gradient,) = torch.autograd.grad(found.loss, rows)
        if self._reports:
            self._sums += torch.stack([found.loss.detach(), found.clipped, found.kl, found.ratio_error])
        return -gradient[:, self._own_positions].to(log_probs.dtype)

    def append_metric_sums(self, sums: Tensor) -> Tensor:
        """Return this rank's sums of a step with the policy loss in place of the first, and metrics appended."""
        return torch.cat([self._sums[:1], sums[1:], self._sums[1:]])

    def metrics(self, figures: Sequence[float], count: float | None = None) -> Mapping[str, float]:
        """Return the metrics of the step's answers: rewards, lengths, and means over tokens of the policy's changes."""
        tokens = max(self._step_metrics["tokens"], 1.0)
        means = {name: value / tokens for name, value in super().metrics(figures, count).items()}
        if self.reference is None:
            del means["policy/kl"]
        return means | self._step_metrics


@dataclass(frozen=True)
class _PolicyTokenWeights:
    """Weight function of a micro-batch; see `MicroBatch.weight_fn`."""

    objective: PolicyObjective
    samples: PolicySamples

    def __call__(self, log_probs: Tensor) -> Tensor:
        return self.objective.compute_token_weights(log_probs, self.samples)


def pad_texts_to_rows(
    texts: Sequence[Sequence[int]], prompts: Sequence[int], length: int, samples: Sequence[int]
) -> StepBatch:
    """Return one padded row of `length` positions for each text of at most `length` + 1 tokens.
    Labels after a text's prompt, of `prompts` tokens, have loss weight 1; padding is a separate document.
    """
    tokens, labels, positions = (np.zeros((len(texts), length), np.int64) for _ in range(3))
    weights, documents = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.int32)
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        end = len(text) - 1
        tokens[row, :end], labels[row, :end] = text[:-1], text[1:]
        weights[row, prompt - 1 : end], documents[row, end:] = 1, 1
        positions[row, :end], positions[row, end:] = np.arange(end), np.arange(length - end)
    return StepBatch(tokens, labels, weights, positions, documents, np.array(samples))


def has_equal_rewards(group: Sequence[Rollout]) -> bool:
    """Return whether the answers of a group have the same reward, and so no advantage."""
    return len({one.reward for one in group}) == 1


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write sampled answers to a file as JSON lines, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    with open_atomic_file(path, text=True) as file:
        file.writelines(json.dumps(asdict(one)) + "\n" for one in rollouts)


def read_rollouts(path: Path) -> list[Rollout]:
    """Read sampled answers from a file that `write_rollouts` wrote.

    Raises:
        DataError: when the file does not exist.
    """
    if not path.is_file():
        raise DataError(
            f"{path} is required to resume between two rollouts (objective.rollout_steps), and does not exist",
            hint="resume from a checkpoint whose step is a multiple of objective.rollout_steps",
        )
    return [Rollout(**json.loads(line)) for line in path.read_text().splitlines()]
