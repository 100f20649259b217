"""Running text: windows of S + 1 tokens that run across the ends of documents, with masks and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mega_data.kinds.base import Sample, Setting
from mega_data.order.parts import Part
from mega_data.order.sample_index import MegatronSamples, ShuffledSamples, StableSamples


class Windows(Protocol):
    """Windows of one data set: int64 [S + 1] each."""

    @property
    def identity(self) -> str:
        """See `Samples`."""

    @property
    def samples_per_epoch(self) -> float:
        """See `Samples`."""

    def __getitem__(self, k: int, /) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class DocumentRules:
    """What the end-of-document token `eod` does to a sample; the flags are those of `DataConfig`."""

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @classmethod
    def of(cls, setting: Setting) -> DocumentRules:
        """Those of a run."""
        config = setting.config
        return cls(setting.eod, config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss)

    def sample(self, window: npt.NDArray[np.int64]) -> Sample:
        """Make a sample of S + 1 tokens."""
        tokens, labels = window[:-1], window[1:]
        ends = np.zeros(tokens.size, np.bool_) if self.eod is None else tokens == self.eod
        positions = np.arange(tokens.size)
        begins = np.zeros(tokens.size, np.bool_)
        begins[1:] = ends[:-1]
        document_ids = np.cumsum(begins, dtype=np.int32) if self.reset_attention_mask else None
        if self.reset_position_ids:
            positions -= np.maximum.accumulate(np.where(begins, positions, 0))
        weights = (~ends if self.eod_mask_loss else np.ones(tokens.size)).astype(np.float32)
        return Sample(tokens, labels, weights, positions, document_ids)


class TextSamples:
    """Samples of running text. The rules are the run's, which tells of them for all of its data sets."""

    def __init__(self, windows: Windows, rules: DocumentRules, seq_length: int) -> None:
        self._windows, self._rules, self._seq_length = windows, rules, seq_length

    @property
    def identity(self) -> str:
        """See `Samples`."""
        return self._windows.identity

    @property
    def samples_per_epoch(self) -> float:
        """See `Samples`."""
        return self._windows.samples_per_epoch

    def work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Samples`: where the tokens tell documents apart, how, is not known without them."""
        return np.full(numbers.size, self._seq_length**2)

    def __getitem__(self, k: int, /) -> Sample:
        return self._rules.sample(self._windows[k])


def windows(part: Part, setting: Setting, wanted: int, seq_length: int) -> Windows:
    """Windows of seq_length + 1 tokens of a part, in the order of the run."""
    order, within = setting.config.sample_order, (part.reader, part.first, part.last)
    seed, cache = setting.seed, setting.cache
    if order == "megatron":
        return MegatronSamples(*within, seq_length=seq_length, seed=seed, num_samples=wanted, cache=cache)
    if order == "stable":
        return StableSamples(*within, seq_length=seq_length, seed=seed)
    return ShuffledSamples(*within, seq_length=seq_length, seed=seed, cache=cache)


def text(part: Part, setting: Setting, wanted: int) -> TextSamples:
    """The kind `text`, in the order of the run."""
    seq_length = setting.config.seq_length
    return TextSamples(windows(part, setting, wanted, seq_length), DocumentRules.of(setting), seq_length)
