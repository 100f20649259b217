"""Data set parts of each split of a run, validated against the run's document rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob
from itertools import pairwise
from pathlib import Path

import numpy as np

from mega_common.errors import ConfigError, DataError
from mega_common.object_store import RemotePath, parse_location
from mega_common.progress_logging import logger
from mega_data.data_config import DataConfig, DatasetSource
from mega_data.sampling.document_order import find_token_range
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.indexed_reader import (
    IndexedReader,
    OpenReaders,
    get_idx_path,
    raise_open_files_limit,
    strip_data_suffix,
)
from mega_data.token_files.loss_mask import read_dataset_kind
from mega_data.token_files.remote_copies import resolve_local_prefix, restore_url

SPLITS = ("train", "valid", "test")
LOOKED_AT = 64  # documents that are looked at for their end token, spread over a data set
MOST = 1000  # data sets whose files are open at a time
CHECKED = 1 << 28  # bytes of indices that are checked on opening; where there are more, each when it is first read
OF_SEVERAL = (
    "bert",
    "t5",
    "pairs",
    "retro",
)  # kinds whose documents may have several sequences: their data sets are cut between those
SplitBounds = tuple[float, float]


@dataclass(frozen=True)
class DatasetPart:
    """Sequences [first, last) of a data set, with the weight in the blend and the dataset kind.

    Attributes:
        source: what the configuration says of it.
        share: a factor of its weights: for its size, or its part of what a glob matches.
        path: of the data set, as the run names it; None: where it is read.
    """

    reader: IndexedReader
    first: int
    last: int
    weight: float | None
    kind: str
    source: DatasetSource | None = None
    share: float = 1.0
    path: Path | None = None

    @property
    def name(self) -> str:
        """Name of the data set in the run."""
        return str(self.path or self.reader.prefix)

    @property
    def weights_by_tokens(self) -> dict[int, float]:
        """Weight in the blend from each number of training tokens on, 0 included."""
        told = {0: self.weight or 1.0} if self.source is None else self.source.weights_by_tokens
        return {tokens: weight * self.share for tokens, weight in told.items()}

    def get_sample_limit(self, samples_per_epoch: Callable[[], float]) -> int | None:
        """Return the number of samples that a run may read of the part (`max_epochs`), or None for no limit."""
        most = None if self.source is None else self.source.max_epochs
        return None if most is None else max(1, int(most * samples_per_epoch()))

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        begin, end = find_token_range(self.reader, self.first, self.last)
        return end - begin


class DatasetPartitioner:
    """Partitioner of the data sets of one configuration into splits, with each file opened once. `eod` is the end-of-
    document token.

    Raises:
        ConfigError: when a rule about documents is on and `eod` is None.
    """

    def __init__(self, config: DataConfig, eod: int | None) -> None:
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        self._rules = [f"data.{flag}" for flag in flags if getattr(config, flag)]
        if self._rules and eod is None:
            raise ConfigError(
                f"{', '.join(self._rules)}: the tokenizer has no end-of-document token",
                hint="switch it off, or set data.tokenizer to one that names it",
            )
        self._config, self._eod = config, eod
        self._bounds = dict(zip(SPLITS, compute_split_bounds(config.split_shares), strict=True))
        self._readers: dict[Path, IndexedReader] = {}
        self._files = OpenReaders(raise_open_files_limit(2 * MOST) // 2)

    def build_split_parts(self, name: str) -> list[DatasetPart]:
        """Return the parts of split `name`; none if `split` gives it nothing.

        Raises:
            DataError: with every data set that cannot be used; when nothing of them is for this split.
        """
        own: list[DatasetSource] | None = getattr(self._config, name)
        bounds = (0.0, 1.0) if name != "train" and own is not None else self._bounds[name]
        if bounds is None:
            return []
        sources = [(source, find_matching_prefixes(source)) for source in own or self._config.train]
        told_apart = {path for source, paths in sources if self._get_kind(source) == "retro" for path in paths}
        self._open_readers([path for _, paths in sources for path in paths], told_apart)
        parts = [
            part
            for source, paths in sources
            for part in self._apply_weight_shares(list(self._cut_parts(name, source, paths, bounds)))
        ]
        if not parts:
            raise DataError(
                f"data.split = {self._config.split} leaves no sequence for {name}",
                hint=f"give {name} a larger share or data sets of its own (data.{name}), or do not ask for it",
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
            replace(part, share=size * own / sum(tokens)) if len(parts) > 1 else replace(part, share=size)
            for part, own in zip(parts, tokens, strict=True)
        ]

    def _get_kind(self, source: DatasetSource) -> str:
        return source.kind or self._config.kind

    def _open_readers(self, paths: Sequence[Path], with_known_bounds: Collection[Path]) -> None:
        """Open and check data sets; those in `told_apart` need no end-of-document tokens."""
        new = dict.fromkeys(path for path in paths if path not in self._readers)
        wrong = []
        for path in new:
            try:
                self._readers[path] = IndexedReader(resolve_local_prefix(path, self._config.cache), self._files)
            except DataError as error:
                wrong.append(error)
        opened = [self._readers[path] for path in new if path in self._readers]
        at_once = sum(reader.index_bytes for reader in opened) <= CHECKED
        if not at_once:
            logger.info("%d data sets: the index of each is checked when it is first read", len(opened))
        for path in new:
            if (reader := self._readers.get(path)) is None:
                continue
            try:
                if at_once:
                    reader.check_index()
                check_document_ends(reader, self._eod, [] if path in with_known_bounds else self._rules)
            except DataError as error:
                wrong.append(error)
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            raise DataError(f"{len(wrong)} data sets cannot be used:\n" + "\n".join(str(error) for error in wrong))

    def _cut_parts(
        self, name: str, source: DatasetSource, paths: Sequence[Path], bounds: SplitBounds
    ) -> Iterator[DatasetPart]:
        for path in paths:
            reader, kind = self._readers[path], self._get_kind(source)
            validate_dataset_kind(reader, kind)
            first, last = (_find_split_sequence(bound, reader, kind) for bound in bounds)
            if reader.find_token_position(first) < reader.find_token_position(last):
                yield DatasetPart(reader, first, last, source.weight, kind, source, path=path)
            elif name == "train":
                raise DataError(f"{path}: no tokens to train on (sequences {first} to {last} of {len(reader)})")
            else:
                logger.warning("%s: none of its %d sequences is for %s; left out", path, len(reader), name)


def find_matching_prefixes(source: DatasetSource) -> list[Path]:
    """Return the sorted prefixes of the data sets that a source stands for.

    Raises:
        DataError: when it is a glob that nothing matches.
    """
    if not source.is_glob or get_idx_path(source.path).exists():
        return [strip_data_suffix(source.path)]
    pattern = parse_location(restore_url(strip_data_suffix(source.path)) + ".idx")
    names = pattern.match_objects() if isinstance(pattern, RemotePath) else sorted(glob(str(pattern), recursive=True))
    found = [Path(name).with_suffix("") for name in names if not name.endswith(".mask.idx")]
    if not found:
        raise DataError(f"{source.path}: no data set matches", hint="it is to match the names without .bin and .idx")
    return found


def _find_split_sequence(bound: float, reader: IndexedReader, kind: str) -> int:
    """Return the sequence at which a share `bound` of a data set ends.

    Python's rounding, half to even, of the very product that Megatron rounds.
    """
    if kind in OF_SEVERAL:
        return int(reader.document_index[round(bound * float(reader.document_index.size - 1))])
    return round(bound * float(len(reader)))


def validate_dataset_kind(reader: IndexedReader, kind: str) -> None:
    """Reject conversations used as text, which would count their questions in the loss, and text used as conversations.

    Raises:
        DataError: as said.
    """
    made, ours = read_dataset_kind(reader), kind if kind in ("conversations", "pairs") else "text"
    if ours != made:
        raise DataError(
            f"{reader.prefix}: holds {made}, and its kind in this run is {kind}",
            hint=f"set data.kind: {made}, or kind: {made} beside its path",
        )


def compute_split_bounds(shares: Sequence[float]) -> list[SplitBounds | None]:
    """Return Megatron's cut of [0, 1] by `shares`; None for a share of zero."""
    values = np.array(shares, np.float64)
    edges = [0.0]
    for share in (values / values.sum()).tolist():
        edges.append(edges[-1] + share)
    return [(low, high) if low < high else None for low, high in pairwise(edges)]


