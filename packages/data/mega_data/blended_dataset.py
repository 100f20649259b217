"""Samples of a run from blended data sets, planned data usage, and sequential reading of one data set."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import ConfigError, DataError
from mega_common.vision_config import VisionConfig
from mega_data.data_config import DataConfig
from mega_data.kinds import get_dataset_builders
from mega_data.kinds.blocked_samples import BlockedSamples
from mega_data.kinds.dataset_kind import DatasetContext, DatasetFactory, DatasetSamples, TrainingSample
from mega_data.kinds.retro_samples import RetroSamples
from mega_data.kinds.running_text import EndOfDocumentRules
from mega_data.retrieval.neighbor_files import open_dataset_neighbors
from mega_data.sampling.dataset_parts import SPLITS, DatasetPart, DatasetPartitioner
from mega_data.sampling.staged_blend import build_evaluation_blend, build_training_blend, number_repeated_paths
from mega_data.sampling.weighted_blend import MegatronBlend, StableBlend
from mega_data.token_files.image_references import reject_images
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer


class SampleBlend(Protocol):
    """Interface of blends: they map sample k of a blend to a data set and a sample number within that data set."""

    content_key: str

    def locate_sample(self, k: int) -> tuple[int, int]:
        """Return (index of the data set that blend sample `k` comes from, number of the sample within that data set)."""

    def count_samples(self, k: int) -> Sequence[int]:
        """Return, for each data set, the number of its samples among the blend's samples 0 to `k` - 1."""


