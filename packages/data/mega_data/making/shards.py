"""One data set made in parts, by jobs that know nothing of each other: `--shard 3/8` reads the third eighth of all bytes.

Each part is a data set of its own, `wiki.shard-00003-of-00008`. Whoever makes the last one joins them, in the order of the
inputs, so that the whole is what one run would have made, byte by byte. A killed part goes on where it was; one that
failed says why in a `.failed` file beside the others. The same command given again makes what is missing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mega_common.errors import ConfigError, DataError, MegaError
from mega_common.files import write_json
from mega_data.files.indexed import IndexedReader, idx_path
from mega_data.files.indexed_writer import IndexedWriter
from mega_data.files.info import DataInfo, data_files, quarantine_path, read_info
from mega_data.files.merge import append_all
from mega_data.making.commit import settle
from mega_data.making.partial import refusals
from mega_data.reading.sources import Kind, Source, kind_by_content
from mega_data.reading.unpack import head, is_plain, opened


@dataclass(frozen=True)
class Shard:
    """Part `number` (from 1) of `of`."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`3/8`.

        Raises:
            ConfigError: when it is not of this form, or not one of that many.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"--shard {text}: not a part of a whole", hint="the parts of eight are 1/8 to 8/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def prefix(self, whole: Path) -> Path:
        """`PREFIX.shard-00003-of-00008`."""
        return whole.with_name(f"{whole.name}.shard-{self.number:05}-of-{self.of:05}")

    @property
    def all(self) -> list[Shard]:
        """It and the others, in order."""
        return [Shard(number, self.of) for number in range(1, self.of + 1)]


def cut(sources: Sequence[Source], shard: Shard, key: str) -> list[Source]:
    """The sources, and ranges of sources, of one shard: what begins in its share of the bytes of all.

    JSON lines that are not packed are cut at lines and Parquet between row groups, anything else not at all.
    """
    total = sum(_size(source) for source in sources)
    low, high = (total * number // shard.of for number in (shard.number - 1, shard.number))
    found: list[Source] = []
    for source in sources:
        found += _within(source, low, high, key)
        low, high = low - _size(source), high - _size(source)
    return found


def _size(source: Source) -> int:
    return max(source.size, 1)  # each has a place, also an empty file and one of unknown size


def _within(source: Source, low: int, high: int, key: str) -> list[Source]:
    """What of a source belongs to the range of bytes, counted from its begin."""
    if high <= 0 or low >= _size(source):
        return []
    if low > 0 or high < _size(source):
        with opened(source.name, lambda _: None) as stream:
            if kind := _divisible(source, stream, key):
                begin = max(low, 0) if kind == "parquet" else _line_begin(stream, max(low, 0))
                return [replace(source, kind=kind, begin=begin, end=high if high < _size(source) else None)]
    return [source] if low <= 0 else []


def _divisible(source: Source, stream: io.BufferedReader, key: str) -> Kind | None:
    """As what a source can be read from its middle on; None if it cannot."""
    if source.kind not in (None, "jsonl", "parquet") or not source.again or not is_plain(stream):
        return None
    kind = source.kind or kind_by_content(head(stream), key, Path(source.name))
    return kind if kind in ("jsonl", "parquet") else None


def _line_begin(stream: io.BufferedReader, at: int) -> int:
    """The first byte from `at` on that a line begins with."""
    if at:
        stream.seek(at - 1)
        at += len(stream.readline()) - 1
    return at


@contextlib.contextmanager
def failure_noted(prefix: Path) -> Iterator[None]:
    """While a part is made: what it fails with stands in `PREFIX.failed` until it is made."""
    try:
        yield
    except MegaError as error:
        with refusals(prefix):
            write_json(_failed(prefix), {"reason": str(error)})
        raise
    _failed(prefix).unlink(missing_ok=True)


def _failed(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".failed")


def finished(prefix: Path, made_from: str) -> DataInfo | None:
    """The description of a part that is made, from these very inputs and settings; None while it is not."""
    info = read_info(prefix) if settle(prefix) or idx_path(prefix).exists() else None
    return info if info and info.shard and info.shard.made_from == made_from else None


def join(whole: Path, sources: Sequence[Source], shard: Shard, key: str, made_from: str) -> DataInfo | None:
    """Make the whole of all parts and remove them; None while one is missing.

    Raises:
        DataError: when a part is damaged, or there is not one document.
    """
    prefixes = [part.prefix(whole) for part in shard.all]
    if not all(finished(prefix, made_from) for prefix in reversed(prefixes)):  # most are made in order
        return None
    infos = [info for prefix in prefixes if (info := read_info(prefix))]
    if not sum(info.documents for info in infos):
        raise DataError(f"{sources[0].name}: not one document with text in {len(sources)} file(s)")
    with IndexedWriter(whole, infos[0].dtype, wait=True, masked=infos[0].chat is not None) as writer:
        if not all(idx_path(prefix).exists() for prefix in prefixes):  # joined by another, which was waited for
            writer.abort()
            return read_info(whole)
        _join_bad_lines(writer, infos, [cut(sources, part, key) for part in shard.all], prefixes)
        obsolete = [path for prefix in prefixes for path in (*data_files(prefix), _failed(prefix))]
        size = sum(info.tokens for info in infos) * writer.dtype.itemsize
        readers = map(IndexedReader, prefixes)
        first = infos[0]
        return append_all(
            writer, readers, size, infos, first.tokenizer, first.append_eod, made_from, obsolete, chat=first.chat
        )


def _join_bad_lines(
    writer: IndexedWriter, infos: Sequence[DataInfo], read: Sequence[Sequence[Source]], prefixes: Sequence[Path]
) -> None:
    """Bad lines in order, and numbered as in the files: those of a range of a file were counted from its begin."""
    if not any(info.skipped.bad for info in infos):
        return
    before = 0  # lines of the file that goes on from part to part
    with refusals(writer.prefix), open(writer.folder / "quarantine.jsonl", "wb") as joined:
        for prefix, info, sources in zip(prefixes, infos, read, strict=True):
            for record in _bad_lines(prefix):
                if sources[0].begin and record["file"] == sources[0].shown:
                    record |= {"file": sources[0].name, "line": record["line"] + before}
                joined.write(json.dumps(record).encode() + b"\n")
            if sources and info.shard:
                inherited = before if len(sources) == 1 and sources[0].begin else 0
                before = inherited + info.shard.lines if sources[-1].end is not None else 0
        joined.flush()
        os.fsync(joined.fileno())


def _bad_lines(prefix: Path) -> Iterator[dict[str, Any]]:
    if quarantine_path(prefix).exists():
        with open(quarantine_path(prefix), "rb") as stream:
            yield from map(json.loads, stream)
