"""Who encodes a corpus: `tokenizers`, whose tokens count, or `fastokens` for as long as it makes the same ones.

fastokens reads the same tokenizer.json and is 5 to 40 times as fast. Nothing says that it always agrees, so both encode
the first megabyte of a corpus and a two-hundredth of what follows. At the first difference nothing of what it made
is kept.
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
from mega_common.log import logger
from mega_data.reading.unpack import package
from mega_data.tokenizer import Tokenizer

Choice = Literal["auto", "tokenizers", "fastokens"]

COMPARED_FIRST = 1 << 20  # characters, and after them
COMPARED_PART = 200  # one of so many
WORTHWHILE = 1 << 24  # bytes of input from which on the second or so to open it is regained


class Encoder(Protocol):
    """What makes tokens of texts by the tokenizer.json at `path`: a `Tokenizer`, or a faster one that is watched."""

    path: Path

    def encode_batch(self, texts: Sequence[str], dtype: npt.DTypeLike) -> list[npt.NDArray[Any]]:
        """Token ids of many texts, one array `dtype` [tokens] each."""


class Differs(Exception):
    """The faster encoder fails on text number `index` of a batch, or makes other tokens of it than `tokenizers`.

    Whoever knows says `where` that is from.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index, self.where = index, ""


def choose_encoder(choice: Choice, tokenizer: Tokenizer, size: int, *, again: bool) -> Encoder:
    """The encoder for `size` bytes of input, which can be read `again` or not.

    `auto` takes fastokens where it is installed, reads this tokenizer, and can be given up for `tokenizers`.

    Raises:
        MissingPackageError, DataError: when fastokens is asked for, and not installed or no reader of this tokenizer.
    """
    worthwhile = again and size >= WORTHWHILE and importlib.util.find_spec("fastokens") is not None
    if choice == "tokenizers" or (choice == "auto" and not worthwhile):
        return tokenizer
    try:
        encoder = FastEncoder(tokenizer, _open(tokenizer))
    except DataError as error:
        if choice == "fastokens":
            raise
        logger.info("tokenizers encodes: %s", error)
        return tokenizer
    logger.info(
        "fastokens %s encodes, and is compared with tokenizers on the first megabyte and one part in %d",
        version("fastokens"),
        COMPARED_PART,
    )
    return encoder


def _open(tokenizer: Tokenizer) -> Any:
    native = package("fastokens", "--encoder fastokens does")
    try:
        fast = native.Tokenizer.from_file(str(tokenizer.path))
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        raise DataError(
            f"{tokenizer.path}: fastokens does not read this tokenizer ({error})", hint="--encoder tokenizers does"
        ) from None
    fast.no_truncation()
    fast.no_padding()
    return fast


class FastEncoder:
    """`fast` (a `fastokens.Tokenizer`), watched by `tokenizer`. Several threads may use it at once."""

    def __init__(self, tokenizer: Tokenizer, fast: Any) -> None:
        self.tokenizer, self.fast, self.path = tokenizer, fast, tokenizer.path
        self.seen = self.compared = 0  # characters; two threads that add at once may compare a text more or less

    def encode_batch(self, texts: Sequence[str], dtype: npt.DTypeLike) -> list[npt.NDArray[Any]]:
        """Token ids of many texts, one array `dtype` [tokens] each.

        Raises:
            Differs: at a text that fails, or of which `tokenizers` makes others.
        """
        try:
            ids, bounds = self.fast.encode_batch_flat(texts, False, self.tokenizer.specials_as_text)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - a panic in Rust is no Exception; whatever it is, `tokenizers` will say
            raise Differs(0) from None
        tokens = np.frombuffer(ids, "<u4").astype(dtype)
        ends = np.frombuffer(bounds, "<u8")[1:].tolist()
        arrays = [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        for index, text in enumerate(texts):
            self.seen += len(text)
            if self.compared < COMPARED_FIRST + self.seen // COMPARED_PART:
                self.compared += len(text)
                if not np.array_equal(arrays[index], self.tokenizer.encode_batch([text], dtype)[0]):
                    raise Differs(index)
        return arrays
