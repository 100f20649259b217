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
from mega_data.chat.chat_preparation import EncodedChats, RecordConverter
from mega_data.preprocessing.dataset_output import Sequences
from mega_data.preprocessing.text_batches import TextBatch
from mega_data.preprocessing.text_encoder import BatchEncoder, EncoderMismatch
from mega_data.reading.decompression import import_optional_package
from mega_data.reading.documents import Document
from mega_data.tokenizer import Tokenizer


class SentenceEncoder:
    """Encoder of documents that encodes each sentence by itself.
    Documents are split into sentences by the package sentencex.

    White space between two sentences belongs to the second if both then encode to the tokens of the joined text; else
    it is dropped, for example for a tokenizer that puts a space before each text.

    Raises:
        DataError: if `language` is not a language code. A language without rules is split as English.
        MissingPackageError: if sentencex is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, language: str) -> None:
        if not re.fullmatch("[a-z]{2,3}", language):
            raise DataError(
                f"--language must be an ISO 639 language code, not {language!r}",
                hint="use a code such as en, de or zh",
            )
        self._segment = import_optional_package("sentencex", "--split-sentences").segment
        self.language = language
        self._keep_space = tokenizer.encode("a. a") == tokenizer.encode("a.") + tokenizer.encode(" a")

    def encode_documents(self, encoder: BatchEncoder, texts: Sequence[str], dtype: npt.DTypeLike) -> list[Sequences]:
        """Return the token ids of each sentence of each document, as arrays of `dtype`.

        Raises:
            EncoderMismatch: as `encoder` raises it, with the index of the document.
        """
        split = [self.split_sentences(text) for text in texts]
        try:
            encoded = iter(encoder.encode_batch([sentence for sentences in split for sentence in sentences], dtype))
        except EncoderMismatch as error:
            error.index = [number for number, sentences in enumerate(split) for _ in sentences][error.index]
            raise
        return [[next(encoded) for _ in sentences] for sentences in split]

    def split_sentences(self, text: str) -> list[str]:
        """Return the sentences of a text in order, each without trailing whitespace; empty sentences are left out."""
        sentences, gap = [], ""
        for part in self._segment(self.language, text):
            sentence = part.rstrip()
            if sentence:
                sentences.append(gap + sentence if self._keep_space else sentence.strip())
                gap = ""
            gap += part[len(sentence) :]
        return sentences


READ_AHEAD = 1 << 22  # bytes of text per worker that may be queued or in progress


@dataclass(frozen=True)
class DocumentEncoder:
    """Encoder of documents to token sequences: each as one text, by sentences, or as a conversation."""

    encoder: BatchEncoder
    chats: RecordConverter | None
    by_sentence: SentenceEncoder | None

    def encode_documents(self, documents: Sequence[Document], dtype: np.dtype[Any]) -> EncodedChats:
        """Return the token sequences of each document.
        For conversations, the number of answers cut by the length limit, and notes for the log, are returned, too.
        """
        if self.chats:
            return self.chats.encode_documents(documents, dtype)
        texts = [document.text for document in documents]
        if self.by_sentence:
            return EncodedChats(self.by_sentence.encode_documents(self.encoder, texts, dtype), 0, Counter())
        return EncodedChats([[ids] for ids in self.encoder.encode_batch(texts, dtype)], 0, Counter())


def encode_document_batches(
    batches: Iterable[TextBatch], encoding: DocumentEncoder, dtype: np.dtype[Any], workers: int
) -> Generator[tuple[TextBatch, list[Sequences]], None, None]:
    """Yield each batch of documents with their token sequences, in order, encoded by several threads.
    There are `workers` threads, which run at most `READ_AHEAD` (4 MiB of text) per worker, or one batch, ahead.
    """
    if workers == 1:  # a single worker thread costs more, in memory arenas, than it saves
        yield from ((batch, _encode_batch(batch, encoding, dtype)) for batch in batches)
        return
    pending: deque[tuple[TextBatch, Future[list[Sequences]]]] = deque()
    pending_bytes = 0
    failure: MegaError | None = None
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    try:
        try:
            for batch in batches:
                while pending and pending_bytes + batch.size > workers * READ_AHEAD:
                    pending_bytes -= pending[0][0].size
                    yield _pop_finished(pending)
                pending.append((batch, pool.submit(_encode_batch, batch, encoding, dtype)))
                pending_bytes += batch.size
                while pending and pending[0][1].done():
                    pending_bytes -= pending[0][0].size
                    yield _pop_finished(pending)
        except MegaError as error:  # raised while the next batch was read: the pending ones are still good
            failure = error
        while pending:
            yield _pop_finished(pending)
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pop_finished(pending: deque[tuple[TextBatch, Future[list[Sequences]]]]) -> tuple[TextBatch, list[Sequences]]:
    batch, future = pending.popleft()
    return batch, future.result()


def _encode_batch(batch: TextBatch, encoding: DocumentEncoder, dtype: np.dtype[Any]) -> list[Sequences]:
    if not batch.documents:
        return []
    try:
        sequences, batch.cut, batch.notes = encoding.encode_documents(batch.documents, dtype)
        if batch.lead:
            sequences[0][0] = sequences[0][0][batch.lead :]
    except EncoderMismatch as error:
        error.where = batch.documents[error.index].location
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a Rust panic is a BaseException, not an Exception
        raise _find_failing_document(batch, encoding, dtype, error) from error
    return sequences


def _find_failing_document(
    batch: TextBatch, encoding: DocumentEncoder, dtype: np.dtype[Any], error: BaseException
) -> DataError:
    """Return an error that names the document of a batch on which the tokenizer fails."""
    path = encoding.encoder.path
    for document in batch.documents:
        try:
            encoding.encode_documents([document], dtype)
        except KeyboardInterrupt:
            raise
        except BaseException as cause:  # noqa: BLE001 - a Rust panic, and it is reported
            return DataError(f"{document.location}: the tokenizer {path} fails on this document ({cause})")
    first, last = batch.documents[0], batch.documents[-1]
    return DataError(f"{first.location} to {last.location}: the tokenizer {path} fails on this batch ({error})")
