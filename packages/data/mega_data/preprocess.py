"""Documents to token files, as fast as the tokenizer goes.

One thread reads and writes, `workers` threads encode: the tokenizer's Rust code runs without the interpreter's lock, so
threads do what processes would without copying the text or starting interpreters. Batches go out and come back in the
order of the documents, so the files do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.files import atomic_file
from mega_common.log import ProgressBar, human, logger
from mega_data.indexed import IndexedWriter, best_dtype, data_prefix
from mega_data.info import (
    DataInfo,
    Skipped,
    TokenizerInfo,
    forget,
    little_endian,
    prepare_output,
    quarantine_path,
    refuse_inputs,
    write_info,
)
from mega_data.sources import Document, Rejected, find_sources, read
from mega_data.tokenizer import Tokenizer, one_thread_per_call

Arrays = list[npt.NDArray[Any]]

BATCH = 1 << 18  # bytes of text: 40 ms of work, so that threads stay busy and little waits
PIECE = 1 << 20  # characters of a longer document that are encoded at once
AHEAD = 1 << 22  # bytes of text per worker that may wait or be under way


@dataclass
class Batch:
    """Documents that are encoded in one call, or one piece of a long one; `goes_on` when more of it follows."""

    documents: list[Document] = field(default_factory=list)
    size: int = 0
    goes_on: bool = False

    def add(self, document: Document) -> None:
        """Take one more."""
        self.documents.append(document)
        self.size += document.size


def preprocess(
    inputs: Sequence[str | Path],
    tokenizer_path: Path,
    output_prefix: Path,
    *,
    json_key: str = "text",
    append_eod: bool = False,
    workers: int | None = None,
    on_bad_line: Literal["error", "skip"] = "error",
    overwrite: bool = False,
) -> DataInfo:
    """Tokenize `inputs` (see `find_sources`) into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.info`.

    A document is one sequence of the data set; documents without a token are left out and counted. `append_eod` ends
    each with the tokenizer's end token. `workers` is the number of encoding threads, by default the usable cores. With
    `on_bad_line="skip"` bad lines go into `PREFIX.quarantine.jsonl` instead of stopping the run.

    Until everything is written no file has its final name, whatever ends the run.

    Raises:
        DataError: naming file and line of a bad document, or what cannot be read or written.
        MissingPackageError: when an input's format needs a package that is not installed.
    """
    output_prefix = data_prefix(Path(output_prefix))
    prepare_output(output_prefix, overwrite)
    tokenizer = Tokenizer(tokenizer_path)
    if append_eod and tokenizer.eos_id is None:
        raise DataError(
            f"{tokenizer.path}: names no end-of-text token to append",
            hint="put `eos_token` into tokenizer_config.json beside it",
        )
    sources = find_sources(inputs)
    refuse_inputs(output_prefix, [tokenizer.path, *(Path(source.name) for source in sources)])
    output = _Output(output_prefix, tokenizer, append_eod)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(ProgressBar("tokenizing", total=sum(s.size for s in sources) or None, unit="bytes"))
        stack.enter_context(output.writer)
        quarantine = stack.enter_context(_Quarantine(output_prefix, on_bad_line))
        items = (item for source in sources for item in read(source, json_key, bar.advance))
        batches = _batches(quarantine.good(items), tokenizer)
        stack.enter_context(one_thread_per_call())
        encoded = _encoded(batches, tokenizer, output.dtype, workers or usable_cores())
        for batch, arrays in stack.enter_context(contextlib.closing(encoded)):
            output.add(batch, arrays)
        if not output.documents:
            raise DataError(
                f"{', '.join(map(str, inputs))}: not one document with text in {len(sources)} file(s)",
                hint=f"{quarantine.bad} bad lines, {output.empty} empty documents, {quarantine.binary} binary files",
            )
        forget(output_prefix)
    info = output.describe(bad=quarantine.bad, binary=quarantine.binary)
    _tell(info, output_prefix)
    return info


def usable_cores() -> int:
    """Cores that this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Quarantine:
    """Lets documents pass and keeps or refuses what is none; the file appears when the block ends well."""

    def __init__(self, prefix: Path, policy: Literal["error", "skip"]) -> None:
        self.path, self.policy = quarantine_path(prefix), policy
        self.bad = self.binary = 0
        self._stack = contextlib.ExitStack()
        self._file: IO[str] | None = None

    def good(self, items: Iterable[Document | Rejected]) -> Iterator[Document]:
        for item in items:
            if isinstance(item, Document):
                yield item
            elif item.binary:
                self.binary += 1
            elif self.policy == "skip":
                self._keep(item)
            else:
                raise DataError(
                    f"{item.file}:{item.line}: {item.reason}",
                    hint=f"--on-bad-line skip goes on, and puts such lines into {self.path}",
                )

    def _keep(self, item: Rejected) -> None:
        self.bad += 1
        record = {"file": item.file, "line": item.line, "reason": item.reason, "content": item.content}
        with self._refusals():
            if self._file is None:
                self._file = self._stack.enter_context(atomic_file(self.path, text=True))
            self._file.write(json.dumps(record) + "\n")

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written ({error.strerror})") from error

    def __enter__(self) -> _Quarantine:
        self._stack.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._refusals():
            self._stack.__exit__(*error)


def _batches(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Batch]:
    """Group documents to about `BATCH` bytes; a long one comes alone, in pieces."""
    batch = Batch()
    for document in documents:
        long = len(document.text) > PIECE
        if batch.documents and (long or batch.size + document.size > BATCH):
            yield batch
            batch = Batch()
        if long:
            yield from _pieces(document, tokenizer)
        else:
            batch.add(document)
    if batch.documents:
        yield batch


def _pieces(document: Document, tokenizer: Tokenizer) -> Iterator[Batch]:
    left = len(document.text)
    for text in tokenizer.split(document.text, PIECE):
        left -= len(text)
        size = len(text) if text.isascii() else len(text.encode())
        yield Batch([document._replace(text=text, size=size)], size, goes_on=left > 0)


def _encoded(
    batches: Iterable[Batch], tokenizer: Tokenizer, dtype: np.dtype[Any], workers: int
) -> Generator[tuple[Batch, Arrays], None, None]:
    """Each batch with its tokens, in order; at most `AHEAD` bytes per worker (or one batch) are under way."""
    if workers == 1:  # a thread of its own would cost more, in memory arenas, than it saves
        yield from ((batch, _encode(batch, tokenizer, dtype)) for batch in batches)
        return
    pending: deque[tuple[Batch, Future[Arrays]]] = deque()
    under_way = 0
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    try:
        for batch in batches:
            while pending and under_way + batch.size > workers * AHEAD:
                under_way -= pending[0][0].size
                yield _finished(*pending.popleft())
            pending.append((batch, pool.submit(_encode, batch, tokenizer, dtype)))
            under_way += batch.size
            while pending and pending[0][1].done():
                under_way -= pending[0][0].size
                yield _finished(*pending.popleft())
        while pending:
            yield _finished(*pending.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(batch: Batch, future: Future[Arrays]) -> tuple[Batch, Arrays]:
    return batch, future.result()


def _encode(batch: Batch, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Arrays:
    try:
        return tokenizer.encode_batch([document.text for document in batch.documents], dtype)
    except BaseException as error:  # a panic in Rust is no Exception
        raise _blame(batch, tokenizer, dtype, error) from error


def _blame(batch: Batch, tokenizer: Tokenizer, dtype: np.dtype[Any], error: BaseException) -> DataError:
    """Find the document of a batch that the tokenizer fails on."""
    for document in batch.documents:
        try:
            tokenizer.encode_batch([document.text], dtype)
        except BaseException as own:  # noqa: BLE001 - as above; it is told, not lost
            return DataError(f"{document.where}: the tokenizer {tokenizer.path} fails on this document ({own})")
    first, last = batch.documents[0], batch.documents[-1]
    return DataError(f"{first.where} to {last.where}: the tokenizer {tokenizer.path} fails on this batch ({error})")


class _Output:
    """The token files under way: documents are put together, ended, written and counted."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer, append_eod: bool) -> None:
        self.prefix, self.tokenizer, self.append_eod = prefix, tokenizer, append_eod
        self.dtype = best_dtype(tokenizer.vocab_size)
        self.writer = IndexedWriter(prefix, self.dtype)
        self.documents = self.tokens = self.text_bytes = self.empty = 0
        self._end = np.full(int(append_eod), tokenizer.eos_id or 0, self.dtype)
        self._digest = hashlib.sha256()
        self._begun: Arrays = []

    def add(self, batch: Batch, arrays: Arrays) -> None:
        self.text_bytes += batch.size
        if batch.goes_on:
            self._begun += arrays
            return
        if self._begun:
            arrays = [np.concatenate([*self._begun, *arrays])]
            self._begun = []
        full = [array for array in arrays if array.size]
        self.empty += len(arrays) - len(full)
        if full:
            self._write(full)

    def _write(self, arrays: Arrays) -> None:
        lengths = np.array([array.size + self._end.size for array in arrays])
        tokens = np.concatenate([part for array in arrays for part in (array, self._end)])
        self.writer.add_documents(tokens, lengths)
        self._digest.update(tokens.data)
        self.documents += len(arrays)
        self.tokens += tokens.size

    def describe(self, bad: int, binary: int) -> DataInfo:
        return write_info(
            self.prefix,
            tokenizer=TokenizerInfo.of(self.tokenizer),
            append_eod=self.append_eod,
            dtype=little_endian(self.dtype),
            documents=self.documents,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            skipped=Skipped(bad=bad, empty=self.empty, binary=binary),
            bin_sha256=self._digest.hexdigest(),
        )


def _tell(info: DataInfo, prefix: Path) -> None:
    logger.info("%s: %s documents, %s tokens", prefix, human(info.documents), human(info.tokens))
    skipped = info.skipped
    if skipped.bad:
        logger.warning("%d bad lines are in %s", skipped.bad, quarantine_path(prefix))
    if skipped.empty:
        logger.warning("%d empty documents were left out", skipped.empty)
    if skipped.binary:
        logger.warning("%d files that are not UTF-8 text were left out", skipped.binary)
