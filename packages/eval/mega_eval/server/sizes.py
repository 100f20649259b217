"""Sizes of tokens, to refuse a text that is too long before it is encoded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mega_data.tokenizer import Tokenizer

KEEPING_NORMALIZERS = ("Prepend", "Replace", "Sequence")  # those of SentencePiece's models, which drop no text
KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Sequence", "Split")


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return how many bytes of text one token covers at most; None where a tokenizer may drop or merge text.

    That is known of byte-pair encodings whose bytes all have a token, without normalization.
    """
    raw = json.loads(tokenizer.backend.to_str())
    return max(map(_size, tokenizer.backend.get_vocab(with_added_tokens=True)), default=1) if _keeps_text(raw) else None


def _size(token: str) -> int:
    return len(token.encode(errors="replace"))


def _keeps_text(raw: Mapping[str, Any]) -> bool:
    model = raw["model"]
    vocabulary = model.get("vocab", {})
    if model.get("type") != "BPE" or any(token.get("lstrip") or token.get("rstrip") for token in raw["added_tokens"]):
        return False
    normalizers, splits = list(_parts(raw["normalizer"])), list(_parts(raw["pre_tokenizer"]))
    if any(
        one["type"] not in KEEPING_NORMALIZERS or "Regex" in one.get("pattern", ()) or one.get("content") == ""
        for one in normalizers
    ):
        return False
    if any(one["type"] not in KEEPING_PRE_TOKENIZERS or one.get("behavior") == "Removed" for one in splits):
        return False
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    byte_level = any(one["type"] == "ByteLevel" for one in splits)
    return byte_level and sum(len(token) == 1 for token in vocabulary) >= 256


def _parts(one: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer, sequences resolved."""
    if one is None:
        return
    yield one
    for part in one.get("normalizers", one.get("pretokenizers", ())):
        yield from _parts(part)
