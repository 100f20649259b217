"""Words of a shell script, after expansion, and the marks that stand in them for what only a running shell knows."""

from __future__ import annotations

import re
from typing import NamedTuple

# What is not known stands in a text between these two characters of Unicode's private use area.
OPEN, CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")


class Word(NamedTuple):
    """A word of the script, after expansion, and the line it comes from."""

    text: str
    line: int


class Piece(NamedTuple):
    """Part of a word under expansion.

    `kind` is `quoted`, or `plain` for text of the script, which braces and patterns count in, or `value` for what an
    expansion gave, which blanks part. In a list of pieces, `None` ends a word.
    """

    text: str
    kind: str
    line: int


def unknown(name: str) -> str:
    """The mark of what has no value here: `NAME` of a variable, `(command)`, `((expression))`, `{NAME...}`."""
    return f"{OPEN}{shown(name)}{CLOSE}"


def shown(text: str) -> str:
    """A text as the script would write it: `$NAME` for each mark."""
    return MARK.sub(r"$\1", text)


def is_unset(text: str) -> bool:
    """Whether a text is nothing but a parameter that the script does not set."""
    match = MARK.fullmatch(text)
    return match is not None and (match[1].isidentifier() or match[1].isdigit())


def why_unknown(text: str) -> str:
    """A sentence on why a text has no value here: by its first mark, else as a placeholder such as `<path>`."""
    match = MARK.search(text)
    name = match[1] if match else ""
    if name.startswith("(("):
        return f"{shown(text)} is computed from what the script does not set"
    if name.startswith(("(", "`")):
        return f"{shown(text)} is what a command prints, and none is run here"
    if name[1:-1].isidentifier() and name.startswith("{"):
        return f"the value of {shown(text)} could not be followed through the script"
    return f"{shown(text)} is not set in the script"


def split_blanks(text: str) -> list[str]:
    """Return the parts of a text between blanks; empty at either end for blanks there."""
    return [part for part, _ in split_fields(text)]


def split_fields(text: str, separators: str = " \t\n") -> list[tuple[str, bool]]:
    """Return the parts of a text between separators, which in a mark count as nothing; empty at either end for those there.

    With each part comes whether the separator before it ends a field that is empty, as all but blanks do.
    """
    if not separators:
        return [(text, False)]
    blanks = re.escape("".join(one for one in separators if one in " \t\n"))
    others = re.escape("".join(one for one in separators if one not in " \t\n"))
    patterns = [*([f"[{blanks}]*[{others}][{blanks}]*" if blanks else f"[{others}]"] if others else [])]
    patterns += [f"[{blanks}]+"] if blanks else []
    marks = iter(MARK.findall(text))
    parts = re.split(f"({'|'.join(patterns)})", MARK.sub(OPEN, text))
    fields = [re.sub(OPEN, lambda _: f"{OPEN}{next(marks)}{CLOSE}", part) for part in parts[::2]]
    return list(zip(fields, [False, *(bool(one.strip(" \t\n")) for one in parts[1::2])], strict=True))
