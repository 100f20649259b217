"""Spelling of single tokens in OpenAI's API: as text if they are whole characters, else by their bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from mega_data.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte token of SentencePiece


class LogprobToken(NamedTuple):
    """Text and bytes of one token, for the names of tokens in log-probabilities.

    Attributes:
        text: text of the token; None if its bytes are not whole characters.
        raw: bytes of the token.
        special: True for special tokens, which decoded texts usually leave out.
    """

    text: str | None
    raw: bytes
    special: bool

    @property
    def chat_spelling(self) -> str:
        r"""Text of the token in a chat's log-probabilities; bytes of an incomplete character: `\xe2\x80`."""
        return "".join(f"\\x{byte:02x}" for byte in self.raw) if self.text is None else self.text

    @property
    def completion_spelling(self) -> str:
        r"""Text of the token in a completion's log-probabilities; bytes of an incomplete character: `bytes:\xe2\x80`."""
        return f"bytes:{self.chat_spelling}" if self.text is None else self.text


class Vocabulary:
    """Lookup of the text and bytes that each token of a tokenizer has in the middle of a text.

    Attributes:
        specials: token ids of special tokens, by their texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, LogprobToken] = {}
        added = tokenizer.backend.get_added_tokens_decoder()
        self.specials = {token.content: number for number, token in added.items() if token.special}
        # decoders drop a leading space, so each token is decoded after another one
        self._before = tokenizer.encode("a")[-1:]
        self._begin = len(tokenizer.decode(self._before))
        self._byte_level = _byte_level_alphabet()

    def __getitem__(self, token: int) -> LogprobToken:
        """Return the text and bytes of the token with id `token`."""
        if token not in self._known:
            self._known[token] = self._decode_token(token)
        return self._known[token]

    def _decode_token(self, token: int) -> LogprobToken:
        """Return the spelling of a token, decoded after another token."""
        text = self._tokenizer.decode([*self._before, token])[self._begin :]
        if REPLACEMENT not in text:
            return LogprobToken(text, text.encode(), text in self.specials)
        raw = self._token_bytes(self._tokenizer.backend.id_to_token(token) or text)
        try:
            return LogprobToken(raw.decode(), raw, special=False)
        except UnicodeDecodeError:
            return LogprobToken(None, raw, special=False)

    def _token_bytes(self, entry: str) -> bytes:
        """Return the bytes of a vocabulary entry that is not whole characters."""
        if found := FALLBACK.fullmatch(entry):
            return bytes([int(found[1], 16)])
        if all(letter in self._byte_level for letter in entry):
            return bytes(self._byte_level[letter] for letter in entry)
        return entry.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each letter of byte-level vocabularies stands for: itself, or in order for non-printable
    bytes.
    """
    letters = sorted(ByteLevel.alphabet())
    printable = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | dict(zip([letter for letter in letters if ord(letter) >= 256], others, strict=True))


KEEPING_NORMALIZERS = ("Prepend", "Replace", "Sequence")  # normalizers of SentencePiece models, which drop no text
KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Sequence", "Split")


def find_max_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Return the largest number of bytes of text of a token; None for a tokenizer that may drop or merge text.

    The maximum exists for byte-pair encodings without normalization in which every byte has a token.
    """
    if tokenizer.extension is not None:
        return None
    raw = json.loads(tokenizer.backend.to_str())
    return (
        max(map(_count_bytes, tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)
        if _keeps_text(raw)
        else None
    )


def _count_bytes(token: str) -> int:
    """Return the number of bytes of a token."""
    return len(token.encode(errors="replace"))


def _keeps_text(raw: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer keeps all bytes of a text."""
    model = raw["model"]
    vocabulary = model.get("vocab", {})
    if model.get("type") != "BPE" or any(token.get("lstrip") or token.get("rstrip") for token in raw["added_tokens"]):
        return False
    normalizers, splits = list(_iterate_parts(raw["normalizer"])), list(_iterate_parts(raw["pre_tokenizer"]))
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


def _iterate_parts(one: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer, sequences resolved."""
    if one is None:
        return
    yield one
    for part in one.get("normalizers", one.get("pretokenizers", ())):
        yield from _iterate_parts(part)
