"""Reference model's log-probabilities of preference answers, precomputed into files or computed in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.device import to_host
from mega_trainer.objectives.preference_answers import (
    PreferenceAnswers,
    is_reporting_rank,
    pair_mismatched_answers,
    score_answers,
    split_answers,
)
from mega_trainer.objectives.sample_cache import SampleCache
from mega_trainer.pipeline.executor import PipelineExecutor

SampleHalf = Literal["answers", "mismatched"]


class ReferenceModel(Protocol):
    """Interface of sources of the reference model's summed answer log-probabilities, for preference losses."""

    def get_answer_sums(
        self,
        batch: StepBatch,
        micro: Sequence[MicroBatch],
        answers: Sequence[PreferenceAnswers],
        what: SampleHalf = "answers",
    ) -> list[Tensor]:
        """Return the reference model's summed log-probabilities of each micro-batch's answers, or of the `mismatched`
        answers (KTO): fp64 [P, 2].

        A collective call of the ranks of a model; the result is arbitrary except on the last stage.
        """


class LiveReferenceModel:
    """`ReferenceModel` that runs the reference model in memory."""

    def __init__(self, executor: PipelineExecutor) -> None:
        self._executor = executor

    def get_answer_sums(
        self,
        batch: StepBatch,
        micro: Sequence[MicroBatch],
        answers: Sequence[PreferenceAnswers],
        what: SampleHalf = "answers",
    ) -> list[Tensor]:
        """Run the reference model and return its summed answer log-probabilities; see `ReferenceModel.get_answer_sums`."""
        return score_answers(self._executor, micro, answers)


class CachedReferenceModel:
    """`ReferenceModel` that reads each sample's precomputed answer sums from cache files."""

    def __init__(self, files: SampleCache) -> None:
        self._files = files

    def get_answer_sums(
        self,
        batch: StepBatch,
        micro: Sequence[MicroBatch],
        answers: Sequence[PreferenceAnswers],
        what: SampleHalf = "answers",
    ) -> list[Tensor]:
        """Read the reference model's summed answer log-probabilities from the cache files; see
        `ReferenceModel.get_answer_sums`.

        Raises:
            DataError: for a sample that is not in the cache.
        """
        out = []
        for one, each in zip(micro, answers, strict=True):
            sums = np.concatenate([self._files.read_array(what, sample) for sample in one.samples])
            out.append(torch.from_numpy(sums).view(-1, 2).to(each.tokens))
        return out


def collect_reference_sums(
    executor: PipelineExecutor, config: RunConfig, device: torch.device, batch: StepBatch, samples: range
) -> dict[str, list[np.ndarray]]:
    """Return the reference model's summed answer log-probabilities of each sample, to be written to the cache, also of
    `mismatched` answers if the loss needs them.

    Each is fp64 [2 P], on every rank. A collective call of all ranks.
    """
    kinds: tuple[SampleHalf, ...] = ("answers", "mismatched") if config.objective.kind == "kto" else ("answers",)
    return {str(what): _collect_answer_sums(executor, config, batch, what, samples, device) for what in kinds}


def _collect_answer_sums(
    executor: PipelineExecutor,
    config: RunConfig,
    batch: StepBatch,
    what: SampleHalf,
    samples: range,
    device: torch.device,
) -> list[np.ndarray]:
    groups = executor.parallel_groups
    batch = pair_mismatched_answers(batch) if what == "mismatched" else batch
    micro = list(split_micro_batches(batch, config, device, groups.cp))
    answers = split_answers(batch, micro, groups.cp)
    sums, width = score_answers(executor, micro, answers), torch.tensor(answers[0].width)
    all_reduce(width, groups.world, "max")
    out = torch.zeros(len(samples), 1 + int(width), dtype=torch.float64)  # number of sums, then the sums
    for one, each, answer_sums in zip(micro, answers, sums, strict=True) if is_reporting_rank(executor) else ():
        rows = to_host(each.pairs) // (each.width // 2)
        for row, sample in enumerate(one.samples):
            own = to_host(answer_sums)[rows == row].flatten()
            out[sample - samples.start, : 1 + len(own)] = torch.cat([own.new_tensor([len(own)]), own])
    all_reduce(out, groups.world)
    return [row[1 : 1 + int(row[0])] for row in out.numpy()]
