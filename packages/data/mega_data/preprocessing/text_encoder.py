"""Choice of the encoding library: `tokenizers`, the reference, or `fastokens` as long as it agrees with it.

fastokens reads the same tokenizer.json and is 5 to 40 times as fast. It is used only if both libraries encode the
spelling of every special, byte and added token identically. Both then encode the first megabyte of a corpus and 0.5 %
of the rest; at the first difference all output of fastokens is discarded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.progress_logging import logger
from mega_data.plain_text_tokenizer import list_token_spellings
from mega_data.reading.decompression import import_optional_package
from mega_data.tokenizer import Tokenizer

EncoderChoice = Literal["auto", "tokenizers", "fastokens"]

COMPARED_FIRST = 1 << 20  # characters at the start that are all compared
COMPARED_PART = 200  # of the rest, one in 200 is compared
SPELLED = (
    "{}",
    "a{}b",
    " {} c",
    "{0}{0}",
    "x {}\n",
)  # contexts in which each special, byte and added token is compared
SPELLINGS_AT_ONCE = 1000
WORTHWHILE = 1 << 24  # bytes of input from which the load time of about a second pays off


class BatchEncoder(Protocol):
    """Interface of encoders of many texts by a tokenizer.json.
    The encoder of the file at `path` is a `Tokenizer`, or a faster library whose results are compared with it.
    """

    path: Path

    def encode_batch(self, texts: Sequence[str], dtype: npt.DTypeLike) -> list[npt.NDArray[Any]]:
        """Return the token ids of each text, as arrays of `dtype`."""


class EncoderMismatch(Exception):
    """Error for a faster tokenizer library (fastokens) whose token ids differ from `tokenizers`, or that fails.
    It failed on text number `index` of a batch, or returned other tokens than the library `tokenizers`.

    The caller sets `where`, the file and line of the text.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index, self.where = index, ""


def choose_text_encoder(choice: EncoderChoice, tokenizer: Tokenizer, size: int, *, rereadable: bool) -> BatchEncoder:
    """Return the batch encoder for an input of `size` bytes: `tokenizer`, or the faster library fastokens.

    `auto` selects fastokens if it is installed and supports this tokenizer, the input is large enough to pay off its
    start, and it is `rereadable`, so that a mismatch can fall back to `tokenizers`.

    Raises:
        MissingPackageError: if fastokens is chosen and not installed.
        DataError: if fastokens is chosen and does not support this tokenizer.
    """
    worthwhile = rereadable and size >= WORTHWHILE and importlib.util.find_spec("fastokens") is not None
    if choice == "tokenizers" or (choice == "auto" and not worthwhile):
        return tokenizer
    try:
        encoder = ComparedFastEncoder(tokenizer, _open(tokenizer))
        _compare_spellings(encoder, tokenizer)
    except DataError as error:
        if choice == "fastokens":
            raise
        logger.info("encoder: tokenizers (%s)", error)
        return tokenizer
    logger.info(
        "encoder: fastokens %s, compared with tokenizers on the first megabyte and 1/%d of the rest",
        version("fastokens"),
        COMPARED_PART,
    )
    return encoder


def _open(tokenizer: Tokenizer) -> Any:
    native = import_optional_package("fastokens", "--encoder fastokens")
    try:
        if tokenizer.plain is not None:
            fast = native.Tokenizer.from_json_str(tokenizer.plain.json)
        else:
            fast = native.Tokenizer.from_file(str(tokenizer.path))
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException, not an Exception
        raise DataError(
            f"{tokenizer.path}: is not supported by fastokens ({error})", hint="use --encoder tokenizers"
        ) from None
    fast.no_truncation()
    fast.no_padding()
    return fast


def _compare_spellings(encoder: ComparedFastEncoder, tokenizer: Tokenizer) -> None:
    """Require equal tokens for the spelling of every special, byte and added token.

    Raises:
        DataError: at the first token whose spelling fastokens encodes differently.
    """
    for start in range(0, len(spellings := list_token_spellings(tokenizer.backend)), SPELLINGS_AT_ONCE):
        part = spellings[start : start + SPELLINGS_AT_ONCE]
        texts = [form.format(token) for token in part for form in SPELLED]
        try:
            arrays = encoder.encode_with_fastokens(texts, np.int64)
        except EncoderMismatch:
            arrays = [np.full(1, -1)] * len(texts)
        for number, (fast, reference) in enumerate(zip(arrays, tokenizer.encode_batch(texts, np.int64), strict=True)):
            if not np.array_equal(fast, reference):
                token = part[number // len(SPELLED)]
                raise DataError(
                    f"{tokenizer.path}: fastokens and tokenizers encode a text that spells {token!r} differently",
                    hint="use --encoder tokenizers",
                )


class ComparedFastEncoder:
    """Batch encoder by `fast` (a `fastokens.Tokenizer`), with a sample of the results compared with `tokenizer`.

    It is thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, fast: Any) -> None:
        self.tokenizer, self.fast, self.path = tokenizer, fast, tokenizer.path
        self.encoded = self.compared = 0  # characters; a race of two threads changes which texts are compared, no more

    def encode_batch(self, texts: Sequence[str], dtype: npt.DTypeLike) -> list[npt.NDArray[Any]]:
        """Return the token ids of each text by fastokens; EncoderMismatch if those of a compared text differ.

        Raises:
            EncoderMismatch: at a text that fails, or that `tokenizers` encodes differently.
        """
        arrays = self.encode_with_fastokens(texts, dtype)
        for index, text in enumerate(texts):
            self.encoded += len(text)
            if self.compared < COMPARED_FIRST + self.encoded // COMPARED_PART:
                self.compared += len(text)
                if not np.array_equal(arrays[index], self.tokenizer.encode_batch([text], dtype)[0]):
                    raise EncoderMismatch(index)
        return arrays

    def encode_with_fastokens(self, texts: Sequence[str], dtype: npt.DTypeLike) -> list[npt.NDArray[Any]]:
        """Return the token ids of each text by fastokens, as arrays of `dtype`, without comparison with `tokenizers`.

        Raises:
            EncoderMismatch: if fastokens fails.
        """
        try:
            ids, bounds = self.fast.encode_batch_flat(texts, False, self.tokenizer.plain is not None)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - also a Rust panic; `tokenizers` then reports any real error
            raise EncoderMismatch(0) from None
        tokens = np.frombuffer(ids, "<u4").astype(dtype)
        ends = np.frombuffer(bounds, "<u8")[1:].tolist()
        return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
