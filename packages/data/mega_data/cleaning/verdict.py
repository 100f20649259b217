"""What a rule says about a document: nothing, that it goes, or how it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mega_data.cleaning.words import Text

Record = dict[str, Any]


class Drop(NamedTuple):
    """The document goes: `why`, one of the few reasons that a rule has, and what was found in this one."""

    why: str
    detail: str = ""


class Change(NamedTuple):
    """The document goes on with another text; `counts` says how much was changed, by kind."""

    text: str
    counts: dict[str, int]


Rule = Callable[[Text, Record], Drop | Change | None]


class Measure(NamedTuple):
    """A number of a document, and between which it may lie, both included."""

    name: str
    value: float
    low: float
    high: float


def first_outside(measures: Iterable[Measure]) -> Drop | None:
    """The first measure that lies outside its limits, as a reason; those after it are not taken."""
    for name, value, low, high in measures:
        if value < low:
            return Drop(f"{name} below {low:g}", f"{value:.4g}")
        if value > high:
            return Drop(f"{name} above {high:g}", f"{value:.4g}")
    return None
