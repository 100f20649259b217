"""The data set that a preprocessing run is making: tokens, bad lines, counts, and how far into the inputs they reach.

`record` makes all of it last; a run that was ended in whatever way goes on from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.files import sha256_file, write_json
from mega_common.log import ProgressBar, logger
from mega_data.files.indexed import CHUNK, best_dtype
from mega_data.files.indexed_writer import IndexedWriter
from mega_data.files.info import (
    ChatInfo,
    DataInfo,
    ShardInfo,
    Skipped,
    TokenizerInfo,
    little_endian,
    quarantine_path,
    write_info,
)
from mega_data.making.batches import Batch, Progress
from mega_data.making.commit import commit
from mega_data.making.encoder import Differs
from mega_data.making.partial import refusals
from mega_data.reading.documents import Rejected
from mega_data.tokenizer import Tokenizer

Sequences = list[npt.NDArray[Any]]  # tokens of those that a document is written as

EVERY = 5.0  # seconds between two records of how far a run came


class Output:
    """Documents are put together from pieces, ended, written and counted, in the order of the inputs.

    As a context: the data set appears on leaving it without an error, and `info` is its description. With `lasting`,
    what `record` noted stays after an error, and `begin` goes on there. A `shard` waits for another process that makes
    it, as the one may be that was lost.
    """

    info: DataInfo

    def __init__(
        self,
        prefix: Path,
        tokenizer: Tokenizer,
        append_eod: bool,
        made_from: str,
        *,
        lasting: bool,
        chat: ChatInfo | None = None,
        shard: ShardInfo | None = None,
    ) -> None:
        self.prefix, self.tokenizer, self.append_eod, self.lasting = prefix, tokenizer, append_eod, lasting
        self.chat, self.shard = chat, shard
        self.dtype = best_dtype(tokenizer.vocab_size)
        self.writer = IndexedWriter(
            prefix,
            self.dtype,
            resume=True,
            wait=shard is not None,
            masked=chat is not None,
        )
        self.done = Progress(made_from)
        self.tokens = 0
        self._record, self._bad_lines = self.writer.folder / "progress.json", self.writer.folder / "quarantine.jsonl"
        self._quarantine: IO[bytes] | None = None
        self._end = np.full(int(append_eod), tokenizer.eos_id or 0, self.dtype)
        self._digest = hashlib.sha256()
        self._begun: list[int] = []
        self._recorded = time.monotonic()

    def begin(self) -> Progress:
        """How far an interrupted run of the same inputs and settings came, which is taken up; else nowhere.

        Raises:
            DataError: when what it left is damaged.
        """
        left = self._left_by_another()
        if left is None:
            with refusals(self.writer.folder):
                self.writer.clear()
            return self.done
        self.done = left
        tokens = self.writer.go_on(left.documents)
        with ProgressBar("reading what is done", total=tokens.nbytes or None, unit="bytes") as bar:
            for start in range(0, tokens.size, CHUNK):
                piece = np.ascontiguousarray(tokens[start : start + CHUNK])
                self._digest.update(piece.data)
                bar.advance(piece.nbytes)
        self.tokens = int(tokens.size)
        logger.info("%s: going on after the %s documents of an interrupted run", self.prefix, f"{left.documents:,}")
        return left

    def _left_by_another(self) -> Progress | None:
        if not self._record.exists():
            return None
        try:
            left = Progress(**json.loads(self._record.read_bytes()))
        except (OSError, ValueError, TypeError):
            left = Progress("unreadable")
        if left.made_from != self.done.made_from:
            logger.info("%s: what an interrupted run left was made otherwise: starting over", self.prefix)
            return None
        return left

    def add(self, batch: Batch, documents: Sequence[Sequences]) -> None:
        """Write a batch, the tokens of the sequences of each document, and now and then how far that is."""
        for item in batch.rejected:
            self._reject(item)
        if documents:
            self._write(documents, batch.goes_on)
        if batch.goes_on:
            return
        self.done.cut += batch.cut
        self.done.notes = dict(Counter(self.done.notes) + batch.notes)
        self.done.text_bytes += sum(document.size for document in batch.documents)
        self.done.ends += batch.ends
        self.done.source, self.done.items = batch.upto
        if time.monotonic() - self._recorded > EVERY:
            self.record()

    def _write(self, documents: Sequence[Sequences], goes_on: bool) -> None:
        """Write what documents have; the first goes on with the one that was begun, and that with the next piece.

        Where a document is cut into pieces, its first sequence goes on with the last one of the piece before.
        """
        lengths = [[sequence.size for sequence in document if sequence.size] for document in documents]
        lengths[0] = _joined(self._begun, lengths[0])
        self._begun = lengths.pop() if goes_on else []
        parts: Sequences = []
        for document, sizes in zip_longest(documents, lengths):
            parts += document
            if sizes and self.append_eod:
                parts.append(self._end)
                sizes[-1] += 1
        tokens, mask = np.concatenate(parts) if parts else self._end[:0], None
        if self.chat is not None and parts:
            tokens, mask = np.ascontiguousarray(tokens["token"]), tokens["mask"]
        ended = [sizes for sizes in lengths if sizes]
        self.writer.write(tokens, mask)
        self.writer.end_documents([size for sizes in ended for size in sizes], [len(sizes) for sizes in ended])
        self._digest.update(tokens.data)
        self.done.documents += len(ended)
        self.done.empty += len(lengths) - len(ended)
        self.tokens += tokens.size

    def _reject(self, item: Rejected) -> None:
        if item.left_out:
            self.done.left_out += 1
            return
        self.done.bad += 1
        record = {"file": item.file, "line": item.line, "reason": item.reason, "content": item.content}
        with refusals(quarantine_path(self.prefix)):
            if self._quarantine is None:
                self._quarantine = open(self._bad_lines, "ab")  # noqa: SIM115 - closed on leaving
                self._quarantine.truncate(self.done.quarantined)
            self._quarantine.write(json.dumps(record).encode() + b"\n")

    def record(self) -> None:
        """Make what was added so far last."""
        if not self.lasting:
            return
        with refusals(self.writer.folder):
            self._flush_quarantine()
            self.writer.sync()
            write_json(self._record, dataclasses.asdict(self.done))
        self._recorded = time.monotonic()

    def _flush_quarantine(self) -> None:
        if self._quarantine is not None:
            self._quarantine.flush()
            os.fsync(self._quarantine.fileno())
            self.done.quarantined = self._quarantine.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Differs):  # none of its tokens can be trusted
            self._record.unlink(missing_ok=True)
        if kind is not None:
            self._keep()
            return
        try:
            self._finish()
        except BaseException:
            self._keep()
            raise

    def _finish(self) -> None:
        """Make the data set appear, all its files together."""
        with refusals(self.prefix):
            self._flush_quarantine()
            self.writer.finish()
            chat = self.chat
            if chat is not None:
                mask_sha256 = sha256_file(self.writer.folder / "mask.bin")
                chat = chat.model_copy(
                    update={"cut": self.done.cut, "notes": self.done.notes, "mask_sha256": mask_sha256}
                )
            self.info = write_info(
                self.prefix,
                folder=self.writer.folder,
                tokenizer=TokenizerInfo.of(self.tokenizer),
                append_eod=self.append_eod,
                dtype=little_endian(self.dtype),
                documents=self.done.documents,
                tokens=self.tokens,
                text_bytes=self.done.text_bytes,
                skipped=Skipped(bad=self.done.bad, empty=self.done.empty, binary=self.done.left_out),
                bin_sha256=self._digest.hexdigest(),
                chat=chat,
                shard=self.shard,
                made_from=None if self.shard else self.done.made_from,
            )
            self._close_quarantine()
            commit(self.writer, self.done.made_from)

    def _close_quarantine(self) -> None:
        if self._quarantine is not None:
            with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses again
                self._quarantine.close()

    def _keep(self) -> None:
        """After an error: a run that was long enough to be recorded once keeps what it has."""
        if self._record.exists():
            with contextlib.suppress(DataError):
                self.record()
            logger.info("%s: what is done is kept, and the same command goes on with it", self.writer.folder)
        self._close_quarantine()
        self.writer.abort()


def _joined(begun: list[int], more: list[int]) -> list[int]:
    """The lengths of sequences of which the first of `more` goes on with the last one begun."""
    return [*begun[:-1], begun[-1] + more[0], *more[1:]] if begun and more else begun or more
