"""Batches of documents to batches of tokens, by as many threads as there are workers, in order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mega_common.errors import DataError, MegaError
from mega_data.chat.encode import EncodedChats
from mega_data.chat.prepare import Chats
from mega_data.making.batches import Batch
from mega_data.making.encoder import Differs, Encoder
from mega_data.making.output import Sequences
from mega_data.reading.documents import Document
from mega_data.reading.split_sentences import SentenceEncoder

AHEAD = 1 << 22  # bytes of text per worker that may wait or be under way


@dataclass(frozen=True)
class Encoding:
    """How documents become tokens."""

    encoder: Encoder
    chats: Chats | None
    by_sentence: SentenceEncoder | None

    def encode(self, documents: Sequence[Document], dtype: np.dtype[Any]) -> EncodedChats:
        """Return the sequences of each document; of conversations also what is to be reported of them."""
        if self.chats:
            encoded = self.chats.encoder.encode([document.chats for document in documents], dtype)
            encoded.notes.update(note for document in documents for note in document.notes)
            return encoded
        texts = [document.text for document in documents]
        if self.by_sentence:
            return EncodedChats(self.by_sentence.encode(self.encoder, texts, dtype), 0, Counter())
        return EncodedChats([[ids] for ids in self.encoder.encode_batch(texts, dtype)], 0, Counter())


def encode_all(
    batches: Iterable[Batch], encoding: Encoding, dtype: np.dtype[Any], workers: int
) -> Generator[tuple[Batch, list[Sequences]], None, None]:
    """Each batch with its tokens, in order; at most `AHEAD` bytes per worker (or one batch) are under way."""
    if workers == 1:  # a thread of its own would cost more, in memory arenas, than it saves
        yield from ((batch, _encode(batch, encoding, dtype)) for batch in batches)
        return
    pending: deque[tuple[Batch, Future[list[Sequences]]]] = deque()
    under_way = 0
    failure: MegaError | None = None
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    try:
        try:
            for batch in batches:
                while pending and under_way + batch.size > workers * AHEAD:
                    under_way -= pending[0][0].size
                    yield _finished(*pending.popleft())
                pending.append((batch, pool.submit(_encode, batch, encoding, dtype)))
                under_way += batch.size
                while pending and pending[0][1].done():
                    under_way -= pending[0][0].size
                    yield _finished(*pending.popleft())
        except MegaError as error:  # of the batch that would come next: what is under way is worth keeping
            failure = error
        while pending:
            yield _finished(*pending.popleft())
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(batch: Batch, future: Future[list[Sequences]]) -> tuple[Batch, list[Sequences]]:
    return batch, future.result()


def _encode(batch: Batch, encoding: Encoding, dtype: np.dtype[Any]) -> list[Sequences]:
    if not batch.documents:
        return []
    try:
        found, batch.cut, batch.notes = encoding.encode(batch.documents, dtype)
        if batch.lead:
            found[0][0] = found[0][0][batch.lead :]
    except Differs as error:
        error.where = batch.documents[error.index].where
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise _blame(batch, encoding, dtype, error) from error
    return found


def _blame(batch: Batch, encoding: Encoding, dtype: np.dtype[Any], error: BaseException) -> DataError:
    """Find the document of a batch that the tokenizer fails on."""
    path = encoding.encoder.path
    for document in batch.documents:
        try:
            encoding.encode([document], dtype)
        except KeyboardInterrupt:
            raise
        except BaseException as own:  # noqa: BLE001 - as above; it is told, not lost
            return DataError(f"{document.where}: the tokenizer {path} fails on this document ({own})")
    first, last = batch.documents[0], batch.documents[-1]
    return DataError(f"{first.where} to {last.where}: the tokenizer {path} fails on this batch ({error})")
