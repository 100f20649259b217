"""What is read, in batches of the size that one call encodes, each with the place in the inputs that it reaches."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mega_common.errors import DataError
from mega_common.log import ProgressBar, human, logger
from mega_data.making.encoder import Choice
from mega_data.reading.documents import Document, Rejected
from mega_data.reading.readers import read
from mega_data.reading.sources import Kind, LeftOut, Source, describe
from mega_data.tokenizer import LEADS, Tokenizer

BATCH = 1 << 18  # bytes of text: 40 ms of work, so that threads stay busy and little waits
PIECE = 1 << 18  # characters of a longer document that are encoded at once

Place = tuple[int, int]  # the number of a source, and of items of it that are done


@dataclass
class Batch:
    """Documents that are encoded in one call, or one piece of a long one; `goes_on` when more of it follows.

    Attributes:
        rejected: what of no use came before or between the documents.
        size: bytes of text to encode.
        ends: how many of the documents spell the end token.
        cut: how many answers lost something to the length limit; known when they are encoded.
        notes: conversations by what is to be reported of them; known when they are encoded.
        upto: what of the inputs is done with this batch.
        read: bytes of all inputs that were read for it and those before.
        lead: how many tokens a piece begins with that are not its own (`Tokenizer.split`).
    """

    documents: list[Document] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    size: int = 0
    ends: int = 0
    cut: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    upto: Place = (0, 0)
    read: float = 0
    goes_on: bool = False
    lead: int = 0


@dataclass
class Progress:
    """How far a run came: `items` of source number `source`, after all before it; and what came of them.

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
    encoder: Choice = "auto"


class Reading:
    """All sources one after another, from where an interrupted run was, and the progress of that in bytes."""

    def __init__(
        self,
        sources: Sequence[Source],
        json_key: str,
        left_out: LeftOut,
        done: Progress,
        bar: ProgressBar,
        *,
        whole: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.sources, self.json_key, self.left_out, self.bar = sources, json_key, left_out, bar
        self.whole, self.folder = whole, folder
        self.start = done.source, done.items
        self.kinds: Counter[Kind] = Counter()
        self.lines = 0  # of the last source that was read to its end
        self.read = float(sum(source.bytes for source in sources[: done.source]))
        self._shown = 0.0

    def items(self) -> Iterator[tuple[Place, Document | Rejected]]:
        """What is read, and the place after it."""
        for number, source in enumerate(self.sources[self.start[0] :], self.start[0]):
            for count, item in enumerate(self._read(source), 1):
                if isinstance(item, Rejected) and item.left_out:
                    self.left_out.add(item.reason, [item.file])
                if (number, count) > self.start:
                    yield (number, count), item
                else:
                    self.show(self.read)

    def show(self, upto: float) -> None:
        """Tell how many of the bytes read are done with."""
        self.bar.advance(upto - self._shown)
        self._shown = upto

    def tell(self) -> None:
        """Log what was read as what, and what was not."""
        describe(self.kinds)
        self.left_out.tell()

    def _read(self, source: Source) -> Iterator[Document | Rejected]:
        end = self.read + source.bytes if source.size else math.inf

        def advance(count: int) -> None:  # blocks reach beyond the range of a part
            self.read = min(self.read + count, end)

        tell = advance, self._tell_kind, self._tell_lines
        return read(source, self.json_key, *tell, whole=self.whole, folder=self.folder)

    def _tell_lines(self, count: int) -> None:
        self.lines = count

    def _tell_kind(self, kind: Kind) -> None:
        self.kinds[kind] += 1


Prepare = Callable[[Document | Rejected], Document | Rejected]


def batches(
    reading: Reading,
    tokenizer: Tokenizer,
    *,
    refuse: Path | None,
    end: str | None,
    prepare: Prepare | None = None,
    leads: Sequence[str] = LEADS,
) -> Iterator[Batch]:
    """Documents in batches of about `BATCH` bytes; a long one comes alone, in pieces.

    `prepare` makes what is encoded of what is read.
    `refuse`: where bad lines would go if they did not end the run, None to let them pass. Documents with `end` in their
    text are counted. `leads` are those of `Tokenizer.split`.

    Raises:
        DataError: at a bad line that is not let pass, and where the readers do.
    """
    batch, before = Batch(), reading.read
    for place, read_item in reading.items():
        item = prepare(read_item) if prepare else read_item
        size = item.size if isinstance(item, Document) else len(item.content)
        long = isinstance(item, Document) and (item.long is not None or len(item.text) > PIECE)
        ends = isinstance(item, Document) and end is not None and end in (item.long or item.text)
        if (batch.documents or batch.rejected) and (long or batch.size + size > BATCH):
            yield batch
            batch = Batch()
        if isinstance(item, Rejected):
            _check(item, refuse)
            batch.rejected.append(item)
        elif long:
            for batch in _pieces(item, tokenizer, leads, before, reading.read):
                if batch.goes_on:
                    yield batch
        else:
            batch.documents.append(item)
        batch.size += 0 if long else size
        batch.ends += ends
        batch.upto, batch.read = place, reading.read
        before = reading.read
    if batch.documents or batch.rejected:
        yield batch


def _check(item: Rejected, refuse: Path | None) -> None:
    if refuse is not None and not item.left_out:
        raise DataError(
            f"{item.file}:{item.line}: {item.reason}",
            hint=f"--on-bad-line skip goes on, and puts such lines into {refuse}",
        )


def _pieces(
    document: Document, tokenizer: Tokenizer, leads: Sequence[str], before: float, read: float
) -> Iterator[Batch]:
    """A long document in batches of its own; `before` and `read` are the bytes read without it and with it."""
    done, exact = 0, True
    with document.long or contextlib.nullcontext():
        blocks = document.long.blocks() if document.long else [document.text]
        for piece in tokenizer.split(blocks, PIECE, leads):
            if len(piece.text) > 8 * PIECE:
                logger.warning("%s: %s characters in one piece, which takes much memory: %s finds no place to cut them",
                               document.where, human(len(piece.text)), tokenizer.path)  # fmt: skip
            size = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
            done, exact = done + size, exact and piece.exact
            part = document._replace(text=piece.lead + piece.text, long=None, size=document.size if piece.last else 0)
            upto = read if piece.last else before + (read - before) * done / document.size
            yield Batch([part], size=size, read=upto, goes_on=not piece.last, lead=len(tokenizer.encode(piece.lead)))
    if not exact:
        logger.warning("%s: no place to cut in %s characters and more: cut anywhere, where tokens may differ from"
                       " those of the whole", document.where, human(PIECE))  # fmt: skip
