"""Tokenizer `my_extension`: bytes, and runs of spaces as one token. Change it to yours.

Wherever mega takes the folder of a tokenizer, it takes `./FOLDER/my_extension.py:my_extension`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mega_trainer.extend import CustomTokenizer, Extension

SPACES = 16  # longest run of spaces that is one token


class SpaceTokenizer:
    """Tokens 0 to 255 are bytes, the following ones 2 to 16 spaces, and the last one is the end of a text."""

    end_token = "<end>"

    def __init__(self) -> None:
        names = [f"byte {number}" for number in range(256)] + [f"{count} spaces" for count in range(2, SPACES + 1)]
        self.vocabulary = {name: number for number, name in enumerate([*names, self.end_token])}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; all of it is ordinary text, also where it spells the name of a token."""
        tokens: list[int] = []
        for part in re.split(f"( {{2,{SPACES}}})", text):
            tokens += [254 + len(part)] if part.startswith("  ") else part.encode()
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; the end token is spelled."""
        end = self.vocabulary[self.end_token]
        parts = (
            bytes([token]) if token < 256 else self.end_token.encode() if token == end else b" " * (token - 254)
            for token in ids
        )
        return b"".join(parts).decode(errors="replace")


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, tokenizers={"my_extension": CustomTokenizer(SpaceTokenizer)}
)
