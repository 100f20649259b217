"""Data set parts of each split of a run, validated against the run's document rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob
from itertools import pairwise
from pathlib import Path

import numpy as np

from mega_common.errors import ConfigError, DataError
from mega_common.object_store import RemotePath, parse_location
from mega_common.progress_logging import logger
from mega_data.data_config import DataConfig, DatasetSource
from mega_data.preprocessing.token_cache import open_token_stream, resolve_source_prefix
from mega_data.preprocessing.token_stream import TokenStream
from mega_data.raw_data_config import LABELED_KINDS, RECORD_KINDS
from mega_data.sampling.document_order import find_token_range
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.indexed_reader import (
    IndexedReader,
    OpenReaderPool,
    get_idx_path,
    raise_open_files_limit,
    strip_data_suffix,
)
from mega_data.token_files.loss_mask import read_dataset_kind
from mega_data.token_files.remote_copies import restore_url_slashes

SPLITS = ("train", "valid", "test")
CHECKED_DOCUMENTS = 64  # documents of a data set whose end token is checked
MAX_OPEN_DATASETS = 1000
EAGER_CHECK_BYTES = 1 << 28  # of all indices; if there are more, each is checked when it is first read
# Splits of these kinds are cut between documents, not sequences.
MULTI_SEQUENCE_KINDS = ("bert", "t5", "pairs", *LABELED_KINDS, "retro")
SplitBounds = tuple[float, float]
ReaderKey = tuple[Path, str]  # path in the configuration, and what else the tokens of raw data depend on


@dataclass(frozen=True)
class DatasetPart:
    """Share of a data set that belongs to one split (train, valid or test).
    It is the sequences [first, last), with the weight in the blend and the dataset kind.

    Attributes:
        source: its entry in the configuration.
        share: factor of its weights: for its size, or its share of the tokens that a glob matches.
        path: path in the configuration; None if it is the path of the reader.
        stream: blocks of streamed raw data, of which `reader` has the first; None for token files.
    """

    reader: IndexedReader
    first: int
    last: int
    weight: float | None
    kind: str
    source: DatasetSource | None = None
    share: float = 1.0
    path: Path | None = None
    stream: TokenStream | None = None

    @property
    def name(self) -> str:
        """Path of the data set as named in the configuration, else the prefix of its files."""
        return str(self.path or self.reader.prefix)

    @property
    def weights_by_tokens(self) -> dict[int, float]:
        """Weight of the data set in the blend from each number of training tokens on, beginning with 0."""
        weights = {0: self.weight or 1.0} if self.source is None else self.source.weights_by_tokens
        return {tokens: weight * self.share for tokens, weight in weights.items()}

    def get_sample_limit(self, samples_per_epoch: Callable[[], float]) -> int | None:
        """Return the maximum number of samples that a run may read of this data set, or None for no limit.
        It is `max_epochs` times the samples per epoch.
        """
        epochs = None if self.source is None else self.source.max_epochs
        return None if epochs is None else max(1, int(epochs * samples_per_epoch()))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in this share of a data set, sequences [first, last)."""
        begin, end = find_token_range(self.reader, self.first, self.last)
        return end - begin


