"""The samples of a run: data sets of one kind or several, blended; and a data set from its first token to its last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import ConfigError, DataError
from mega_common.vision import VisionConfig
from mega_data.config import DataConfig
from mega_data.files.indexed import IndexedReader
from mega_data.images.references import refuse_images
from mega_data.kinds import kinds
from mega_data.kinds.base import Sample, Samples, Setting
from mega_data.kinds.retro import RetroSamples
from mega_data.kinds.text import DocumentRules
from mega_data.order.blend import MegatronBlend, StableBlend
from mega_data.order.curriculum import fixed_blend, names_of, training_blend
from mega_data.order.parts import SPLITS, Part, Parts
from mega_data.tokenizer import Tokenizer


class Blend(Protocol):
    """Where sample k of a blend comes from."""

    identity: str

    def locate(self, k: int) -> tuple[int, int]:
        """The data set of sample `k`, and its number there."""
        ...

    def counts(self, k: int) -> Sequence[int]:
        """How many of the samples before `k` are of each data set."""
        ...


class BlendedDataset:
    """Sample k of a blend. In order `megatron` those of the total asked for are there, else any that `max_epochs` allows.

    Raises:
        DataError: on reading a sample past the end.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        sources: Sequence[Samples[Any]],
        blend: Blend,
        rules: DocumentRules,
        seq_length: int,
    ) -> None:
        self._parts, self._sources, self._blend = parts, sources, blend
        self._rules, self._seq_length = rules, seq_length

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of all that sample k depends on: order, seed, weights, contents, rules. A resumed run compares
        it with the one in its checkpoint to know that its data is still the same.
        """
        told = [self._blend.identity, *(source.identity for source in self._sources), repr(self._rules)]
        return xxhash.xxh3_128_hexdigest("\n".join(told).encode())

    def __getitem__(self, k: int) -> Any:
        """A `Sample`, or what the kind of the data sets makes instead (`BertSample`, `T5Sample`)."""
        source, number = self._blend.locate(k)
        return self._sources[source][number]

    def work(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Pairs of tokens, about, that attention meets in each of some samples, int64 [n]."""
        sources, places = np.array([self._blend.locate(k) for k in numbers]).T
        found = np.empty(len(numbers), np.int64)
        for source in np.unique(sources).tolist():
            own = sources == source
            found[own] = self._sources[source].work(places[own])
        return found

    @property
    def samples_per_epoch(self) -> float:
        """Samples that come to one pass over each data set."""
        return sum(source.samples_per_epoch for source in self._sources)

    def read(self, k: int) -> dict[str, int]:
        """How many of the samples before `k` are of each data set, by path."""
        return dict(zip(names_of(part.name for part in self._parts), self._blend.counts(k), strict=True))

    def epochs(self, k: int) -> dict[str, float]:
        """How often each entry of the blend has been read before sample `k`, by its path; a glob is one entry."""
        counts, passes = defaultdict[str, float](float), defaultdict[str, float](float)
        for part, source, count in zip(self._parts, self._sources, self._blend.counts(k), strict=True):
            name = str(part.reader.prefix if part.source is None else part.source.path)
            counts[name] += count
            # An index that nobody has needed yet is not made for this.
            passes[name] += source.samples_per_epoch if count else part.tokens / self._seq_length
        return {name: count / passes[name] for name, count in counts.items()}


def build_datasets(
    config: DataConfig,
    *,
    seed: int,
    samples: Mapping[str, int],
    eod: int | None,
    tokenizer: Tokenizer | None = None,
    vision: VisionConfig | None = None,
) -> tuple[BlendedDataset, BlendedDataset | None, BlendedDataset | None]:
    """The train, valid and test sets of a run.

    `samples` says how many samples the run will read of "train", "valid" and "test"; order `megatron` depends on it,
    order `stable` does not. `tokenizer` is that of the data, which the kinds `fim`, `bert`, `masked` and `t5` need; by default
    the one that `config` names. `vision` is what the model sees images with. Valid and test are None when none is asked for
    or `split` gives them nothing.

    Raises:
        ConfigError: when a rule about documents is on and `eod` is None.
        DataError: when a data set cannot be used, or train or a valid or test that is asked for comes out empty.
    """
    parts = Parts(config, eod)

    def split(name: str) -> BlendedDataset | None:
        wanted = samples.get(name, 0)
        chosen = parts.of(name) if wanted or name == "train" else []
        if not chosen:
            return None
        cache = config.cache or chosen[0].reader.prefix.parent / ".cache"
        return _blended(chosen, Setting(config, seed, eod, cache, tokenizer, vision), wanted, training=name == "train")

    train, valid, test = map(split, SPLITS)
    if train is None:
        raise ConfigError("data.split gives nothing to train")
    return train, valid, test


def _blended(parts: Sequence[Part], setting: Setting, wanted: int, *, training: bool) -> BlendedDataset:
    config, known = setting.config, kinds()
    if config.sample_order != "megatron":
        sources = [known[part.kind](part, setting, wanted) for part in parts]
        _check_chunks(parts, sources)
        each = [partial(getattr, source, "samples_per_epoch") for source in sources]
        limits = [part.limit(passes) for part, passes in zip(parts, each, strict=True)]
        mixed = training_blend(parts, config, limits) if training else fixed_blend(parts)
        return BlendedDataset(parts, sources, mixed, DocumentRules.of(setting), config.seq_length)
    blend: Blend = StableBlend([parts[0].weights[0]])
    sizes, own_splits = [wanted], config.valid is not None or config.test is not None
    # One data set goes through Megatron's blending, and its surplus, only where it has a weight and shares a split.
    if len(parts) > 1 or (parts[0].weight is not None and not own_splits):
        blend = MegatronBlend([part.weights[0] for part in parts], wanted, setting.cache)
        sizes = blend.sizes
    sources = [known[part.kind](part, setting, size) for part, size in zip(parts, sizes, strict=True)]
    return BlendedDataset(parts, sources, blend, DocumentRules.of(setting), config.seq_length)


def _check_chunks(parts: Sequence[Part], sources: Sequence[Samples[Any]]) -> None:
    """Refuse data sets of chunks that no one batch takes."""
    shapes = {
        source.shape: part.name for part, source in zip(parts, sources, strict=True) if isinstance(source, RetroSamples)
    }
    if len(shapes) > 1:
        told = "; ".join(f"{name}: {count} of chunks of {width // 2}" for (_, count, width), name in shapes.items())
        raise ConfigError(
            f"the data sets of a blend have other neighbours than each other ({told})",
            hint="mega data retrieve with one -k and one --chunk-length for all",
        )


class SequentialDataset:
    """A data set from its first token to its last, for perplexity: every token but the first is a label exactly once.

    Sample k has the inputs [k S, (k + 1) S). The last one is padded with token 0, its weight 0 there.
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
        return Sample(padded[:-1], padded[1:], (positions < window.size - 1).astype(np.float32), positions, None)


def sequential(prefix: Path, seq_length: int) -> SequentialDataset:
    """Open a held-out data set for evaluation from its first token to its last.

    Raises:
        DataError: when the data set cannot be used or has fewer than two tokens.
    """
    reader = IndexedReader(prefix)
    refuse_images([reader], "read from token to token", "a run's validation reads them: data.valid, train.eval_every")
    dataset = SequentialDataset(reader, seq_length)
    if not len(dataset):
        raise DataError(f"{prefix}: fewer than two tokens, so there is nothing to predict")
    return dataset
