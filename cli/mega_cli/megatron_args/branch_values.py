"""Values of a variable after branches of a script of which the taken one is unknown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import TypeVar

from mega_cli.megatron_args.shell_words import CLOSE, OPEN, ShellWord, make_unknown_mark
from mega_cli.megatron_args.word_expansion import VariableValue

T = TypeVar("T")


def word_texts(value: VariableValue | None) -> dict[str, str] | None:
    """Return the texts of a variable's elements by key, without their line numbers."""
    return None if value is None else {key: word.text for key, word in value.items()}


def merge_branch_values(name: str, values: Sequence[VariableValue | None], line: int) -> VariableValue:
    """Merge a variable's values from branches of which the taken one is unknown: their common prefix, with a mark for
    the unknown rest.
    """
    mark = make_unknown_mark("{" + name + "}")
    if any(value and set(value) != {"0"} for value in values):
        same = dict(_common_prefix([list((word_texts(value) or {}).items()) for value in values]))
        first = next(filter(None, values))
        return {**{key: first[key] for key in same}, str(len(same)): ShellWord(mark, line)}
    texts = [value["0"].text if value else "" for value in values]
    tokens = [re.findall(rf"{OPEN}[^{CLOSE}]*{CLOSE}|\s+|[^\s{OPEN}]+", text) for text in texts]
    start = "".join(_common_prefix(tokens))
    return {"0": ShellWord((start.rstrip() + " " if start.strip() else "") + mark, line)}


def _common_prefix(lists: Sequence[Sequence[T]]) -> list[T]:
    """Return the common prefix of several lists."""
    return [row[0] for row in takewhile(lambda row: all(item == row[0] for item in row), zip(*lists, strict=False))]
