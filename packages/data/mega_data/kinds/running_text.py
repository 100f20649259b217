"""Running text: windows of S + 1 tokens that cross document boundaries, with masks and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.sampling.token_windows import MegatronTokenWindows, ShuffledTokenWindows, StableTokenWindows


class TokenWindows(Protocol):
    """Interface of token windows of one data set: window k has sequence length + 1 tokens, int64."""

    @property
    def content_key(self) -> str:
        """Text that names everything the token windows depend on; equal texts mean equal windows."""

    @property
    def samples_per_epoch(self) -> float:
        """Number of token windows in one pass over the data set."""

    def __getitem__(self, k: int, /) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class EndOfDocumentRules:
    """Effects of the end-of-document token `eod` on a sample's positions, attention and loss.
    The flags are named as in `DataConfig`.
    """

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @property
    def content_key(self) -> str:
        """Text that identifies the rules; fixed, since fingerprints in checkpoints contain it."""
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"DocumentRules({values})"

    @classmethod
    def from_context(cls, setting: DatasetContext) -> EndOfDocumentRules:
        """Return the document rules that the data configuration of a run sets."""
        config = setting.config
        return cls(setting.eod, config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss)

    def build_sample(self, window: npt.NDArray[np.int64]) -> TrainingSample:
        """Build a training sample from a window of sequence length + 1 tokens, by these rules for document ends.
        Inputs are all but the last token, labels all but the first.
        """
        tokens, labels = window[:-1], window[1:]
        ends = np.zeros(tokens.size, np.bool_) if self.eod is None else tokens == self.eod
        positions = np.arange(tokens.size)
        begins = np.zeros(tokens.size, np.bool_)
        begins[1:] = ends[:-1]
        document_ids = np.cumsum(begins, dtype=np.int32) if self.reset_attention_mask else None
        if self.reset_position_ids:
            positions -= np.maximum.accumulate(np.where(begins, positions, 0))
        weights = (~ends if self.eod_mask_loss else np.ones(tokens.size)).astype(np.float32)
        return TrainingSample(tokens, labels, weights, positions, document_ids)


class TextSamples:
    """Samples of running text: token windows that cross document boundaries.
    Positions, attention and loss at boundaries follow the run's configuration.
    """

    def __init__(self, windows: TokenWindows, rules: EndOfDocumentRules, seq_length: int) -> None:
        self._windows, self._rules, self._seq_length = windows, rules, seq_length

    @property
    def content_key(self) -> str:
        """Text that names everything the text samples depend on; equal texts mean equal samples."""
        return self._windows.content_key

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples in one pass over the data set."""
        return self._windows.samples_per_epoch

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the squared sequence length for each sample in `numbers`, int64 [len(numbers)].
        Document boundaries are unknown without reading tokens.
        """
        return np.full(numbers.size, self._seq_length**2)

    def __getitem__(self, k: int, /) -> TrainingSample:
        return self._rules.build_sample(self._windows[k])


def build_token_windows(part: DatasetPart, setting: DatasetContext, num_samples: int, seq_length: int) -> TokenWindows:
    """Return windows of seq_length + 1 tokens of one data set's share of a split, in the sample order of the run."""
    order, within = setting.config.sample_order, (part.reader, part.first, part.last)
    seed, cache = setting.seed, setting.cache
    if order == "megatron":
        return MegatronTokenWindows(*within, seq_length=seq_length, seed=seed, num_samples=num_samples, cache=cache)
    if order == "stable":
        return StableTokenWindows(*within, seq_length=seq_length, seed=seed)
    return ShuffledTokenWindows(*within, seq_length=seq_length, seed=seed, cache=cache)


def build_text_samples(part: DatasetPart, setting: DatasetContext, num_samples: int) -> TextSamples:
    """Return the running-text samples of one data set's share of a split (dataset kind `text`).
    They are in the run's sample order.
    """
    seq_length = setting.config.seq_length
    return TextSamples(
        build_token_windows(part, setting, num_samples, seq_length),
        EndOfDocumentRules.from_context(setting),
        seq_length,
    )
