"""Cleaning rule `my_extension`: documents with few letters are dropped. Change it to yours.

`filter` of clean.yaml names the function. It is called in several processes, with each document that the other rules keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALLEST_SHARE = 0.5


def keep(record: Mapping[str, Any]) -> bool | str:
    """Return True to keep a document, or the reason why it is dropped."""
    text = record["text"]
    share = sum(letter.isalpha() for letter in text) / max(1, len(text))
    return share >= SMALLEST_SHARE or "few letters"
