"""Rendered conversations to tokens and the weight of each token in the loss."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mega_data.chat.template import Rendered, Span
from mega_data.tokenizer import LEADS, Tokenizer

HUNDREDTHS = 100  # byte of a mask that stands for weight 1, where turns have weights of their own
MERGED = "have an answer that merges with the end of its prompt; the prompt is encoded alone, as it is served"
INSEPARABLE = (
    "have an answer that merges with the end of its prompt, and this tokenizer cannot encode it apart; the token across"
    " the boundary does not count in the loss, and the prompt differs from the one that is served"
)
NO_ANSWER = 2  # tokens that are kept of the prompt in place of a missing answer

# Texts whose tokens seldom merge with what follows: a control character, which falls back to a byte, and others.
UNMERGED = ("\x01", "a", ".", "0")

Offsets = list[tuple[int, int]]


def token_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A token, stored as `dtype`, and its byte in the mask."""
    return np.dtype([("token", dtype), ("mask", np.uint8)])


class EncodedText(NamedTuple):
    """Tokens of a text, the characters of each, and a note about the boundaries of its answers, if any."""

    ids: list[int]
    offsets: Offsets
    note: str = ""


class EncodedChats(NamedTuple):
    """Tokens of the texts of each chat, answers that the length limit cut, and chats by what is noted of them."""

    texts: list[list[npt.NDArray[Any]]]
    cut: int
    notes: Counter[str]


class ChatEncoder:
    """Encoder of conversations into arrays of `token_type`. A token counts where one of its characters does.

    The tokens before an answer are those of its prompt alone, which is what a server encodes: where the encoder merges
    the end of a prompt with the beginning of an answer, they are encoded apart, and that is noted.

    Args:
        one: the byte that stands for weight 1.
        max_length: tokens that are kept of a conversation, from its begin.
    """

    def __init__(self, tokenizer: Tokenizer, one: int, max_length: int | None) -> None:
        self._tokenizer, self._one, self._max_length = tokenizer, one, max_length
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._leads = (*LEADS, *UNMERGED, *(token.content for token in added if token.special))

    def encode(self, chats: Sequence[tuple[Rendered, ...]], dtype: npt.DTypeLike) -> EncodedChats:
        """Encode the texts of each chat.

        Where nothing that counts is left of one of a chat's texts, none of them is there.
        """
        encoded = iter(self._encode([one for chat in chats for one in chat]))
        found, cut, notes = [], 0, Counter[str]()
        for chat in chats:
            texts, noted = [], set()
            for one, text in zip(chat, encoded, strict=False):
                array = np.empty(len(text.ids), token_type(dtype))
                array["token"] = text.ids
                array["mask"], lost = self._mask(text, one.spans)
                cut += lost
                noted |= {text.note} - {""}
                texts.append(array[: self._max_length] if one.spans else array[:NO_ANSWER])
            notes.update(noted)
            # The first token of a sequence is nobody's label.
            answers = [array for array, one in zip(texts, chat, strict=True) if one.spans]
            found.append(texts if all(array["mask"][1:].any() for array in answers) else [])
        return EncodedChats(found, cut, notes)

    def _encode(self, texts: Sequence[Rendered]) -> Iterator[EncodedText]:
        """Encode texts so that the tokens of each prompt are a prefix of the tokens of the whole."""
        encodings = self._tokenizer.backend.encode_batch([one.text for one in texts], add_special_tokens=False)
        merged = self._merged([encoding.ids for encoding in encodings], texts)
        for number, (one, encoding) in enumerate(zip(texts, encodings, strict=True)):
            whole = EncodedText(encoding.ids, encoding.offsets)
            yield self._apart(one.text, merged[number], whole) if number in merged else whole

    def _merged(self, ids: Sequence[list[int]], texts: Sequence[Rendered]) -> Mapping[int, list[int]]:
        """Return the places of each text where an answer begins whose prompt has other tokens when encoded alone."""
        begins = [(number, span.begin) for number, one in enumerate(texts) for span in one.spans if span.begin]
        prompts = self._tokenizer.backend.encode_batch_fast(
            [texts[number].text[:begin] for number, begin in begins], add_special_tokens=False
        )
        merged: defaultdict[int, list[int]] = defaultdict(list)
        for (number, begin), prompt in zip(begins, prompts, strict=True):
            if ids[number][: len(prompt.ids)] != prompt.ids:
                merged[number].append(begin)
        return dict(merged)

    def _apart(self, text: str, cuts: Sequence[int], whole: EncodedText) -> EncodedText:
        """Encode a text in parts, cut at some places."""
        prompt = self._tokenizer.backend.encode(text[: cuts[0]], add_special_tokens=False)
        ids, offsets = list(prompt.ids), list(prompt.offsets)
        for begin, end in pairwise([*cuts, len(text)]):
            part = self._continued(ids, text, begin, end)
            if part is None:
                return whole._replace(note=INSEPARABLE)
            ids += part.ids
            offsets += part.offsets
        return EncodedText(ids, offsets, MERGED)

    def _continued(self, before: list[int], text: str, begin: int, end: int) -> EncodedText | None:
        """Encode `text[begin:end]` as what follows the tokens `before`, with a lead that is taken off again."""
        tokenizer = self._tokenizer
        expected = tokenizer.decode(tokenizer.encode(text[:end]))
        for lead in self._leads:
            taken = len(first := tokenizer.encode(lead))
            encoding = tokenizer.backend.encode(lead + text[begin:end], add_special_tokens=False)
            ids = encoding.ids[taken:]
            if ids and encoding.ids[:taken] == first and tokenizer.decode(before + ids) == expected:
                shift = begin - len(lead)
                return EncodedText(ids, [(low + shift, high + shift) for low, high in encoding.offsets[taken:]])
        return None

    def _mask(self, text: EncodedText, spans: Sequence[Span]) -> tuple[npt.NDArray[np.uint8], int]:
        """Return the byte of each token, uint8 [n], and the number of spans of which the limit cuts something."""
        begins, ends = np.array(text.offsets, np.int64).reshape(-1, 2).T
        mask, cut = np.zeros(begins.size, np.uint8), 0
        for span in spans:
            inside = (begins < span.end) & (ends > span.begin)
            if text.note == INSEPARABLE:
                inside &= begins >= span.begin
            mask[inside] = round(span.weight * self._one)
            cut += self._max_length is not None and bool(inside[self._max_length :].any())
        return mask, cut
