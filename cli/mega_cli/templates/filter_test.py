"""The cleaning rule `my_extension`: documents that it keeps and drops."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

keep = runpy.run_path(str(Path(__file__).parent / "my_extension.py"))["keep"]


def test_texts_are_kept() -> None:
    assert keep({"text": "Plain words, and 3 numbers."}) is True


@pytest.mark.parametrize("text", ["", "1 + 1 = 2", "|---|---|"])
def test_tables_and_numbers_are_dropped_with_the_reason(text: str) -> None:
    assert keep({"text": text}) == "few letters"
