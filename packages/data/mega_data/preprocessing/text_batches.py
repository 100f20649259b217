"""Batches of documents for one encoding call, each with the input position that it reaches."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, format_with_decimal_unit, logger
from mega_data.preprocessing.text_encoder import EncoderChoice
from mega_data.reading.corpus_sources import CorpusSource, FileFormat, SkippedFiles, log_file_formats
from mega_data.reading.documents import Document, RejectedItem
from mega_data.reading.source_readers import read_documents
from mega_data.tokenizer import LEADS, Tokenizer

BATCH = 1 << 18  # bytes of text: 40 ms of work, so that threads stay busy and little waits
PIECE = 1 << 18  # characters of a longer document that are encoded at once

SourcePosition = tuple[int, int]  # index of a source, and number of its items that are done


@dataclass
class TextBatch:
    """Documents to encode in one call, or one segment of a long document.
    The field `has_more` is set if more segments of that document follow.

    Attributes:
        rejected: bad lines and skipped files before or between the documents.
        positions: input position after each document; empty for a segment of a long document.
        size: bytes of text to encode.
        ends: number of documents whose text spells the end token.
        cut: number of answers truncated by the length limit; set when the batch is encoded.
        notes: number of conversations by note to report; set when the batch is encoded.
        end_position: input position after this batch.
        read: bytes of all inputs that were read up to the end of this batch.
        lead: number of leading tokens that belong to the previous piece (`Tokenizer.split_long_text`).
    """

    documents: list[Document] = field(default_factory=list)
    rejected: list[RejectedItem] = field(default_factory=list)
    positions: list[SourcePosition] = field(default_factory=list)
    size: int = 0
    ends: int = 0
    cut: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    end_position: SourcePosition = (0, 0)
    read: float = 0
    has_more: bool = False
    lead: int = 0


@dataclass
class PreprocessProgress:
    """Progress of a preprocessing run and the resulting counts.
    `items` items of source number `source` are done, after all earlier sources.

    `made_from` is a digest of inputs and settings; `quarantined` counts bytes, and `encoder` is the chosen one, or
    `tokenizers` after a mismatch.
    """

    made_from: str
    source: int = 0
    items: int = 0
    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    left_out: int = 0
    ends: int = 0
    cut: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    quarantined: int = 0
    encoder: EncoderChoice = "auto"


class ResumableReader:
    """Reader of the documents of all corpus sources in order, starting where an interrupted run stopped.
    It shows a progress bar in bytes.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        json_key: str,
        skipped_files: SkippedFiles,
        done: PreprocessProgress,
        bar: ProgressBar,
        *,
        whole: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.sources, self.json_key, self.skipped_files, self.bar = sources, json_key, skipped_files, bar
        self.whole, self.folder = whole, folder
        self.start = done.source, done.items
        self.kinds: Counter[FileFormat] = Counter()
        self.lines = 0  # number of lines of the last source that was read to its end
        self.read = float(sum(source.num_bytes for source in sources[: done.source]))
        self._shown = 0.0

    def read_items(self) -> Iterator[tuple[SourcePosition, Document | RejectedItem]]:
        """Yield each document or rejected item after the resume point, with the input position after it.
        A position is (source number, item count).
        """
        for number, source in enumerate(self.sources[self.start[0] :], self.start[0]):
            for count, item in enumerate(self._read_source(source), 1):
                if isinstance(item, RejectedItem) and item.skipped:
                    self.skipped_files.add_files(item.reason, [item.file])
                if (number, count) > self.start:
                    yield (number, count), item
                else:
                    self.advance_progress(self.read)

    def advance_progress(self, upto: float) -> None:
        """Advance the progress bar to `upto` bytes processed in all."""
        self.bar.advance(upto - self._shown)
        self._shown = upto

    def log_summary(self) -> None:
        """Log the number of files read per format, and the files that were skipped by reason."""
        log_file_formats(self.kinds)
        self.skipped_files.log_reasons()

    def _read_source(self, source: CorpusSource) -> Iterator[Document | RejectedItem]:
        end = self.read + source.num_bytes if source.size else math.inf

        def advance(count: int) -> None:  # blocks may extend beyond the range of a shard
            self.read = min(self.read + count, end)

        callbacks = advance, self._record_format, self._record_lines
        return read_documents(source, self.json_key, *callbacks, whole=self.whole, folder=self.folder)

    def _record_lines(self, count: int) -> None:
        self.lines = count

    def _record_format(self, kind: FileFormat) -> None:
        self.kinds[kind] += 1


