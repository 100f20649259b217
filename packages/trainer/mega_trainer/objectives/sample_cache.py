"""Cache files of another model's outputs per sample, for any layout and batch size, and their precomputation.

A folder has safetensors files of consecutive samples: `samples-000000000512.safetensors` begins with sample 512. For each
array a file has the concatenated elements of all samples as `NAME`, and the bounds of each sample as `NAME.bounds`, int64
[samples + 1] (in elements of the first axis). Files are written atomically, by a rename: after a kill the existing files
are complete, and the precomputation continues with the next one.

The reference model of preference training is the main user: its log-probabilities of answers are precomputed into such
files, or computed in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from mega_ckpt.formats.safetensors_file import SafetensorsFile, SafetensorsHeader
from mega_ckpt.shard_files import tensor_bytes
from mega_common.atomic_files import open_atomic_file
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar
from mega_data.batch_loader import BatchLoader, LoadableDataset, StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.distributed.comm import all_reduce, raise_on_all_ranks
from mega_trainer.distributed.device import to_host
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.objectives.preference_answers import (
    PreferenceAnswers,
    compute_answer_log_prob_sums,
    contributes_answer_sums,
    pair_mismatched_answers,
    split_preference_answers,
)
from mega_trainer.pipeline.executor import PipelineExecutor


class PrecomputedOutputCache:
    """Folder of safetensors files with one model's precomputed outputs for the samples of one data set.
    The model is a teacher or a reference model.

    Args:
        folder: folder for the outputs of one model for one data set, and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[range, Mapping[str, Tensor]] = {}

    def first_missing_sample(self, start: int) -> int:
        """Return the number of the first sample, from `start` on, that is in no file of the cache."""
        while (found := self._find_span(start)) is not None:
            start = found.stop
        return start

    def write_samples(self, first: int, arrays: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Write one safetensors file with the precomputed outputs of consecutive samples.
        `arrays` has them by array name, from sample number `first` on; the file is durable when this returns.
        """
        tensors: dict[str, Tensor] = {}
        for name, each in arrays.items():
            bounds = np.cumsum([0, *map(len, each)])
            tensors |= {name: torch.from_numpy(np.concatenate(each)), f"{name}.bounds": torch.from_numpy(bounds)}
        header = SafetensorsHeader.make_header(
            {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, {"format": "pt"}
        )
        with open_atomic_file(self.folder / f"samples-{first:012d}.safetensors") as stream:
            stream.write(header.encoded_header)
            for name in header.entries:
                stream.write(tensor_bytes(tensors[name].contiguous()))

    def read_array(self, name: str, sample: int) -> np.ndarray:
        """Return a precomputed output of a sample, the array `name`, from the cache files.

        Raises:
            DataError: when no file contains the sample.
        """
        span = self._find_span(sample)
        if span is None:
            raise DataError(
                f"{self.folder}: sample {sample} is missing",
                hint="move the folder away and start the run again; it will be recomputed",
            )
        tensors, index = self._files[span], sample - span.start
        begin, end = tensors[f"{name}.bounds"][index : index + 2].tolist()
        array: np.ndarray = tensors[name][begin:end].numpy()
        return array

    def _find_span(self, sample: int) -> range | None:
        """Return the samples of the file that contains this one, or None."""
        for span in self._files:
            if sample in span:
                return span
        for path in self.folder.glob("samples-*.safetensors"):
            first = int(path.stem.rpartition("-")[2])
            if all(span.start != first for span in self._files):
                file = SafetensorsFile.open_file(path)
                tensors = {name: file.read_tensor(name) for name in file.header.entries}
                count = next(len(bounds) for name, bounds in tensors.items() if name.endswith(".bounds")) - 1
                self._files[range(first, first + count)] = tensors
        return next((span for span in self._files if sample in span), None)


# Function from a step's samples and their numbers to the arrays of each sample by name, equal on all ranks.
ComputeSamples = Callable[[StepBatch, range], Mapping[str, Sequence[np.ndarray]]]


def precompute_sample_outputs(
    files: PrecomputedOutputCache,
    compute: ComputeSamples,
    config: RunConfig,
    groups: ParallelGroups,
    data: LoadableDataset,
    samples: range,
    samples_per_file: int,
) -> None:
    """Compute the outputs of a range of samples, from the first that the cache lacks on, and write them to it.

    A collective call of all ranks; rank 0 writes.

    Args:
        samples_per_file: approximate number of samples per file.
    """
    start, unit = files.first_missing_sample(samples.start), config.batch.micro * groups.dp.size * groups.pp.size

    def next_file_size(at: int) -> int:  # a multiple of `unit`, so that every data rank has samples and a full pipeline
        return unit * max(1, min(samples_per_file, samples.stop - at) // unit)

    loader = BatchLoader(
        data, global_batch=next_file_size, seq_length=config.data.seq_length, dp_rank=groups.dp.rank, dp_size=groups.dp.size,
        consumed_samples=start, prefetch=1,
    )  # fmt: skip
    with ProgressBar("precomputing model outputs", total=max(0, samples.stop - start), unit="samples") as bar:
        for batch in loader if start < samples.stop else ():
            own = range(start, start := start + next_file_size(start))
            outputs = compute(batch, own)
            with raise_on_all_ranks(groups.world):
                if groups.world.rank == 0:
                    files.write_samples(own.start, outputs)
            bar.advance(len(own))
            if start >= samples.stop:
                break


SampleHalf = Literal["answers", "mismatched"]


class ReferenceModel(Protocol):
    """Interface of sources of the reference model's summed answer log-probabilities, for preference losses."""

    def get_answer_log_prob_sums(
        self,
        batch: StepBatch,
        micro: Sequence[MicroBatch],
        answers: Sequence[PreferenceAnswers],
        what: SampleHalf = "answers",
    ) -> list[Tensor]:
        """Return the reference model's summed log-probabilities of each micro-batch's answers, fp64 [P, 2].
        There are P pairs; with `what` "mismatched" (for KTO) the answers are moved to another question.

        A collective call of the ranks of a model; the result is arbitrary except on the last stage.
        """


class LiveReferenceModel:
    """Source of the reference model's log-probabilities, for preference losses, that runs the model in memory."""

    def __init__(self, executor: PipelineExecutor) -> None:
        self._executor = executor

    def get_answer_log_prob_sums(
        self,
        batch: StepBatch,
        micro: Sequence[MicroBatch],
        answers: Sequence[PreferenceAnswers],
        what: SampleHalf = "answers",
    ) -> list[Tensor]:
        """Run the reference model and return the summed log-probabilities of each micro-batch's answers, fp64 [P, 2].
        There are P pairs; with `what` "mismatched" (for KTO) the answers are moved to another question.
        """
        return compute_answer_log_prob_sums(self._executor, micro, answers)


class CachedReferenceModel:
    """Source of the reference model's log-probabilities, for preference losses, that reads them from cache files."""

    def __init__(self, files: PrecomputedOutputCache) -> None:
        self._files = files

    def get_answer_log_prob_sums(
        self,
        batch: StepBatch,
        micro: Sequence[MicroBatch],
        answers: Sequence[PreferenceAnswers],
        what: SampleHalf = "answers",
    ) -> list[Tensor]:
        """Read the reference model's summed log-probabilities of each micro-batch's answers from the cache files.
        They are fp64 [P, 2] for P pairs; with `what` "mismatched" (for KTO) the answers are moved to another question.

        Raises:
            DataError: for a sample that is not in the cache.
        """
        out = []
        for one, each in zip(micro, answers, strict=True):
            sums = np.concatenate([self._files.read_array(what, sample) for sample in one.samples])
            out.append(torch.from_numpy(sums).view(-1, 2).to(each.tokens))
        return out


def collect_reference_log_prob_sums(
    executor: PipelineExecutor, config: RunConfig, device: torch.device, batch: StepBatch, samples: range
) -> dict[str, list[np.ndarray]]:
    """Return `answers`, and for KTO `mismatched`: reference log-probability sums fp64 [2 P] of each sample, on every rank.

    Mismatched answers are those moved to another question. A collective call of all ranks.
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
    answers = split_preference_answers(batch, micro, groups.cp)
    sums, width = compute_answer_log_prob_sums(executor, micro, answers), torch.tensor(answers[0].width)
    all_reduce(width, groups.world, "max")
    out = torch.zeros(len(samples), 1 + int(width), dtype=torch.float64)  # number of sums, then the sums
    for one, each, answer_sums in zip(micro, answers, sums, strict=True) if contributes_answer_sums(executor) else ():
        rows = to_host(each.pairs) // (each.width // 2)
        for row, sample in enumerate(one.samples):
            own = to_host(answer_sums)[rows == row].flatten()
            out[sample - samples.start, : 1 + len(own)] = torch.cat([own.new_tensor([len(own)]), own])
    all_reduce(out, groups.world)
    return [row[1 : 1 + int(row[0])] for row in out.numpy()]
