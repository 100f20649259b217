"""Asks another model about all samples that a run will read, before training, into files (`SampleFiles`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mega_common.log import ProgressBar
from mega_data.loader import Loader, Samples, StepBatch
from mega_trainer.comm import raised_alike
from mega_trainer.config import RunConfig
from mega_trainer.mesh import Groups
from mega_trainer.objectives.sample_files import SampleFiles

# Of a step's samples and their numbers what is to be kept of each, by name; the same on every rank.
Tell = Callable[[StepBatch, range], Mapping[str, Sequence[np.ndarray]]]


def ask(
    files: SampleFiles, tell: Tell, config: RunConfig, groups: Groups, data: Samples, samples: range, together: int
) -> None:
    """Fill in those of the samples that the files have not: a file at a time, from where they end.

    A collective call of all ranks, of which the first one writes.

    Args:
        together: about how many samples to put in a file.
    """
    start, unit = files.end(samples.start), config.batch.micro * groups.dp.size * groups.pp.size

    def size(at: int) -> int:  # of a file: so that every data rank has a share, and a pipeline is full
        return unit * max(1, min(together, samples.stop - at) // unit)

    loader = Loader(
        data, global_batch=size, seq_length=config.data.seq_length, dp_rank=groups.dp.rank, dp_size=groups.dp.size,
        consumed_samples=start, prefetch=1,
    )  # fmt: skip
    with ProgressBar("asking the other model", total=max(0, samples.stop - start), unit="samples") as bar:
        for batch in loader if start < samples.stop else ():
            own = range(start, start := start + size(start))
            told = tell(batch, own)
            with raised_alike(groups.world):
                if groups.world.rank == 0:
                    files.write(own.start, told)
            bar.advance(len(own))
            if start >= samples.stop:
                break