PrepareDocument = Callable[[Document | RejectedItem], Document | RejectedItem]


def build_text_batches(
    reading: ResumableReader,
    tokenizer: Tokenizer,
    *,
    refuse: Path | None,
    end: str | None,
    prepare: PrepareDocument | None = None,
    leads: Sequence[str] = LEADS,
) -> Iterator[TextBatch]:
    """Yield the documents of `reading` in batches of about 256 KiB (`BATCH`), and a long one in segments, each a batch.

    Args:
        refuse: None to accept bad lines; else they end the run, and this path of the quarantine file is part of the
            hint.
        end: end token; documents whose text contains it are counted.
        prepare: conversion of a read item before it is encoded.
        leads: see `Tokenizer.split_long_text`.

    Raises:
        DataError: at a bad line if `refuse` is set, and where the readers raise it.
    """
    batch, before = TextBatch(), reading.read
    for position, read_item in reading.read_items():
        item = prepare(read_item) if prepare else read_item
        size = item.size if isinstance(item, Document) else len(item.content)
        long = isinstance(item, Document) and (item.long is not None or len(item.text) > PIECE)
        ends = isinstance(item, Document) and end is not None and end in (item.long or item.text)
        if (batch.documents or batch.rejected) and (long or batch.size + size > BATCH):
            yield batch
            batch = TextBatch()
        if isinstance(item, RejectedItem):
            _check_rejected(item, refuse)
            batch.rejected.append(item)
        elif long:
            for batch in _split_into_batches(item, tokenizer, leads, before, reading.read):
                if batch.has_more:
                    yield batch
        else:
            batch.documents.append(item)
            batch.positions.append(position)
        batch.size += 0 if long else size
        batch.ends += ends
        batch.end_position, batch.read = position, reading.read
        before = reading.read
    if batch.documents or batch.rejected:
        yield batch


def _suggest_for_bad_line(item: RejectedItem, quarantine: Path) -> str:
    """Return the hint of the error for a bad line; a bad first line may mean that the whole file has another format."""
    skip = f"pass --on-bad-line skip to move bad lines to {quarantine}"
    if item.line != 1:
        return skip
    if item.file.endswith(".bin") and Path(item.file).with_suffix(".idx").is_file():
        return f"the file has tokens already; use the data set by its prefix {Path(item.file).with_suffix('')}"
    if item.reason.endswith("not a string"):
        return f"--json-key KEY selects another key; for single bad lines, {skip}"
    if item.reason.startswith("not JSON"):
        return f"if the file is plain text, rename it to end in .txt; for single bad lines, {skip}"
    if item.reason.startswith("not UTF-8"):
        return f"if the whole file is binary or in another encoding, leave it out or convert it to UTF-8; else {skip}"
    return skip


def _check_rejected(item: RejectedItem, refuse: Path | None) -> None:
    if refuse is not None and not item.skipped:
        raise DataError(
            f"{item.file}:{item.line}: {item.reason}",
            hint=item.hint or _suggest_for_bad_line(item, refuse),
        )


def _split_into_batches(
    document: Document, tokenizer: Tokenizer, leads: Sequence[str], before: float, read: float
) -> Iterator[TextBatch]:
    """Yield a long document in batches of its own; `before` and `read` are the bytes read without it and with it."""
    done, exact = 0, True
    with document.long or contextlib.nullcontext():
        blocks = document.long.read_blocks() if document.long else [document.text]
        for piece in tokenizer.split_long_text(blocks, PIECE, leads):
            if len(piece.text) > 8 * PIECE:
                logger.warning("%s: %s characters are encoded at once and take much memory; %s allows no cut in them",
                               document.location, format_with_decimal_unit(len(piece.text)), tokenizer.path)  # fmt: skip
            size = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
            done, exact = done + size, exact and piece.exact
            part = document._replace(text=piece.lead + piece.text, long=None, size=document.size if piece.last else 0)
            upto = read if piece.last else before + (read - before) * done / document.size
            yield TextBatch(
                [part], size=size, read=upto, has_more=not piece.last, lead=len(tokenizer.encode(piece.lead))
            )
    if not exact:
        logger.warning("%s: has no exact cut in over %s characters; tokens at the cuts may differ from those of the"
                       " whole document", document.location, format_with_decimal_unit(PIECE))  # fmt: skip
