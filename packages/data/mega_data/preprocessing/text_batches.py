"""Batches of documents for one encoding call, each with the input position that it reaches."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, format_number, logger
from mega_data.preprocessing.text_encoder import EncoderChoice
from mega_data.reading.corpus_sources import CorpusSource, FileFormat, SkippedFiles, log_formats
from mega_data.reading.documents import Document, RejectedItem
from mega_data.reading.source_readers import read_documents
from mega_data.tokenizer import LEADS, Tokenizer

BATCH = 1 << 18  # bytes of text: 40 ms of work, so that threads stay busy and little waits
PIECE = 1 << 18  # characters of a longer document that are encoded at once

SourcePosition = tuple[int, int]  # the number of a source, and of items of it that are done


@dataclass
class TextBatch:
    """Documents encoded in one call, or one piece of a long document; `has_more` if more pieces of it follow.

    Attributes:
        rejected: what of no use came before or between the documents.
        size: bytes of text to encode.
        ends: how many of the documents spell the end token.
        cut: how many answers lost something to the length limit; known when they are encoded.
        notes: conversations by what is to be reported of them; known when they are encoded.
        end_position: what of the inputs is done with this batch.
        read: bytes of all inputs that were read for it and those before.
        lead: how many tokens a piece begins with that are not its own (`Tokenizer.split`).
    """

    documents: list[Document] = field(default_factory=list)
    rejected: list[RejectedItem] = field(default_factory=list)
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
    """Progress of a run: `items` of source number `source`, after all earlier sources, and the resulting counts.

    `made_from` tells a run from one with other inputs or settings; `quarantined` counts bytes, and `encoder`
    is the one that was asked for, or had to be.
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
    """Reader of all sources in order, starting where an interrupted run stopped, with progress in bytes."""

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        json_key: str,
        left_out: SkippedFiles,
        done: PreprocessProgress,
        bar: ProgressBar,
        *,
        whole: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.sources, self.json_key, self.left_out, self.bar = sources, json_key, left_out, bar
        self.whole, self.folder = whole, folder
        self.start = done.source, done.items
        self.kinds: Counter[FileFormat] = Counter()
        self.lines = 0  # of the last source that was read to its end
        self.read = float(sum(source.num_bytes for source in sources[: done.source]))
        self._shown = 0.0

    def read_items(self) -> Iterator[tuple[SourcePosition, Document | RejectedItem]]:
        """Yield the documents and rejected items, each with the input position after it."""
        for number, source in enumerate(self.sources[self.start[0] :], self.start[0]):
            for count, item in enumerate(self._read_source(source), 1):
                if isinstance(item, RejectedItem) and item.left_out:
                    self.left_out.add_files(item.reason, [item.file])
                if (number, count) > self.start:
                    yield (number, count), item
                else:
                    self.advance_progress(self.read)

    def advance_progress(self, upto: float) -> None:
        """Advance the progress bar to the bytes that are processed."""
        self.bar.advance(upto - self._shown)
        self._shown = upto

    def log_summary(self) -> None:
        """Log the formats that were read, and the files that were skipped."""
        log_formats(self.kinds)
        self.left_out.log_reasons()

    def _read_source(self, source: CorpusSource) -> Iterator[Document | RejectedItem]:
        end = self.read + source.num_bytes if source.size else math.inf

        def advance(count: int) -> None:  # blocks reach beyond the range of a part
            self.read = min(self.read + count, end)

        tell = advance, self._record_format, self._record_lines
        return read_documents(source, self.json_key, *tell, whole=self.whole, folder=self.folder)

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
    """Yield documents in batches of about `BATCH` bytes; a long document comes alone, in pieces.

    `prepare` makes what is encoded of what is read.
    `refuse`: where bad lines would go if they did not end the run, None to let them pass. Documents with `end` in their
    text are counted. `leads` are those of `Tokenizer.split`.

    Raises:
        DataError: at a bad line that is not let pass, and where the readers do.
    """
    batch, before = TextBatch(), reading.read
    for place, read_item in reading.read_items():
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
        batch.size += 0 if long else size
        batch.ends += ends
        batch.end_position, batch.read = place, reading.read
        before = reading.read
    if batch.documents or batch.rejected:
        yield batch


def _check_rejected(item: RejectedItem, refuse: Path | None) -> None:
    if refuse is not None and not item.left_out:
        raise DataError(
            f"{item.file}:{item.line}: {item.reason}",
            hint=f"--on-bad-line skip goes on, and puts such lines into {refuse}",
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
                logger.warning("%s: %s characters in one piece, which takes much memory: %s finds no place to cut them",
                               document.location, format_number(len(piece.text)), tokenizer.path)  # fmt: skip
            size = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
            done, exact = done + size, exact and piece.exact
            part = document._replace(text=piece.lead + piece.text, long=None, size=document.size if piece.last else 0)
            upto = read if piece.last else before + (read - before) * done / document.size
            yield TextBatch(
                [part], size=size, read=upto, has_more=not piece.last, lead=len(tokenizer.encode(piece.lead))
            )
    if not exact:
        logger.warning("%s: no place to cut in %s characters and more: cut anywhere, where tokens may differ from"
                       " those of the whole", document.location, format_number(PIECE))  # fmt: skip
