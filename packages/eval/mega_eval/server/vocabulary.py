"""Spelling of single tokens in OpenAI's API: as text where they are whole characters, else by their bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from mega_data.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece spells a byte


class TokenText(NamedTuple):
    """Spelling of a token.

    Attributes:
        text: None where its bytes are not whole characters.
        raw: its bytes.
        special: whether texts usually leave it out.
    """

    text: str | None
    raw: bytes
    special: bool

    @property
    def in_chat(self) -> str:
        r"""Name in the log-probabilities of a chat: bytes that are not whole characters are `\xe2\x80`."""
        return "".join(f"\\x{byte:02x}" for byte in self.raw) if self.text is None else self.text

    @property
    def in_completion(self) -> str:
        r"""Name in the log-probabilities of a completion: there the same bytes are `bytes:\xe2\x80`."""
        return f"bytes:{self.in_chat}" if self.text is None else self.text


class Vocabulary:
    """Text and bytes of each token of a tokenizer, as they are within a text.

    Attributes:
        specials: token ids of special tokens, by their texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        added = tokenizer.backend.get_added_tokens_decoder()
        self.specials = {token.content: number for number, token in added.items() if token.special}
        # Decoders drop a space that begins a text, so that a token is looked at behind another.
        self._before = tokenizer.encode("a")[-1:]
        self._begin = len(tokenizer.decode(self._before))
        self._byte_level = _byte_level()

    def __getitem__(self, token: int) -> TokenText:
        """Return the spelling of a token."""
        if token not in self._known:
            self._known[token] = self._look(token)
        return self._known[token]

    def _look(self, token: int) -> TokenText:
        text = self._tokenizer.decode([*self._before, token])[self._begin :]
        if REPLACEMENT not in text:
            return TokenText(text, text.encode(), text in self.specials)
        raw = self._bytes(self._tokenizer.backend.id_to_token(token) or text)
        try:
            return TokenText(raw.decode(), raw, special=False)
        except UnicodeDecodeError:
            return TokenText(None, raw, special=False)

    def _bytes(self, spelt: str) -> bytes:
        if found := FALLBACK.fullmatch(spelt):
            return bytes([int(found[1], 16)])
        if all(letter in self._byte_level for letter in spelt):
            return bytes(self._byte_level[letter] for letter in spelt)
        return spelt.encode()


def _byte_level() -> dict[str, int]:
    """What byte each letter of byte-level vocabularies stands for: itself, or in order where a byte is not printable."""
    letters = sorted(ByteLevel.alphabet())
    themselves = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = sorted(set(range(256)) - set(themselves.values()))
    return themselves | dict(zip([letter for letter in letters if ord(letter) >= 256], others, strict=True))
