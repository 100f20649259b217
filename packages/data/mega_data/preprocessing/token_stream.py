"""Token files of raw data that is too large to keep: made in blocks shortly before they are read, and removed after.

    CACHE/wiki-5f3a1c....stream/3-0-1207/tokens.bin, tokens.idx, end.json, ...    the block that starts at [3, 0, 1207]

A block holds consecutive documents: it ends with the document that brings it to `block_tokens` tokens. Its start in the
input is [shard, source, items]: number of a shard of `PIECE` bytes (`select_shard_sources`), source in the shard, and items
of that source that earlier blocks have read. So a block depends only on the input and its start, and a later process
continues at any of them without reading what is before the shard. Processes of a machine share blocks: one makes a block,
the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from threading import Lock, Thread

from mega_common.atomic_files import write_json_atomically
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, format_with_decimal_unit, logger
from mega_data.preprocessing.dataset_output import DatasetOutput, Sequences
from mega_data.preprocessing.preprocess_corpus import PreprocessJob
from mega_data.preprocessing.sharding import InputShard, select_shard_sources
from mega_data.preprocessing.text_batches import PreprocessProgress, TextBatch
from mega_data.reading.corpus_sources import no_text_error
from mega_data.token_files.partial_folder import convert_write_errors_to_data_error, hold_partial_folder
from mega_data.tokenizer import disable_encoder_threads

PIECE = 1 << 26  # bytes of input that a block's start is counted in: what is read again at most when a run resumes
COMPLETE = "end.json"  # number of documents of a block, and start of the next
FIRST = (1, 0, 0)  # start of the first block

BlockPosition = tuple[int, ...]


@dataclass(frozen=True)
class StreamedTokenFiles:
    """Path prefix of the token files of one block of a raw data set, and the position where the next block starts.
    `end` is None after the last block.
    """

    prefix: Path
    end: BlockPosition | None


class TokenStream:
    """Blocks of token files of one raw data set, in the order of its documents.

    Args:
        job: tokenization of the whole data; its `whole` is the prefix in whose folder the blocks are.
        block_tokens: tokens from which on a block is complete.
        workers: encoding threads.
        translate: context in which blocks are made, which translates errors.

    Raises:
        DataError: on opening a block, naming the bad record; on the first, if the input has no text.
    """

    def __init__(
        self,
        job: PreprocessJob,
        block_tokens: int,
        workers: int,
        translate: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._job, self._block_tokens, self._workers, self._translate = job, block_tokens, workers, translate
        self._folder = job.whole.parent
        size = sum(source.num_bytes for source in job.sources)
        self.num_shards = max(-(-size // PIECE), 1)
        self.content_key = f"{job.made_from} block={block_tokens}"
        self._coming: dict[BlockPosition, Future[StreamedTokenFiles | None]] = {}
        self._held: dict[BlockPosition, int] = {}  # descriptors with shared locks of blocks in use
        self._lock = Lock()

    def open_block(self, start: BlockPosition = FIRST, *, ahead: bool = True) -> StreamedTokenFiles | None:
        """Return the block that starts at `start`, which is made if needed, or None if no document is left.
        With `ahead`, the next block is then made in the background.
        """
        files = self._request_block(start).result()
        with self._lock:
            self._coming.pop(start, None)
        if files is None and start == FIRST:
            raise no_text_error(self._job.sources, "all documents are empty or were rejected")
        if ahead and files is not None and files.end is not None:
            self._request_block(files.end)
        return files

    def remove_block(self, start: BlockPosition) -> None:
        """Release a block that was read; remove its files if no other process has it open and it is not the first block.
        The next start of a run reads the first block.
        """
        descriptor = self._held.pop(start, None)
        if start == FIRST or descriptor is None:
            return
        folder = self._get_folder(start)
        removed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        os.close(descriptor)

    def _hold_block(self, start: BlockPosition) -> bool:
        """Return whether a block is complete; until `remove_block`, no other process then removes it."""
        path = self._get_folder(start) / COMPLETE
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                self._held[start] = descriptor
                return True
            os.close(descriptor)
        return False

    def _get_folder(self, start: BlockPosition) -> Path:
        return self._folder / "-".join(map(str, start))

    def _request_block(self, start: BlockPosition) -> Future[StreamedTokenFiles | None]:
        """Return the future of a block; a thread makes it, which ends with the process."""
        with self._lock:
            if start in self._coming:
                return self._coming[start]
            future = self._coming[start] = Future[StreamedTokenFiles | None]()
        Thread(target=self._run, args=(start, future), name="stream", daemon=True).start()
        return future

    def _run(self, start: BlockPosition, future: Future[StreamedTokenFiles | None]) -> None:
        try:
            future.set_result(self._find_or_make_block(start))
        except BaseException as error:  # noqa: BLE001 - raised where the block is opened
            future.set_exception(error)

    def _find_or_make_block(self, start: BlockPosition) -> StreamedTokenFiles | None:
        folder = self._get_folder(start)
        with convert_write_errors_to_data_error(folder):
            while not self._hold_block(start):
                with hold_partial_folder(folder.with_name(f".{folder.name}.making")):
                    if not (folder / COMPLETE).exists():
                        with self._translate():
                            self._make_block(start, folder)
            made = json.loads((folder / COMPLETE).read_bytes())
        return StreamedTokenFiles(folder / "tokens", made["end"] and tuple(made["end"])) if made["documents"] else None

    def _make_block(self, start: BlockPosition, folder: Path) -> None:
        """Write the token files of a block, and then the file that marks them as complete."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        job, documents, end = self._job, 0, None
        with contextlib.suppress(_NoDocumentsError):
            chat = job.record_converter.info if job.record_converter else None
            with DatasetOutput(
                folder / "tokens",
                job.tokenizer,
                job.append_eod,
                f"{self.content_key} {start}",
                lasting=False,
                chat=chat,
            ) as output:
                output.resume_or_start()
                end = self._write_documents(start, output)
                documents = output.done.documents
                if not documents:
                    raise _NoDocumentsError
            logger.info(
                "%s: %s documents, %s tokens",
                folder,
                format_with_decimal_unit(documents),
                format_with_decimal_unit(output.tokens),
            )
            if output.done.bad:
                logger.warning("%s: %d bad records of this block are left out", folder, output.done.bad)
        write_json_atomically(folder / COMPLETE, {"documents": documents, "end": end})

    def _write_documents(self, start: BlockPosition, output: DatasetOutput) -> BlockPosition | None:
        """Write the documents of a block; return the start of the next one, or None at the end of the input."""
        first_shard, *within = start
        with disable_encoder_threads(), ProgressBar("tokenizing", every=float("inf")) as bar:
            for number in range(first_shard, self.num_shards + 1):
                source, items = within if number == first_shard else (0, 0)
                sources = select_shard_sources(
                    self._job.sources, InputShard(number, self.num_shards), self._job.json_key
                )
                done = PreprocessProgress("", source=source, items=items)
                reading = self._job.open_document_reader(sources, done, bar, output)
                encoded = self._job.encode_documents(reading, self._job.tokenizer, output, self._workers)
                with contextlib.closing(encoded):
                    for batch, documents in encoded:
                        position = self._write_batch(batch, documents, output)
                        if position is not None:
                            return number, *position
        return None

    def _write_batch(
        self, batch: TextBatch, documents: list[Sequences], output: DatasetOutput
    ) -> tuple[int, int] | None:
        """Write the documents of a batch that belong to the block; return the position after it if it is complete."""
        sizes = [sum(sequence.size for sequence in document) for document in documents]
        totals = list(accumulate((size + (self._job.append_eod and size > 0) for size in sizes), initial=output.tokens))
        count = next((n for n, total in enumerate(totals[1:], 1) if total >= self._block_tokens), None)
        if count is None or not batch.positions:
            output.add_batch(batch, documents)
            full = output.tokens >= self._block_tokens and not batch.has_more
            return batch.end_position if full else None
        position = batch.positions[count - 1]
        output.add_batch(replace(batch, documents=batch.documents[:count], end_position=position), documents[:count])
        return position


class _NoDocumentsError(DataError):
    """Raised to discard the files of a block without documents."""

    def __init__(self) -> None:
        super().__init__("no documents")
