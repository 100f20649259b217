"""Samples for next-token training: windows of S + 1 tokens out of a blend, with masks and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import ConfigError, DataError
from mega_data.blend import MegatronBlend, StableBlend
from mega_data.config import DataConfig
from mega_data.indexed import IndexedReader
from mega_data.parts import SPLITS, Part, Parts
from mega_data.sample_index import MegatronSamples, StableSamples


@dataclass(frozen=True)
class Sample:
    """One sequence of S inputs and what is to be predicted at each.

    Attributes:
        tokens: int64 [S].
        labels: int64 [S], the token that follows each.
        loss_mask: bool [S], where a loss is taken.
        position_ids: int64 [S].
        document_ids: int32 [S], number of the document within the sample, from 0; None where attention is not reset.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32] | None


class Windows(Protocol):
    """The samples of one data set: int64 [S + 1] each."""

    identity: str

    def __getitem__(self, k: int, /) -> npt.NDArray[np.int64]: ...


class Blend(Protocol):
    """Where sample k of a blend comes from."""

    identity: str

    def locate(self, k: int) -> tuple[int, int]:
        """The data set of sample `k`, and its number there."""
        ...


@dataclass(frozen=True)
class DocumentRules:
    """What the end-of-document token `eod` does to a sample; the flags are those of `DataConfig`."""

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

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
        mask = ~ends if self.eod_mask_loss else np.ones(tokens.size, np.bool_)
        return Sample(tokens, labels, mask, positions, document_ids)


class GPTDataset:
    """Sample k of a blend. In order `stable` any k >= 0 is there; in order `megatron` those of the total asked for.

    Attributes:
        fingerprint: 32 hex digits of all that sample k depends on: order, seed, weights, contents, rules. A resumed
            run compares it with the one in its checkpoint to know that its data is still the same.

    Raises:
        DataError: on reading a sample past the end of order `megatron`.
    """

    def __init__(self, sources: Sequence[Windows], blend: Blend, rules: DocumentRules) -> None:
        self._sources, self._blend, self._rules = sources, blend, rules
        told = [blend.identity, *(source.identity for source in sources), repr(rules)]
        self.fingerprint = xxhash.xxh3_128_hexdigest("\n".join(told).encode())

    def __getitem__(self, k: int) -> Sample:
        source, number = self._blend.locate(k)
        return self._rules.sample(self._sources[source][number])


def build_datasets(
    config: DataConfig, *, seed: int, samples: Mapping[str, int], eod: int | None
) -> tuple[GPTDataset, GPTDataset | None, GPTDataset | None]:
    """The train, valid and test sets of a run.

    `samples` says how many samples the run will read of "train", "valid" and "test"; order `megatron` depends on it,
    order `stable` does not. Valid and test are None when none is asked for or `split` gives them nothing.

    Raises:
        ConfigError: when a rule about documents is on and `eod` is None.
        DataError: when a data set cannot be used, or train or a valid or test that is asked for comes out empty.
    """
    parts = Parts(config, eod)
    rules = DocumentRules(eod, config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss)

    def split(name: str) -> GPTDataset | None:
        wanted = samples.get(name, 0)
        chosen = parts.of(name) if wanted or name == "train" else []
        return _dataset(config, chosen, rules, seed, wanted) if chosen else None

    train, valid, test = map(split, SPLITS)
    if train is None:
        raise ConfigError("data.split gives nothing to train")
    return train, valid, test


def _dataset(config: DataConfig, parts: Sequence[Part], rules: DocumentRules, seed: int, wanted: int) -> GPTDataset:
    if config.order == "megatron":
        return _megatron(config, parts, rules, seed, wanted)
    sources = [
        StableSamples(part.reader, part.first, part.last, seq_length=config.seq_length, seed=seed) for part in parts
    ]
    return GPTDataset(sources, StableBlend([part.weight or 1.0 for part in parts]), rules)


def _megatron(config: DataConfig, parts: Sequence[Part], rules: DocumentRules, seed: int, wanted: int) -> GPTDataset:
    cache = config.cache or parts[0].reader.prefix.parent / ".cache"
    own_splits = config.valid is not None or config.test is not None
    blend: Blend = StableBlend([1.0])
    sizes = [wanted]
    # One data set goes through Megatron's blending, and its surplus, only where it has a weight and shares a split.
    if len(parts) > 1 or (parts[0].weight is not None and not own_splits):
        blend = MegatronBlend([part.weight or 1.0 for part in parts], wanted, cache)
        sizes = blend.sizes
    sources = [
        MegatronSamples(
            part.reader, part.first, part.last, seq_length=config.seq_length, seed=seed, num_samples=size, cache=cache
        )
        for part, size in zip(parts, sizes, strict=True)
    ]
    return GPTDataset(sources, blend, rules)


class SequentialDataset:
    """A data set from its first token to its last, for perplexity: every token but the first is a label exactly once.

    Sample k has the inputs [k S, (k + 1) S). The last one is padded with token 0, its mask False there.
    """

    def __init__(self, reader: IndexedReader, seq_length: int) -> None:
        self._tokens, self._seq_length = reader.tokens, seq_length
        self.num_labels = max(0, reader.num_tokens - 1)

    def __len__(self) -> int:
        return -(-self.num_labels // self._seq_length)

    def __getitem__(self, k: int) -> Sample:
        if not 0 <= k < len(self):
            raise IndexError(k)
        window = self._tokens[k * self._seq_length : (k + 1) * self._seq_length + 1]
        padded = np.zeros(self._seq_length + 1, np.int64)
        padded[: window.size] = window
        positions = np.arange(self._seq_length)
        return Sample(padded[:-1], padded[1:], positions < window.size - 1, positions, None)


def sequential(prefix: Path, seq_length: int) -> SequentialDataset:
    """Open a held-out data set for evaluation from its first token to its last.

    Raises:
        DataError: when the data set cannot be used or has fewer than two tokens.
    """
    dataset = SequentialDataset(IndexedReader(prefix), seq_length)
    if not len(dataset):
        raise DataError(f"{prefix}: fewer than two tokens, so there is nothing to predict")
    return dataset
