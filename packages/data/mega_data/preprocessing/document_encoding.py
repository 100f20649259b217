"""Encoding of document batches to tokens by worker threads, in order, and by sentences if requested."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError, MegaError
from mega_data.chat.chat_preparation import ChatPreparation, EncodedChats
from mega_data.preprocessing.dataset_output import Sequences
from mega_data.preprocessing.text_batches import TextBatch
from mega_data.preprocessing.text_encoder import BatchEncoder, EncoderMismatch
from mega_data.reading.decompression import import_optional
from mega_data.reading.documents import Document
from mega_data.tokenizer import Tokenizer


class SentenceEncoder:
    """Encoder of each sentence of a document by itself. `sentencex` splits them by rules of the language.

    White space between two sentences goes to the second where that gives the tokens of both in one text; else it is left
    out, as with a tokenizer that puts a space before each text itself.

    Raises:
        DataError: when `language` is no code of a language; those it has no rules for it treats as English.
        MissingPackageError: when sentencex is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, language: str) -> None:
        if not re.fullmatch("[a-z]{2,3}", language):
            raise DataError(f"{language!r} is no code of a language", hint="such as en, de or zh")
        self._segment = import_optional("sentencex", "sentences").segment
        self.language = language
        self._keep_space = tokenizer.encode("a. a") == tokenizer.encode("a.") + tokenizer.encode(" a")

    def encode_documents(self, encoder: BatchEncoder, texts: Sequence[str], dtype: npt.DTypeLike) -> list[Sequences]:
        """Return the token ids of each sentence of each document: `dtype` [tokens].

        Raises:
            Differs: with the number of the document, as the encoder does.
        """
        split = [self.split_sentences(text) for text in texts]
        try:
            encoded = iter(encoder.encode_batch([sentence for found in split for sentence in found], dtype))
        except EncoderMismatch as error:
            error.index = [number for number, found in enumerate(split) for _ in found][error.index]
            raise
        return [[next(encoded) for _ in found] for found in split]

    def split_sentences(self, text: str) -> list[str]:
        """Return the sentences of a text, in order."""
        sentences, gap = [], ""
        for part in self._segment(self.language, text):
            sentence = part.rstrip()
            if sentence:
                sentences.append(gap + sentence if self._keep_space else sentence.strip())
                gap = ""
            gap += part[len(sentence) :]
        return sentences


AHEAD = 1 << 22  # bytes of text per worker that may wait or be under way


@dataclass(frozen=True)
class DocumentEncoder:
    """Encoder of documents: as text, by sentences or as conversations."""

    encoder: BatchEncoder
    chats: ChatPreparation | None
    by_sentence: SentenceEncoder | None

    def encode_documents(self, documents: Sequence[Document], dtype: np.dtype[Any]) -> EncodedChats:
        """Return the sequences of each document, and for conversations the notes to report."""
        if self.chats:
            encoded = self.chats.encoder.encode_chats([document.chats for document in documents], dtype)
            encoded.notes.update(note for document in documents for note in document.notes)
            return encoded
        texts = [document.text for document in documents]
        if self.by_sentence:
            return EncodedChats(self.by_sentence.encode_documents(self.encoder, texts, dtype), 0, Counter())
        return EncodedChats([[ids] for ids in self.encoder.encode_batch(texts, dtype)], 0, Counter())


def encode_batches(
    batches: Iterable[TextBatch], encoding: DocumentEncoder, dtype: np.dtype[Any], workers: int
) -> Generator[tuple[TextBatch, list[Sequences]], None, None]:
    """Yield each batch with its tokens, in order; at most `AHEAD` bytes per worker (or one batch) are in progress."""
    if workers == 1:  # a thread of its own would cost more, in memory arenas, than it saves
        yield from ((batch, _encode_batch(batch, encoding, dtype)) for batch in batches)
        return
    pending: deque[tuple[TextBatch, Future[list[Sequences]]]] = deque()
    under_way = 0
    failure: MegaError | None = None
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    try:
        try:
            for batch in batches:
                while pending and under_way + batch.size > workers * AHEAD:
                    under_way -= pending[0][0].size
                    yield _await_batch(*pending.popleft())
                pending.append((batch, pool.submit(_encode_batch, batch, encoding, dtype)))
                under_way += batch.size
                while pending and pending[0][1].done():
                    under_way -= pending[0][0].size
                    yield _await_batch(*pending.popleft())
        except MegaError as error:  # of the batch that would come next: what is under way is worth keeping
            failure = error
        while pending:
            yield _await_batch(*pending.popleft())
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _await_batch(batch: TextBatch, future: Future[list[Sequences]]) -> tuple[TextBatch, list[Sequences]]:
    return batch, future.result()


def _encode_batch(batch: TextBatch, encoding: DocumentEncoder, dtype: np.dtype[Any]) -> list[Sequences]:
    if not batch.documents:
        return []
    try:
        found, batch.cut, batch.notes = encoding.encode_documents(batch.documents, dtype)
        if batch.lead:
            found[0][0] = found[0][0][batch.lead :]
    except EncoderMismatch as error:
        error.where = batch.documents[error.index].location
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise _find_failing_document(batch, encoding, dtype, error) from error
    return found


def _find_failing_document(
    batch: TextBatch, encoding: DocumentEncoder, dtype: np.dtype[Any], error: BaseException
) -> DataError:
    """Find the document of a batch on which the tokenizer fails, and return the error."""
    path = encoding.encoder.path
    for document in batch.documents:
        try:
            encoding.encode_documents([document], dtype)
        except KeyboardInterrupt:
            raise
        except BaseException as own:  # noqa: BLE001 - as above; it is told, not lost
            return DataError(f"{document.location}: the tokenizer {path} fails on this document ({own})")
    first, last = batch.documents[0], batch.documents[-1]
    return DataError(f"{first.location} to {last.location}: the tokenizer {path} fails on this batch ({error})")
