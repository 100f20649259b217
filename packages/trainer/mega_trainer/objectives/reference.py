"""What a reference model makes of the answers of preference pairs: told before training, into files, or step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from mega_data.loader import StepBatch
from mega_trainer.batch import MicroBatch, micro_batches
from mega_trainer.comm import all_reduce
from mega_trainer.config import RunConfig
from mega_trainer.objectives.answers import Answers, answers_of, mismatched, speaks, sums_by
from mega_trainer.objectives.sample_files import SampleFiles
from mega_trainer.pipeline.run import Executor

What = Literal["answers", "mismatched"]


class Reference(Protocol):
    """Tells what the reference model makes of answers."""

    def sums(
        self, batch: StepBatch, micro: Sequence[MicroBatch], answers: Sequence[Answers], what: What = "answers"
    ) -> list[Tensor]:
        """Of the answers of each micro-batch, or of `mismatched` ones, the sums of the log-probabilities: fp64 [P, 2].

        A collective call of the ranks of a model; what other ranks than the last stage's are told does not matter.
        """


class LiveReference:
    """A model in memory."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def sums(
        self, batch: StepBatch, micro: Sequence[MicroBatch], answers: Sequence[Answers], what: What = "answers"
    ) -> list[Tensor]:
        """See `Reference`."""
        return sums_by(self._executor, micro, answers)


class CachedReference:
    """Files, in which each sample's answers are."""

    def __init__(self, files: SampleFiles) -> None:
        self._files = files

    def sums(
        self, batch: StepBatch, micro: Sequence[MicroBatch], answers: Sequence[Answers], what: What = "answers"
    ) -> list[Tensor]:
        """See `Reference`.

        Raises:
            DataError: for a sample that is not there.
        """
        out = []
        for one, each in zip(micro, answers, strict=True):
            held = np.concatenate([self._files.read(what, sample) for sample in one.samples])
            out.append(torch.from_numpy(held).view(-1, 2).to(each.tokens))
        return out


def sums_of_samples(
    executor: Executor, config: RunConfig, device: torch.device, batch: StepBatch, samples: range
) -> dict[str, list[np.ndarray]]:
    """What is kept of each sample of a step: the sums of its answers, and of `mismatched` ones where they are asked for.

    fp64 [2 P] each, on every rank. A collective call of all ranks.
    """
    kinds: tuple[What, ...] = ("answers", "mismatched") if config.objective.kind == "kto" else ("answers",)
    return {str(what): _told(executor, config, batch, what, samples, device) for what in kinds}


def _told(
    executor: Executor, config: RunConfig, batch: StepBatch, what: What, samples: range, device: torch.device
) -> list[np.ndarray]:
    groups = executor.groups
    batch = mismatched(batch) if what == "mismatched" else batch
    micro = list(micro_batches(batch, config, device, groups.cp))
    answers = answers_of(batch, micro, groups.cp)
    sums, width = sums_by(executor, micro, answers), torch.tensor(answers[0].width)
    all_reduce(width, groups.world, "max")
    held = torch.zeros(len(samples), 1 + int(width), dtype=torch.float64)  # how many, and what they are
    for one, each, found in zip(micro, answers, sums, strict=True) if speaks(executor) else ():
        rows = each.pairs.cpu() // (each.width // 2)
        for row, sample in enumerate(one.samples):
            own = found.cpu()[rows == row].flatten()
            held[sample - samples.start, : 1 + len(own)] = torch.cat([own.new_tensor([len(own)]), own])
    all_reduce(held, groups.world)
    return [row[1 : 1 + int(row[0])] for row in held.numpy()]