class BlendedDataset:
    """Samples of a weighted blend of data sets, for one split (train, valid or test) of a run.

    In order `megatron` only the requested total exists, else any number that `max_epochs` allows.

    Raises:
        DataError: on reading a sample past the end.
    """

    def __init__(
        self,
        parts: Sequence[DatasetPart],
        sources: Sequence[DatasetSamples[Any]],
        blend: SampleBlend,
        rules: EndOfDocumentRules,
        seq_length: int,
    ) -> None:
        self._parts, self._sources, self._blend = parts, sources, blend
        self._rules, self._seq_length = rules, seq_length

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint (32 hex digits) of everything that the samples of a blend depend on.
        It covers order, seed, weights, data set contents and document rules.

        A resumed run compares it with the one in its checkpoint to detect changed data.
        """
        content_keys = [
            self._blend.content_key,
            *(source.content_key for source in self._sources),
            self._rules.content_key,
        ]
        return xxhash.xxh3_128_hexdigest("\n".join(content_keys).encode())

    def __getitem__(self, k: int) -> Any:
        """Return sample `k` of the blend: a `TrainingSample`, or the sample type of its dataset kind (`BertSample`,
        `T5Sample`).
        """
        source, number = self._blend.locate_sample(k)
        return self._sources[source][number]

    def estimate_attention_work(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the approximate attention work of samples: their numbers of attended (query, key) token pairs.
        The samples are `numbers`; the result is int64 [len(numbers)].
        """
        sources, positions = np.array([self._blend.locate_sample(k) for k in numbers]).T
        work = np.empty(len(numbers), np.int64)
        for source in np.unique(sources).tolist():
            selected = sources == source
            work[selected] = self._sources[source].estimate_attention_work(positions[selected])
        return work

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples in one pass over every data set of the blend, added up."""
        return sum(source.samples_per_epoch for source in self._sources)

    def count_samples_by_path(self, k: int) -> dict[str, int]:
        """Return {path of a data set: number of its samples among the blend's samples 0 to `k` - 1}."""
        return dict(
            zip(number_repeated_paths(part.name for part in self._parts), self._blend.count_samples(k), strict=True)
        )

    def find_stream_positions(self, k: int) -> dict[str, dict[str, Any]]:
        """Return {path of a streamed data set: its position (JSON values) after the first `k` samples of the blend}.
        `data.streamed` of a resumed run has it.
        """
        counts = self.count_samples_by_path(k)
        return {
            name: source.find_stream_position(counts[name]).model_dump()
            for name, part, source in zip(counts, self._parts, self._sources, strict=True)
            if part.stream is not None and isinstance(source, BlockedSamples)
        }

    def count_epochs_by_path(self, k: int) -> dict[str, float]:
        """Return {configured path: number of passes over its data within the blend's samples 0 to `k` - 1}.

        All data sets of a glob count as one path.
        """
        counts, passes = defaultdict[str, float](float), defaultdict[str, float](float)
        for part, source, count in zip(self._parts, self._sources, self._blend.count_samples(k), strict=True):
            name = str(part.reader.prefix if part.source is None else part.source.path)
            counts[name] += count
            # `samples_per_epoch` may build an index, so a data set that was not read is estimated by its tokens.
            passes[name] += source.samples_per_epoch if count else part.num_tokens / self._seq_length
        return {name: count / passes[name] for name, count in counts.items()}


def build_blended_datasets(
    config: DataConfig,
    *,
    seed: int,
    samples: Mapping[str, int],
    eod: int | None,
    tokenizer: Tokenizer | None = None,
    vision: VisionConfig | None = None,
    added_kinds: Mapping[str, DatasetFactory] | None = None,
) -> tuple[BlendedDataset, BlendedDataset | None, BlendedDataset | None]:
    """Return the train, valid and test sets of a run; valid or test is None if the run reads no samples of it.
    `eod` is the end-of-document token.

    Valid and test are None if no samples of them are requested or their share of `split` is zero.

    Args:
        samples: number of samples that the run reads of "train", "valid" and "test"; order `megatron` depends on it,
            the other orders do not.
        eod: end-of-document token, or None.
        tokenizer: tokenizer of the data, for the kinds `fim`, `bert`, `masked` and `t5`; by default that of `config`.
        vision: vision encoder of the model, or None.
        added_kinds: builders of the samples of further dataset kinds, by name.

    Raises:
        ConfigError: if a document rule is enabled and `eod` is None.
        DataError: if a data set cannot be used, or a requested split is empty.
    """
    parts, builders = DatasetPartitioner(config, eod), {**get_dataset_builders(), **(added_kinds or {})}

    def split(name: str) -> BlendedDataset | None:
        count = samples.get(name, 0)
        chosen = parts.build_split_parts(name) if count or name == "train" else []
        if not chosen:
            return None
        cache = config.cache or chosen[0].reader.prefix.parent / ".cache"
        return _build_blended_dataset(
            chosen,
            DatasetContext(config, seed, eod, cache, tokenizer, vision),
            count,
            builders,
            training=name == "train",
        )

    train, valid, test = map(split, SPLITS)
    if train is None:
        raise ConfigError("data.split: the share of train must be above 0", hint="set data.split: 969,30,1")
    return train, valid, test


def _build_blended_dataset(
    parts: Sequence[DatasetPart],
    setting: DatasetContext,
    num_samples: int,
    builders: Mapping[str, DatasetFactory],
    *,
    training: bool,
) -> BlendedDataset:
    config = setting.config
    if config.sample_order != "megatron":
        sources = _build_sources(parts, setting, builders)
        _check_neighbor_shapes(parts, sources)
        epoch_sizes = [partial(getattr, source, "samples_per_epoch") for source in sources]
        limits = [part.get_sample_limit(size) for part, size in zip(parts, epoch_sizes, strict=True)]
        staged = build_training_blend(parts, config, limits) if training else build_evaluation_blend(parts)
        return BlendedDataset(parts, sources, staged, EndOfDocumentRules.from_context(setting), config.seq_length)
    blend: SampleBlend = StableBlend([parts[0].weights_by_tokens[0]])
    sizes, separate_splits = [num_samples], config.valid is not None or config.test is not None
    # Megatron blends a single data set, with its surplus of samples, only if it has a weight and shares a split.
    if len(parts) > 1 or (parts[0].weight is not None and not separate_splits):
        blend = MegatronBlend([part.weights_by_tokens[0] for part in parts], num_samples, setting.cache)
        sizes = blend.sizes
    sources = [builders[part.kind](part, setting, size) for part, size in zip(parts, sizes, strict=True)]
    return BlendedDataset(parts, sources, blend, EndOfDocumentRules.from_context(setting), config.seq_length)


def _build_sources(
    parts: Sequence[DatasetPart], setting: DatasetContext, builders: Mapping[str, DatasetFactory]
) -> list[DatasetSamples[Any]]:
    """Return the samples of each data set, for orders other than `megatron`."""
    config = setting.config
    if config.sample_order != "blocks":
        return [builders[part.kind](part, setting, 0) for part in parts]
    names = number_repeated_paths(part.name for part in parts)
    return [
        BlockedSamples(part, setting, builders[part.kind], config.streamed.get(name) if part.stream else None)
        for name, part in zip(names, parts, strict=True)
    ]


def _check_neighbor_shapes(parts: Sequence[DatasetPart], sources: Sequence[DatasetSamples[Any]]) -> None:
    """Reject data sets whose retrieval chunks have different shapes and do not fit one batch."""
    shapes = {
        source.shape: part.name for part, source in zip(parts, sources, strict=True) if isinstance(source, RetroSamples)
    }
    if len(shapes) > 1:
        found = "; ".join(
            f"{name}: {count} neighbors, chunk length {width // 2}" for (_, count, width), name in shapes.items()
        )
        raise ConfigError(
            f"data.train: all data sets of kind retro must have equal neighbor counts and chunk lengths ({found})",
            hint="run mega data retrieve with the same -k and --chunk-length for all",
        )


class SequentialDataset:
    """Data set read once from its first token to its last in windows of the sequence length, to measure perplexity.

    Every token except the first is a label exactly once. Sample k has the inputs [k S, (k + 1) S); the last sample is
    padded with token 0, with loss weight 0.
    """

    def __init__(self, tokens: np.ndarray[Any, Any], seq_length: int) -> None:
        self._tokens, self._seq_length = tokens, seq_length
        self.num_labels = max(0, len(tokens) - 1)

    def __len__(self) -> int:
        return -(-self.num_labels // self._seq_length)

    def __getitem__(self, k: int) -> TrainingSample:
        if not 0 <= k < len(self):
            raise IndexError(k)
        window = self._tokens[k * self._seq_length : (k + 1) * self._seq_length + 1]
        padded = np.zeros(self._seq_length + 1, np.int64)
        padded[: window.size] = window
        positions = np.arange(self._seq_length)
        return TrainingSample(
            padded[:-1], padded[1:], (positions < window.size - 1).astype(np.float32), positions, None
        )


def open_sequential_dataset(prefix: Path, seq_length: int) -> SequentialDataset:
    """Open the data set at `prefix` for evaluation in windows of `seq_length` tokens, from the first token to the last.

    Raises:
        DataError: if the data set cannot be used or has fewer than two tokens.
    """
    reader = IndexedReader(prefix)
    reject_images([reader], "evaluated here", "evaluate them during training: set data.valid and train.eval_every")
    dataset = SequentialDataset(reader.tokens, seq_length)
    if not len(dataset):
        raise DataError(f"{prefix}: evaluation requires at least two tokens, and it has {reader.num_tokens}")
    return dataset


@dataclass(frozen=True)
class DatasetUsage:
    """Planned usage of a data set by one split of a run: its documents and tokens, and the samples and epochs read.
    The run reads `samples` of one split (train, valid or test), equal to `epochs` passes over the tokens that belong to
    the split.
    For streamed data, documents and tokens count the first block, and `epochs` is NaN.
    """

    split: str
    prefix: Path
    documents: int
    tokens: int
    samples: float
    epochs: float


def plan_dataset_usage(config: DataConfig, samples: Mapping[str, int], eod: int | None) -> list[DatasetUsage]:
    """Return the planned usage of each data set by a run, without building a sample index.
    The run reads `samples[split]` samples of each split.

    Raises:
        ConfigError, DataError: as `build_blended_datasets`.
    """
    parts, usages = DatasetPartitioner(config, eod), []
    for name in SPLITS:
        chosen = parts.build_split_parts(name) if name == "train" or samples.get(name) else []
        passes = [math.nan if part.stream else _estimate_epoch_samples(part, config) for part in chosen]
        limits = [part.get_sample_limit(partial(float, each)) for part, each in zip(chosen, passes, strict=True)]
        blend = (
            build_training_blend(chosen, config, limits)
            if name == "train"
            else build_evaluation_blend(chosen)
            if chosen
            else None
        )
        counts = blend.count_samples(samples.get(name, 0)) if blend else []
        for part, count, each in zip(chosen, counts, passes, strict=True):
            usages.append(
                DatasetUsage(name, part.reader.prefix, part.reader.documents, part.num_tokens, count, count / each)
            )
    return usages


def _estimate_epoch_samples(part: DatasetPart, config: DataConfig) -> float:
    """Return the approximate number of samples per epoch; for dataset kind `retro` the padding of documents counts."""
    if part.kind != "retro":
        return part.num_tokens / config.seq_length
    neighbors = open_dataset_neighbors(part.source.neighbors if part.source else None, part.reader)
    chunks = neighbors.chunks.find_sequence_chunks(part.first, part.last)
    neighbors.check_split_overlap(chunks)
    return len(chunks) * neighbors.info.chunk_length / config.seq_length