class DatasetPartitioner:
    """Partitioner of the data sets of one configuration into train, valid and test; opens each file once.

    `eod` is the end-of-document token.

    Raises:
        ConfigError: if a document rule is enabled and `eod` is None.
    """

    def __init__(self, config: DataConfig, eod: int | None) -> None:
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        self._rules = [f"data.{flag}" for flag in flags if getattr(config, flag)]
        if self._rules and eod is None:
            raise ConfigError(
                f"{', '.join(self._rules)}: requires a tokenizer with an end-of-document token",
                hint="set it to false, or set data.tokenizer to a tokenizer with an eos_token",
            )
        self._config, self._eod = config, eod
        self._bounds = dict(zip(SPLITS, compute_split_bounds(config.split_shares), strict=True))
        self._readers: dict[ReaderKey, IndexedReader] = {}
        self._files = OpenReaderPool(raise_open_files_limit(2 * MAX_OPEN_DATASETS) // 2)

    def build_split_parts(self, name: str) -> list[DatasetPart]:
        """Return the share of each data set that belongs to the split `name`; an empty list if that is configured as zero.

        Raises:
            DataError: naming every data set that cannot be used; or if no data set has a sequence in this split.
        """
        configured: list[DatasetSource] | None = getattr(self._config, name)
        bounds = (0.0, 1.0) if name != "train" and configured is not None else self._bounds[name]
        if bounds is None:
            return []
        sources = [(source, find_matching_prefixes(source)) for source in configured or self._config.train]
        self._open_readers([(source, path) for source, paths in sources for path in paths])
        parts = [
            part
            for source, paths in sources
            for part in self._apply_weight_shares(list(self._cut_parts(name, source, paths, bounds)))
        ]
        if not parts:
            raise DataError(
                f"data.split = {self._config.split} leaves no sequence for {name}",
                hint=f"give {name} a larger share, or set data.{name}",
            )
        return parts

    def _apply_weight_shares(self, parts: list[DatasetPart]) -> list[DatasetPart]:
        """Return the parts of one source with their shares of its weight."""
        temperature = self._config.temperature
        if temperature is None and not (parts and parts[0].source and parts[0].source.is_glob):
            return parts
        tokens = [part.num_tokens for part in parts]
        size = 1.0 if temperature is None else sum(tokens) ** (1 / temperature)
        return [
            replace(part, share=size * count / sum(tokens)) if len(parts) > 1 else replace(part, share=size)
            for part, count in zip(parts, tokens, strict=True)
        ]

    def _get_kind(self, source: DatasetSource) -> str:
        return source.kind or self._config.kind

    def _get_reader_key(self, source: DatasetSource, path: Path) -> ReaderKey:
        streamed = self._config.is_streamed(source)
        return path, f"{self._get_kind(source)} {source.map} {streamed}" if source.is_raw else ""

    def _open_readers(self, sources: Sequence[tuple[DatasetSource, Path]]) -> None:
        """Open and check data sets; those of kind `retro` need no end-of-document tokens."""
        new = {key: each for each in sources if (key := self._get_reader_key(*each)) not in self._readers}
        without_rules = {path for source, path in sources if self._get_kind(source) == "retro"}
        errors = []
        for key, (source, path) in new.items():
            try:
                prefix = resolve_source_prefix(source, path, self._config)
                self._readers[key] = IndexedReader(prefix, self._files)
            except DataError as error:
                errors.append(error)
        opened = [self._readers[key] for key in new if key in self._readers]
        check_now = sum(reader.index_bytes for reader in opened) <= EAGER_CHECK_BYTES
        if not check_now:
            logger.info("%d data sets: each index is checked when it is first read", len(opened))
        for key, (_, path) in new.items():
            if (reader := self._readers.get(key)) is None:
                continue
            try:
                if check_now:
                    reader.check_index()
                check_end_of_document_tokens(reader, self._eod, [] if path in without_rules else self._rules)
            except DataError as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise DataError(f"{len(errors)} data sets cannot be used:\n" + "\n".join(str(error) for error in errors))

    def _cut_parts(
        self, name: str, source: DatasetSource, paths: Sequence[Path], bounds: SplitBounds
    ) -> Iterator[DatasetPart]:
        for path in paths:
            reader, kind = self._readers[self._get_reader_key(source, path)], self._get_kind(source)
            validate_dataset_kind(reader, kind)
            if self._config.is_streamed(source):
                stream = open_token_stream(source, self._config)
                yield DatasetPart(reader, 0, len(reader), source.weight, kind, source, path=path, stream=stream)
                continue
            first, last = (_find_split_sequence(bound, reader, kind) for bound in bounds)
            if reader.find_token_position(first) < reader.find_token_position(last):
                yield DatasetPart(reader, first, last, source.weight, kind, source, path=path)
            elif name == "train":
                raise DataError(
                    f"{path}: has no training tokens (sequences {first} to {last} of {len(reader)} are for training)",
                    hint="give training a larger share of data.split, or remove the data set from data.train",
                )
            else:
                logger.warning("%s: data.split gives none of its %d sequences to %s; skipped", path, len(reader), name)


def find_matching_prefixes(source: DatasetSource) -> list[Path]:
    """Return the sorted prefixes of the data sets that a configured source names, by path or by glob; of raw data its name.

    Raises:
        DataError: if no data set matches the glob.
    """
    if source.is_raw:
        return [Path(source.input_name)]
    if not source.is_glob or get_idx_path(source.path).exists():
        return [strip_data_suffix(source.path)]
    pattern = parse_location(restore_url_slashes(strip_data_suffix(source.path)) + ".idx")
    names = (
        pattern.glob_object_versions()
        if isinstance(pattern, RemotePath)
        else sorted(glob(str(pattern), recursive=True))
    )
    prefixes = [Path(name).with_suffix("") for name in names if not name.endswith(".mask.idx")]
    if not prefixes:
        raise DataError(f"{source.path}: no data set matches", hint="write the glob without .bin and .idx")
    return prefixes


def _find_split_sequence(bound: float, reader: IndexedReader, kind: str) -> int:
    """Return the sequence at which a share `bound` of a data set ends.

    Rounds half to even, and the same product as Megatron.
    """
    if kind in MULTI_SEQUENCE_KINDS:
        return int(reader.document_index[round(bound * float(reader.document_index.size - 1))])
    return round(bound * float(len(reader)))


def validate_dataset_kind(reader: IndexedReader, kind: str) -> None:
    """Raise DataError if a data set has another kind of records than `kind`, the configured one.

    Conversations as text, for example, would count their questions in the loss.
    """
    actual, expected = read_dataset_kind(reader), kind if kind in RECORD_KINDS else "text"
    if expected != actual:
        raise DataError(
            f"{reader.prefix}: has {actual}, which conflicts with data.kind = {kind}",
            hint=f"make a data set of {expected} with mega data preprocess{'' if expected == 'text' else f' --kind {expected}'},"
            f" or set data.kind={actual} (of this data set alone: kind: {actual} next to its path in data.train)",
        )


def compute_split_bounds(shares: Sequence[float]) -> list[SplitBounds | None]:
    """Return the interval of [0, 1] that each split takes, None for a share of zero.
    Intervals follow from normalized `shares` as in Megatron.
    """
    values = np.array(shares, np.float64)
    edges = [0.0]
    for share in (values / values.sum()).tolist():
        edges.append(edges[-1] + share)
    return [(low, high) if low < high else None for low, high in pairwise(edges)]


def check_end_of_document_tokens(reader: IndexedReader, eod: int | None, rules: Sequence[str]) -> None:
    """Raise DataError if `rules` need end-of-document tokens and no checked document has one; warn if some lack it.

    `rules` are names of configuration flags. Checks a sample of the documents, or only the data set's description if it
    has `append_eod`. A document that begins with the token `eod` counts as separated.
    """
    documents = reader.documents
    if not rules or not documents:
        return
    info = read_dataset_info(reader.prefix)
    if info is not None and info.append_eod and info.tokenizer is not None and info.tokenizer.eos_id == eod:
        return
    checked = np.unique(np.linspace(0, documents - 1, CHECKED_DOCUMENTS).astype(np.int64))
    without = sum(not _is_separated(reader, int(document), eod) for document in checked)
    if without == checked.size and rules != ["data.eod_mask_loss"]:
        raise DataError(
            f"{reader.prefix}: {', '.join(rules)} requires documents that end with the end-of-document token {eod},"
            " and these do not",
            hint="preprocess the data again with --append-eod, or set these options to false",
        )
    if without:
        logger.warning(
            "%s: %d of %d checked documents do not end with the end-of-document token %s, which %s requires",
            reader.prefix, without, checked.size, eod, ", ".join(rules),
        )  # fmt: skip


def _is_separated(reader: IndexedReader, document: int, eod: int | None) -> bool:
    first, last = (int(bound) for bound in reader.document_index[document : document + 2])
    begin, end = reader.find_token_position(first), reader.find_token_position(last)
    if begin == end:
        return True
    return eod in (int(reader.tokens[begin]), int(reader.tokens[end - 1]))
