"""Rendered conversations to tokens and the weight of each token in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_data.chat.template import Rendered, Span
from mega_data.tokenizer import Tokenizer

HUNDREDTHS = 100  # byte of a mask that stands for weight 1, where turns have weights of their own


def token_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A token, stored as `dtype`, and its byte in the mask."""
    return np.dtype([("token", dtype), ("mask", np.uint8)])


class ChatEncoder:
    """Texts of conversations to arrays of `token_type`. A token counts where one of its characters does.

    Args:
        one: the byte that stands for weight 1.
        max_length: tokens that are kept of a conversation, from its begin.
    """

    def __init__(self, tokenizer: Tokenizer, one: int, max_length: int | None) -> None:
        self._tokenizer, self._one, self._max_length = tokenizer, one, max_length

    def encode(
        self, chats: Sequence[tuple[Rendered, ...]], dtype: npt.DTypeLike
    ) -> tuple[list[list[npt.NDArray[Any]]], int]:
        """The tokens of each text of each chat, and the number of answers of which the limit cut something.

        Where nothing that counts is left of one of a chat's texts, none of them is there.
        """
        encodings = self._tokenizer.backend.encode_batch(
            [one.text for chat in chats for one in chat], add_special_tokens=False
        )
        encoded: list[list[npt.NDArray[Any]]] = []
        cut, at = 0, 0
        for chat in chats:
            texts = []
            for one, encoding in zip(chat, encodings[at : at + len(chat)], strict=True):
                array = np.empty(len(encoding), token_type(dtype))
                array["token"] = encoding.ids
                array["mask"], lost = self._mask(encoding.offsets, one.spans)
                cut += lost
                texts.append(array[: self._max_length])
            # The first token of a sequence is nobody's label.
            whole = all(array["mask"][1:].any() for array in texts)
            encoded.append(texts if whole else [])
            at += len(chat)
        return encoded, cut

    def _mask(self, offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> tuple[npt.NDArray[np.uint8], int]:
        """The byte of each token, uint8 [n], and of how many spans the limit cuts something."""
        begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        mask, cut = np.zeros(begins.size, np.uint8), 0
        for span in spans:
            inside = (begins < span.end) & (ends > span.begin)
            mask[inside] = round(span.weight * self._one)
            cut += self._max_length is not None and bool(inside[self._max_length :].any())
        return mask, cut
