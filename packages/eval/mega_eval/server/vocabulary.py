"""How single tokens are shown: as text where they are whole characters, else by their bytes."""

from __future__ import annotations

import re

from tokenizers.pre_tokenizers import ByteLevel

from mega_data.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece spells a byte


class Vocabulary:
    """Text and bytes of each token of a tokenizer, as they are within a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        # Decoders drop a space that begins a text, so that a token is looked at behind another.
        self._before = tokenizer.encode("a")[-1:]
        self._begin = len(tokenizer.decode(self._before))
        self._byte_level = _byte_level()

    def __getitem__(self, token: int) -> tuple[str, bytes]:
        """Text and bytes; a text that is no whole characters is `bytes:\\xe2\\x80`, as OpenAI has it."""
        if token not in self._known:
            self._known[token] = self._look(token)
        return self._known[token]

    def _look(self, token: int) -> tuple[str, bytes]:
        text = self._tokenizer.decode([*self._before, token])[self._begin :]
        if REPLACEMENT not in text:
            return text, text.encode()
        raw = self._bytes(self._tokenizer.backend.id_to_token(token) or text)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

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
