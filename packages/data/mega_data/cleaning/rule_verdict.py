"""Verdicts of a rule on a document: keep (None), drop or change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mega_data.cleaning.text_words import AnalyzedText

TextRecord = dict[str, Any]


class DropDocument(NamedTuple):
    """Verdict of a cleaning rule to drop the document: `why` is one of the rule's few reasons, `detail` the finding in
    this document.
    """

    why: str
    detail: str = ""


class ChangeDocument(NamedTuple):
    """Verdict of a cleaning rule to keep the document with another text; `counts` are the numbers of changes by kind."""

    text: str
    counts: dict[str, int]


CleaningRule = Callable[[AnalyzedText, TextRecord], DropDocument | ChangeDocument | None]


class BoundedMeasure(NamedTuple):
    """Measured value of a document and its lower and upper limits, both inclusive."""

    name: str
    value: float
    low: float
    high: float


def check_measure_bounds(measures: Iterable[BoundedMeasure]) -> DropDocument | None:
    """Return a verdict to drop the document for the first measure outside its limits, or None; later measures are not
    evaluated.
    """
    for name, value, low, high in measures:
        if value < low:
            return DropDocument(f"{name} below {low:g}", f"{value:.4g}")
        if value > high:
            return DropDocument(f"{name} above {high:g}", f"{value:.4g}")
    return None
