"""Distillation from a teacher's next tokens, precomputed before training into files or computed step by step.

In the files each sample has `ids` int32 [S, K] and `log_probs` [S, K] (fp32 in fp32 and fp64 runs, else fp16): the
teacher's top-K next tokens at each position, at temperature 1. So a file fits any layout, batch size and temperature.

Legend: S sequence, s positions of a context rank, K top tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch, TeacherSoftLabels, split_micro_batches
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.device import to_host
from mega_trainer.objectives.sample_cache import PrecomputedOutputCache
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.pipeline.executor import PipelineExecutor


class TeacherSource(Protocol):
    """Interface of sources of a teacher model's K most likely next tokens."""

    def get_top_k(self, micro: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """Return (ids, log-probabilities) of the teacher's K most likely next tokens for each micro-batch, [B, s, K].
        They are arbitrary except on the last pipeline stage.
        """


class LiveTeacher:
    """Source of a distillation teacher's most likely tokens that runs the teacher model in memory."""

    def __init__(self, executor: PipelineExecutor) -> None:
        self.executor = executor

    @torch.no_grad()
    def get_top_k(self, micro: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """Run the teacher and return (ids, log-probabilities) of its K most likely next tokens for each micro-batch.
        They are [B, s, K], and arbitrary except on the last pipeline stage.
        """
        with self.executor.evaluation_mode():
            self.executor.run_operations(micro, 1.0)
        if self.executor.last_stage_index not in self.executor.stages:
            return [(one.tokens.unsqueeze(-1), one.weights.unsqueeze(-1)) for one in micro]
        halves = (self.executor.losses[number].chunk(2, -1) for number in range(len(micro)))
        return [(ids.long(), log_probs) for log_probs, ids in halves]


class CachedTeacher:
    """Source of a distillation teacher's most likely tokens that reads precomputed ones from cache files."""

    def __init__(self, files: PrecomputedOutputCache) -> None:
        self._files = files

    def get_top_k(self, micro: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """Read (ids, log-probabilities) [B, s, K] of the teacher's most likely next tokens for each micro-batch from cache files.

        Raises:
            DataError: for a sample that is not in the cache.
        """
        return [(self._read("ids", one).long(), self._read("log_probs", one).to(one.weights.dtype)) for one in micro]

    def _read(self, name: str, one: MicroBatch) -> Tensor:
        rows = torch.from_numpy(np.stack([self._files.read_array(name, sample) for sample in one.samples]))
        own = rows if one.token_indices is None else rows[:, to_host(one.token_indices)]
        return own.to(one.tokens.device)


class DistillationObjective(TrainingObjective):
    """Distillation objective: mean over unmasked tokens of the divergence from a teacher's next-token distribution."""

    def __init__(self, config: RunConfig, executor: PipelineExecutor, source: TeacherSource) -> None:
        super().__init__(executor.parallel_groups, config.model.mtp_layers)
        self._source, self._temperature = source, config.objective.effective_temperature

    def prepare_micro_batches(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches of a step or validation with the teacher's soft labels added."""
        return [
            replace(one, soft_labels=TeacherSoftLabels(ids, log_probs, self._temperature))
            for one, (ids, log_probs) in zip(micro, self._source.get_top_k(micro), strict=True)
        ]


def collect_teacher_top_k(
    teacher: LiveTeacher, config: RunConfig, device: torch.device, batch: StepBatch, samples: range
) -> dict[str, list[np.ndarray]]:
    """Return the teacher's K most likely next tokens, `ids` and `log_probs` of each sample, on every rank; all must call."""
    groups, count, length = teacher.executor.parallel_groups, config.objective.top_k, config.data.seq_length
    micro = list(split_micro_batches(batch, config, device, groups.cp))
    top_k, positions = teacher.get_top_k(micro), get_context_rank_token_indices(length, groups.cp)
    out = torch.zeros(2, len(samples), length, count, dtype=micro[0].weights.dtype)
    contributes = groups.tp.rank == 0 and teacher.executor.last_stage_index in teacher.executor.stages
    for one, (ids, log_probs) in zip(micro, top_k, strict=True) if contributes else ():
        rows = torch.tensor(one.samples)[:, None] - samples.start
        out[0, rows, positions], out[1, rows, positions] = to_host(ids).to(out.dtype), to_host(log_probs).to(out.dtype)
    all_reduce(out, groups.world)
    dtype = np.float32 if config.precision in ("fp32", "fp64") else np.float16
    ids, log_probs = out.numpy()
    return {"ids": list(ids.astype(np.int32)), "log_probs": list(log_probs.astype(dtype))}
