"""Learning from a teacher's next tokens: told before training, into files, or step by step.

In the files each sample has `ids` int32 [S, K] and `log_probs` [S, K], fp32 in runs in fp32 or fp64 and else fp16: of each
place the teacher's K likeliest next tokens, at temperature 1. So a file fits any layout and batch size, and any temperature.

Legend: S sequence, s positions of a context rank, K tokens that a teacher tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mega_data.loader import StepBatch
from mega_trainer.batch import MicroBatch, SoftLabels, micro_batches
from mega_trainer.comm import all_reduce
from mega_trainer.config import RunConfig
from mega_trainer.objectives.base import Objective
from mega_trainer.objectives.sample_files import SampleFiles
from mega_trainer.parallel.context import place_of_tokens
from mega_trainer.pipeline.run import Executor


class Source(Protocol):
    """Where what a teacher tells comes from."""

    def told(self, micro: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """Of each micro-batch ids int64 [B, s, K] and log-probabilities [B, s, K]; on the last stage, else anything."""


class LiveTeacher:
    """A model in memory, of `model.teacher.Teacher`s."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    @torch.no_grad()
    def told(self, micro: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """See `Source`."""
        with self.executor.evaluating():
            self.executor.run(micro, 1.0)
        if self.executor.last_stage not in self.executor.stages:
            return [(one.tokens.unsqueeze(-1), one.weights.unsqueeze(-1)) for one in micro]
        halves = (self.executor.losses[number].chunk(2, -1) for number in range(len(micro)))
        return [(ids.long(), log_probs) for log_probs, ids in halves]


class CachedTeacher:
    """Files, in which each sample's tokens are."""

    def __init__(self, files: SampleFiles) -> None:
        self._files = files

    def told(self, micro: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """See `Source`.

        Raises:
            DataError: for a sample that is not there.
        """
        return [(self._read("ids", one).long(), self._read("log_probs", one).to(one.weights.dtype)) for one in micro]

    def _read(self, name: str, one: MicroBatch) -> Tensor:
        held = torch.from_numpy(np.stack([self._files.read(name, sample) for sample in one.samples]))
        own = held if one.places is None else held[:, one.places.cpu()]
        return own.to(one.tokens.device)


class Distillation(Objective):
    """The mean divergence of the model's next tokens from a teacher's, over the tokens that count."""

    def __init__(self, config: RunConfig, executor: Executor, source: Source) -> None:
        super().__init__(executor.groups, config.model.mtp_layers)
        self._source, self._temperature = source, config.objective.temperature

    def prepared(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """See `Objective`."""
        told = self._source.told(micro)
        return [
            replace(one, soft=SoftLabels(ids, log_probs, self._temperature))
            for one, (ids, log_probs) in zip(micro, told, strict=True)
        ]


def tokens_of_samples(
    teacher: LiveTeacher, config: RunConfig, device: torch.device, batch: StepBatch, samples: range
) -> dict[str, list[np.ndarray]]:
    """What is kept of each sample of a step, on every rank. A collective call of all ranks."""
    groups, count, length = teacher.executor.groups, config.objective.top_k, config.data.seq_length
    micro = list(micro_batches(batch, config, device, groups.cp))
    told, places = teacher.told(micro), place_of_tokens(length, groups.cp)
    held = torch.zeros(2, len(samples), length, count, dtype=micro[0].weights.dtype)
    tensor_and_last = groups.tp.rank == 0 and teacher.executor.last_stage in teacher.executor.stages
    for one, (ids, log_probs) in zip(micro, told, strict=True) if tensor_and_last else ():
        rows = torch.tensor(one.samples)[:, None] - samples.start
        held[0, rows, places], held[1, rows, places] = ids.cpu().to(held.dtype), log_probs.cpu().to(held.dtype)
    all_reduce(held, groups.world)
    kept = np.float32 if config.precision in ("fp32", "fp64") else np.float16
    ids, log_probs = held.numpy()
    return {"ids": list(ids.astype(np.int32)), "log_probs": list(log_probs.astype(kept))}
