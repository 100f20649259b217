"""Kind of data `my_extension`: windows of running text in which only the last tokens count in the loss. Change it to yours.

Sample k depends on the seed and k alone, so that a run can resume in any layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from pydantic import Field

from mega_trainer.extend import (
    DataKind,
    DatasetContext,
    DatasetPart,
    DatasetSamples,
    Extension,
    StrictConfig,
    TrainingSample,
    build_text_samples,
)


class LateLossOptions(StrictConfig):
    """Settings of `data.options` in run.yaml."""

    share: float = Field(0.5, gt=0, le=1, description="share of a window, from its end, that counts in the loss")


@dataclass(frozen=True)
class LateLossSamples:
    """Windows of one data set's text in which only the last `share` of the tokens count in the loss."""

    windows: DatasetSamples[TrainingSample]
    share: float

    @property
    def content_key(self) -> str:
        """Text that names everything the samples depend on; a resumed run compares it to detect changed data."""
        return f"my_extension {self.share} {self.windows.content_key}"

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples in one pass over the data set."""
        return self.windows.samples_per_epoch

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """Return the approximate number of attended token pairs of each sample in `numbers`."""
        return self.windows.estimate_attention_work(numbers)

    def __getitem__(self, k: int, /) -> TrainingSample:
        sample = self.windows[k]
        first = round(len(sample.tokens) * (1 - self.share))
        counts = (np.arange(len(sample.tokens)) >= first).astype(np.float32)
        return replace(sample, loss_weights=sample.loss_weights * counts)


def build(part: DatasetPart, context: DatasetContext, num_samples: int, *, options: LateLossOptions) -> LateLossSamples:
    """Return the samples of one data set; `num_samples` is the number that the run reads."""
    return LateLossSamples(build_text_samples(part, context, num_samples), options.share)


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, data_kinds={"my_extension": DataKind(build, LateLossOptions)}
)