def check_document_ends(reader: IndexedReader, eod: int | None, rules: Sequence[str]) -> None:
    """Check that documents are separated by the token `eod`, if `rules` depend on that.

    Some documents are looked at, not all, and none where the data set's description tells. One that begins with the token
    is told apart as well.

    Raises:
        DataError: when none is, and a boundary was asked for.
    """
    documents = reader.documents
    if not rules or not documents:
        return
    info = read_dataset_info(reader.prefix)
    if info is not None and info.append_eod and info.tokenizer is not None and info.tokenizer.eos_id == eod:
        return
    looked_at = np.unique(np.linspace(0, documents - 1, LOOKED_AT).astype(np.int64))
    without = sum(not _is_separated(reader, int(document), eod) for document in looked_at)
    if without == looked_at.size and rules != ["data.eod_mask_loss"]:
        raise DataError(
            f"{reader.prefix}: its documents do not end with the end-of-document token {eod}, so that"
            f" {', '.join(rules)} would find no boundary",
            hint="make the data set anew with --append-eod, or set these to false",
        )
    if without:
        logger.warning(
            "%s: %d of %d documents looked at do not end with the end-of-document token %s: %s see no boundary there",
            reader.prefix, without, looked_at.size, eod, ", ".join(rules),
        )  # fmt: skip


def _is_separated(reader: IndexedReader, document: int, eod: int | None) -> bool:
    first, last = (int(bound) for bound in reader.document_index[document : document + 2])
    begin, end = reader.find_token_position(first), reader.find_token_position(last)
    if begin == end:
        return True
    return eod in (int(reader.tokens[begin]), int(reader.tokens[end - 1]))
