"""Documents to sentences, for models that are trained on pairs of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.making.encoder import Differs, Encoder
from mega_data.making.output import Sequences
from mega_data.reading.unpack import package
from mega_data.tokenizer import Tokenizer


class SentenceEncoder:
    """Encodes each sentence of a document by itself. `sentencex` tells where they end, by rules of the language.

    White space between two sentences goes to the second where that gives the tokens of both in one text; else it is left
    out, as with a tokenizer that puts a space before each text itself.

    Raises:
        DataError: when `language` is no code of a language; those it has no rules for it treats as English.
        MissingPackageError: when sentencex is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, language: str) -> None:
        if not re.fullmatch("[a-z]{2,3}", language):
            raise DataError(f"{language!r} is no code of a language", hint="such as en, de or zh")
        self._segment = package("sentencex", "sentences").segment
        self.language = language
        self._keep_space = tokenizer.encode("a. a") == tokenizer.encode("a.") + tokenizer.encode(" a")

    def encode(self, encoder: Encoder, texts: Sequence[str], dtype: npt.DTypeLike) -> list[Sequences]:
        """Token ids of each sentence of each document: `dtype` [tokens].

        Raises:
            Differs: with the number of the document, as the encoder does.
        """
        split = [self.split(text) for text in texts]
        try:
            encoded = iter(encoder.encode_batch([sentence for found in split for sentence in found], dtype))
        except Differs as error:
            error.index = [number for number, found in enumerate(split) for _ in found][error.index]
            raise
        return [[next(encoded) for _ in found] for found in split]

    def split(self, text: str) -> list[str]:
        """The sentences of a text, in order."""
        sentences, gap = [], ""
        for part in self._segment(self.language, text):
            sentence = part.rstrip()
            if sentence:
                sentences.append(gap + sentence if self._keep_space else sentence.strip())
                gap = ""
            gap += part[len(sentence) :]
        return sentences
