"""Which part of which data set a split of a run has, and whether it is what the run's rules need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob
from itertools import pairwise
from pathlib import Path

import numpy as np

from mega_common.errors import ConfigError, DataError
from mega_common.log import logger
from mega_common.remote import Remote, place
from mega_data.config import DataConfig, Source
from mega_data.files.fetch import as_given, local_prefix
from mega_data.files.indexed import IndexedReader, OpenFiles, data_prefix, idx_path
from mega_data.files.info import read_info
from mega_data.files.limits import allow_open_files
from mega_data.files.mask import kind_of
from mega_data.order.document_order import token_range

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
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Part:
    """The sequences [first, last) of a data set, its weight in the blend, and what kind of data it is.

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
    source: Source | None = None
    share: float = 1.0
    path: Path | None = None

    @property
    def name(self) -> str:
        """What a run calls it."""
        return str(self.path or self.reader.prefix)

    @property
    def weights(self) -> dict[int, float]:
        """Its weight in the blend from each number of training tokens on, 0 among them."""
        told = {0: self.weight or 1.0} if self.source is None else self.source.weights
        return {tokens: weight * self.share for tokens, weight in told.items()}

    def limit(self, samples_per_epoch: Callable[[], float]) -> int | None:
        """Samples that a run may read of it, of which so many come to one pass."""
        most = None if self.source is None else self.source.max_epochs
        return None if most is None else max(1, int(most * samples_per_epoch()))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        begin, end = token_range(self.reader, self.first, self.last)
        return end - begin


class Parts:
    """Cuts the data sets of one configuration, each file opened once. `eod` is the token that ends a document.

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
        self._bounds = dict(zip(SPLITS, split_bounds(config.shares), strict=True))
        self._readers: dict[Path, IndexedReader] = {}
        self._files = OpenFiles(allow_open_files(2 * MOST) // 2)

    def of(self, name: str) -> list[Part]:
        """The parts of split `name`; none when `split` gives it nothing.

        Raises:
            DataError: with every data set that cannot be used; when nothing of them is for this split.
        """
        own: list[Source] | None = getattr(self._config, name)
        bounds = (0.0, 1.0) if name != "train" and own is not None else self._bounds[name]
        if bounds is None:
            return []
        sources = [(source, matching(source)) for source in own or self._config.train]
        told_apart = {path for source, paths in sources if self._kind(source) == "retro" for path in paths}
        self._open([path for _, paths in sources for path in paths], told_apart)
        parts = [
            part for source, paths in sources for part in self._shared(list(self._cut(name, source, paths, bounds)))
        ]
        if not parts:
            raise DataError(
                f"data.split = {self._config.split} leaves no sequence for {name}",
                hint=f"give {name} a larger share or data sets of its own (data.{name}), or do not ask for it",
            )
        return parts

    def _shared(self, parts: list[Part]) -> list[Part]:
        """The parts of one source, with their shares of its weight."""
        temperature = self._config.temperature
        if temperature is None and not (parts and parts[0].source and parts[0].source.is_glob):
            return parts
        tokens = [part.tokens for part in parts]
        size = 1.0 if temperature is None else sum(tokens) ** (1 / temperature)
        return [
            replace(part, share=size * own / sum(tokens)) if len(parts) > 1 else replace(part, share=size)
            for part, own in zip(parts, tokens, strict=True)
        ]

    def _kind(self, source: Source) -> str:
        return source.kind or self._config.kind

    def _open(self, paths: Sequence[Path], told_apart: Collection[Path]) -> None:
        """Of the data sets `told_apart` documents are known without a token."""
        new = dict.fromkeys(path for path in paths if path not in self._readers)
        wrong = []
        for path in new:
            try:
                self._readers[path] = IndexedReader(local_prefix(path, self._config.cache), self._files)
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
                    reader.check()
                check_ends(reader, self._eod, [] if path in told_apart else self._rules)
            except DataError as error:
                wrong.append(error)
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            raise DataError(f"{len(wrong)} data sets cannot be used:\n" + "\n".join(str(error) for error in wrong))

    def _cut(self, name: str, source: Source, paths: Sequence[Path], bounds: Bounds) -> Iterator[Part]:
        for path in paths:
            reader, kind = self._readers[path], self._kind(source)
            check_kind(reader, kind)
            first, last = (_sequence_at(bound, reader, kind) for bound in bounds)
            if reader.position(first) < reader.position(last):
                yield Part(reader, first, last, source.weight, kind, source, path=path)
            elif name == "train":
                raise DataError(f"{path}: no tokens to train on (sequences {first} to {last} of {len(reader)})")
            else:
                logger.warning("%s: none of its %d sequences is for %s; left out", path, len(reader), name)


def matching(source: Source) -> list[Path]:
    """The prefixes of the data sets that a source stands for, sorted.

    Raises:
        DataError: when it is a glob that nothing matches.
    """
    if not source.is_glob or idx_path(source.path).exists():
        return [data_prefix(source.path)]
    pattern = place(as_given(data_prefix(source.path)) + ".idx")
    names = pattern.matches() if isinstance(pattern, Remote) else sorted(glob(str(pattern), recursive=True))
    found = [Path(name).with_suffix("") for name in names if not name.endswith(".mask.idx")]
    if not found:
        raise DataError(f"{source.path}: no data set matches", hint="it is to match the names without .bin and .idx")
    return found


def _sequence_at(bound: float, reader: IndexedReader, kind: str) -> int:
    """The sequence that a share `bound` of a data set ends before.

    Python's rounding, half to even, of the very product that Megatron rounds.
    """
    if kind in OF_SEVERAL:
        return int(reader.document_index[round(bound * float(reader.document_index.size - 1))])
    return round(bound * float(len(reader)))


def check_kind(reader: IndexedReader, kind: str) -> None:
    """Refuse conversations as text, which would count their questions in the loss, and text as conversations.

    Raises:
        DataError: as said.
    """
    made, ours = kind_of(reader), kind if kind in ("conversations", "pairs") else "text"
    if ours != made:
        raise DataError(
            f"{reader.prefix}: holds {made}, and its kind in this run is {kind}",
            hint=f"set data.kind: {made}, or kind: {made} beside its path",
        )


def split_bounds(shares: Sequence[float]) -> list[Bounds | None]:
    """Megatron's cut of [0, 1] by `shares`; None where a share is nothing."""
    values = np.array(shares, np.float64)
    edges = [0.0]
    for share in (values / values.sum()).tolist():
        edges.append(edges[-1] + share)
    return [(low, high) if low < high else None for low, high in pairwise(edges)]


def check_ends(reader: IndexedReader, eod: int | None, rules: Sequence[str]) -> None:
    """Look whether documents are told apart by the token `eod`, where `rules` depend on that.

    Some documents are looked at, not all, and none where the data set's description tells. One that begins with the token
    is told apart as well.

    Raises:
        DataError: when none is, and a boundary was asked for.
    """
    documents = reader.documents
    if not rules or not documents:
        return
    info = read_info(reader.prefix)
    if info is not None and info.append_eod and info.tokenizer is not None and info.tokenizer.eos_id == eod:
        return
    looked_at = np.unique(np.linspace(0, documents - 1, LOOKED_AT).astype(np.int64))
    without = sum(not _told_apart(reader, int(document), eod) for document in looked_at)
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


def _told_apart(reader: IndexedReader, document: int, eod: int | None) -> bool:
    first, last = (int(bound) for bound in reader.document_index[document : document + 2])
    begin, end = reader.position(first), reader.position(last)
    if begin == end:
        return True
    return eod in (int(reader.tokens[begin]), int(reader.tokens[end - 1]))
