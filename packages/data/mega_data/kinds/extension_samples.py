"""Samples of the kinds of data of extensions, whose errors name the extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError
from mega_common.extension_entries import DataKind
from mega_common.extension_loader import name_extension_in_errors
from mega_common.strict_config import StrictConfig
from mega_data.kinds.dataset_kind import DatasetContext, DatasetSamples, TrainingSample
from mega_data.sampling.dataset_parts import DatasetPart

MEMBERS = ("content_key", "samples_per_epoch", "estimate_attention_work", "__getitem__")
ARRAYS = ("tokens", "labels", "loss_weights", "position_ids", "document_ids", "token_types", "targets")  # [S] each


@dataclass(frozen=True)
class ExtensionSampleBuilder:
    """Builder of the samples of an extension's kind of data (`DatasetFactory`); `title` names both in errors."""

    title: str
    entry: DataKind
    options: StrictConfig

    def __call__(self, part: DatasetPart, context: DatasetContext, num_samples: int) -> DatasetSamples[Any]:
        """Return the samples of a data set.

        Raises:
            ConfigError: if the extension raises, or returns an object that lacks a member of `DatasetSamples`.
        """
        package = str(getattr(self.entry.build, "__module__", "")).partition(".")[0]
        with name_extension_in_errors(self.title, package):
            samples = self.entry.build(part, context, num_samples, options=self.options)
        if missing := [member for member in MEMBERS if not hasattr(samples, member)]:
            raise ConfigError(
                f"{self.title} returned {type(samples).__name__}, which has no {', '.join(missing)}",
                hint="docs/extensions.md lists the members of samples",
            )
        return CheckedSamples(self.title, package, samples, context.config.seq_length)


@dataclass(frozen=True)
class CheckedSamples:
    """Samples of an extension, each checked on reading: its arrays must have `data.seq_length` elements."""

    title: str
    package: str
    samples: DatasetSamples[Any]
    length: int

    @property
    def content_key(self) -> str:
        """Text that names everything the samples depend on."""
        return self.samples.content_key

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples in one pass over the data set."""
        return self.samples.samples_per_epoch

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """Return the approximate number of attended token pairs of each sample in `numbers`."""
        with name_extension_in_errors(self.title, self.package):
            return self.samples.estimate_attention_work(numbers)

    def __getitem__(self, k: int, /) -> Any:
        with name_extension_in_errors(self.title, self.package):
            sample = self.samples[k]
        for name in ARRAYS if isinstance(sample, TrainingSample) else ():
            array = getattr(sample, name)
            if array is not None and np.shape(array) != (self.length,):
                raise ConfigError(
                    f"{self.title}: {name} of sample {k} must have data.seq_length = {self.length} elements, found shape "
                    f"{np.shape(array)}",
                    hint="correct the extension",
                )
        return sample
