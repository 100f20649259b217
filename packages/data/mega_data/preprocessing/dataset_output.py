"""Output of a preprocessing run: tokens, bad lines, counts, and the input position they reach.

`record_progress` makes all of it durable; an interrupted run resumes from the last record.
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

from mega_common.atomic_files import compute_file_sha256, write_json_atomically
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.preprocessing.text_batches import PreprocessProgress, TextBatch
from mega_data.preprocessing.text_encoder import EncoderMismatch
from mega_data.reading.documents import RejectedItem
from mega_data.token_files.dataset_commit import commit_dataset
from mega_data.token_files.dataset_info import (
    ChatInfo,
    DatasetInfo,
    DatasetShardInfo,
    SkippedCounts,
    TokenizerInfo,
    get_dtype_name,
    get_quarantine_path,
    write_dataset_info,
)
from mega_data.token_files.indexed_reader import CHUNK, select_token_dtype
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.partial_folder import convert_write_errors_to_data_error
from mega_data.tokenizer import Tokenizer

Sequences = list[npt.NDArray[Any]]  # token sequences of one document

RECORD_INTERVAL = 5.0  # seconds between two progress records


class DatasetOutput:
    """Writer of a preprocessing run's token data set.
    Long documents are assembled from their segments, ended with the end token and counted, in the order of the inputs.

    As a context manager: on exit without an error the data set is committed, and `info` is its description. With
    `lasting`, the state of the last `record_progress` survives an error, and `resume_or_start` resumes from it. For a
    `shard`, wait for another process that writes the same shard, which may be a worker that was lost and restarted.
    """

    info: DatasetInfo

    def __init__(
        self,
        prefix: Path,
        tokenizer: Tokenizer,
        append_eod: bool,
        made_from: str,
        *,
        lasting: bool,
        chat: ChatInfo | None = None,
        shard: DatasetShardInfo | None = None,
    ) -> None:
        self.prefix, self.tokenizer, self.append_eod, self.lasting = prefix, tokenizer, append_eod, lasting
        self.chat, self.shard = chat, shard
        self.dtype = select_token_dtype(tokenizer.vocab_size)
        self.writer = IndexedWriter(
            prefix,
            self.dtype,
            resume=True,
            wait=shard is not None,
            masked=chat is not None,
        )
        self.done = PreprocessProgress(made_from)
        self.tokens = 0
        self._record, self._bad_lines = self.writer.folder / "progress.json", self.writer.folder / "quarantine.jsonl"
        self._quarantine: IO[bytes] | None = None
        self._end = np.full(int(append_eod), tokenizer.eos_id or 0, self.dtype)
        self._digest = hashlib.sha256()
        self._open_lengths: list[int] = []  # sequence lengths of the unfinished document
        self._recorded = time.monotonic()

    def resume_or_start(self) -> PreprocessProgress:
        """Resume an interrupted preprocessing run with equal inputs and settings, or start from zero; return the progress.

        Raises:
            DataError: if its partial files are damaged.
        """
        progress = self._read_interrupted_progress()
        if progress is None:
            with convert_write_errors_to_data_error(self.writer.folder):
                self.writer.clear_partial_files()
            return self.done
        self.done = progress
        tokens = self.writer.resume_after_documents(progress.documents)
        with ProgressBar("hashing the resumed tokens", total=tokens.nbytes or None, unit="bytes") as bar:
            for start in range(0, tokens.size, CHUNK):
                piece = np.ascontiguousarray(tokens[start : start + CHUNK])
                self._digest.update(piece.data)
                bar.advance(piece.nbytes)
        self.tokens = int(tokens.size)
        logger.info("%s: resuming an interrupted run after %s documents", self.prefix, f"{progress.documents:,}")
        return progress

    def _read_interrupted_progress(self) -> PreprocessProgress | None:
        if not self._record.exists():
            return None
        try:
            progress = PreprocessProgress(**json.loads(self._record.read_bytes()))
        except (OSError, ValueError, TypeError):
            progress = PreprocessProgress("unreadable")
        if progress.made_from != self.done.made_from:
            logger.info("%s: an interrupted run used other inputs or settings; starting from zero", self.prefix)
            return None
        return progress

    def add_batch(self, batch: TextBatch, documents: Sequence[Sequences]) -> None:
        """Write a batch of documents, given the token sequences of each, and its bad lines.
        Progress is recorded every few seconds.
        """
        for item in batch.rejected:
            self._quarantine_item(item)
        if documents:
            self._write_documents(documents, batch.has_more)
        if batch.has_more:
            return
        self.done.cut += batch.cut
        self.done.notes = dict(Counter(self.done.notes) + batch.notes)
        self.done.text_bytes += sum(document.size for document in batch.documents)
        self.done.ends += batch.ends
        self.done.source, self.done.items = batch.end_position
        if time.monotonic() - self._recorded > RECORD_INTERVAL:
            self.record_progress()

    def _write_documents(self, documents: Sequence[Sequences], has_more: bool) -> None:
        """Write documents; the first continues an unfinished one, and the last stays open if `has_more` is set.

        The first sequence of a document's second and later pieces continues the last sequence of the piece before.
        """
        lengths = [[sequence.size for sequence in document if sequence.size] for document in documents]
        lengths[0] = _join_lengths(self._open_lengths, lengths[0])
        self._open_lengths = lengths.pop() if has_more else []
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
        self.writer.write_tokens(tokens, mask)
        self.writer.end_documents([size for sizes in ended for size in sizes], [len(sizes) for sizes in ended])
        self._digest.update(tokens.data)
        self.done.documents += len(ended)
        self.done.empty += len(lengths) - len(ended)
        self.tokens += tokens.size

    def _quarantine_item(self, item: RejectedItem) -> None:
        if item.skipped:
            self.done.left_out += 1
            return
        self.done.bad += 1
        record = {"file": item.file, "line": item.line, "reason": item.reason, "content": item.content}
        with convert_write_errors_to_data_error(get_quarantine_path(self.prefix)):
            if self._quarantine is None:
                self._quarantine = open(self._bad_lines, "ab")  # noqa: SIM115 - closed in __exit__
                self._quarantine.truncate(self.done.quarantined)
            self._quarantine.write(json.dumps(record).encode() + b"\n")

    def record_progress(self) -> None:
        """Flush everything written so far to disk and record the progress in `progress.json`; no effect without `lasting`.

        It has no effect without `lasting`.
        """
        if not self.lasting:
            return
        with convert_write_errors_to_data_error(self.writer.folder):
            self._flush_quarantine()
            self.writer.sync_to_disk()
            write_json_atomically(self._record, dataclasses.asdict(self.done))
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
        if isinstance(error, EncoderMismatch):  # none of its tokens can be trusted
            self._record.unlink(missing_ok=True)
        if kind is not None:
            self._keep_progress()
            return
        try:
            self._commit_files()
        except BaseException:
            self._keep_progress()
            raise

    def _commit_files(self) -> None:
        """Commit all files of the data set together."""
        with convert_write_errors_to_data_error(self.prefix):
            self._flush_quarantine()
            self.writer.finish_files()
            chat = self.chat
            if chat is not None:
                mask_sha256 = compute_file_sha256(self.writer.folder / "mask.bin")
                chat = chat.model_copy(
                    update={"cut": self.done.cut, "notes": self.done.notes, "mask_sha256": mask_sha256}
                )
            self.info = write_dataset_info(
                self.prefix,
                folder=self.writer.folder,
                tokenizer=TokenizerInfo.from_tokenizer(self.tokenizer),
                append_eod=self.append_eod,
                dtype=get_dtype_name(self.dtype),
                documents=self.done.documents,
                tokens=self.tokens,
                text_bytes=self.done.text_bytes,
                skipped=SkippedCounts(bad=self.done.bad, empty=self.done.empty, binary=self.done.left_out),
                bin_sha256=self._digest.hexdigest(),
                chat=chat,
                shard=self.shard,
                made_from=None if self.shard else self.done.made_from,
            )
            self._close_quarantine()
            commit_dataset(self.writer, self.done.made_from)

    def _close_quarantine(self) -> None:
        if self._quarantine is not None:
            with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses again
                self._quarantine.close()

    def _keep_progress(self) -> None:
        """Keep the progress after an error, if the run was long enough to be recorded once."""
        if self._record.exists():
            with contextlib.suppress(DataError):
                self.record_progress()
            logger.info("%s: progress is kept; run the same command again to resume", self.writer.folder)
        self._close_quarantine()
        self.writer.abort()


def _join_lengths(first: list[int], second: list[int]) -> list[int]:
    """Concatenate sequence lengths, where the first sequence of `second` continues the last one of `first`."""
    return [*first[:-1], first[-1] + second[0], *second[1:]] if first and second else first or second
