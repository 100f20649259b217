"""What a variable holds after ways of a script of which nobody knows which one it goes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import TypeVar

from mega_cli.megatron_args.expand import Value
from mega_cli.megatron_args.shell import CLOSE, OPEN, Word, unknown

T = TypeVar("T")


def texts_of(value: Value | None) -> dict[str, str] | None:
    """A value without the lines that it comes from."""
    return None if value is None else {key: word.text for key, word in value.items()}


def common_value(name: str, values: Sequence[Value | None], line: int) -> Value:
    """What is the same in the values of a variable, up to where they begin to differ; a mark stands for the rest."""
    mark = unknown("{" + name + "}")
    if any(value and set(value) != {"0"} for value in values):
        same = dict(_leading([list((texts_of(value) or {}).items()) for value in values]))
        first = next(filter(None, values))
        return {**{key: first[key] for key in same}, str(len(same)): Word(mark, line)}
    texts = [value["0"].text if value else "" for value in values]
    tokens = [re.findall(rf"{OPEN}[^{CLOSE}]*{CLOSE}|\s+|[^\s{OPEN}]+", text) for text in texts]
    start = "".join(_leading(tokens))
    return {"0": Word((start.rstrip() + " " if start.strip() else "") + mark, line)}


def _leading(lists: Sequence[Sequence[T]]) -> list[T]:
    """What several lists begin with alike."""
    return [row[0] for row in takewhile(lambda row: all(item == row[0] for item in row), zip(*lists, strict=False))]
