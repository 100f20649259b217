"""Words of a shell script after expansion, marks for unknown values in them, and the limit of work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from mega_common.errors import ConfigError

# Unknown values are marked by their name between these two characters of Unicode's private use area.
OPEN, CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")


class ShellWord(NamedTuple):
    """Word of a shell script after expansion, and the line it comes from."""

    text: str
    line: int


class WordPiece(NamedTuple):
    """Quoted or unquoted section of a shell word under expansion, and its line; None in a list of pieces ends a word.
    `kind` is `quoted`, `plain` for text of the script, in which braces and patterns are expanded, or `value` for the
    result of an expansion, which is split at blanks.
    """

    text: str
    kind: str
    line: int


def make_unknown_placeholder(name: str) -> str:
    """Return the mark that stands for an unknown value in expanded shell text.
    `name` is `NAME`, `(command)`, `((expression))` or `{NAME}`.
    """
    return f"{OPEN}{format_unknown_placeholders(name)}{CLOSE}"


def format_unknown_placeholders(text: str) -> str:
    """Return a text with each mark of an unknown value written as in the script: `$NAME`."""
    return MARK.sub(r"$\1", text)


def is_unset_shell_parameter(text: str) -> bool:
    """Return whether a text is only the mark of a variable or argument that the script does not set."""
    match = MARK.fullmatch(text)
    return match is not None and (match[1].isidentifier() or match[1].isdigit())


def explain_unknown_flag_value(text: str) -> str:
    """Return a sentence on why a Megatron flag's value is unknown.
    It names the unset variable or unknown command in the value, else a placeholder such as `<path>`.
    """
    match = MARK.search(text)
    name = match[1] if match else ""
    if name.startswith("(("):
        return f"{format_unknown_placeholders(text)} is computed from variables that the script does not set"
    if name.startswith(("(", "`")):
        return f"{format_unknown_placeholders(text)} is the output of a command, and commands are not executed"
    if name[1:-1].isidentifier() and name.startswith("{"):
        return f"the value of {format_unknown_placeholders(text)} could not be followed through the script"
    return f"{format_unknown_placeholders(text)} is not set in the script"


def split_on_blanks(text: str) -> list[str]:
    """Return the parts of a text between blanks, with empty parts for blanks at either end.
    Blanks in marks of unknown values do not split.
    """
    return [part for part, _ in split_on_separators(text)]


def split_on_separators(text: str, separators: str = " \t\n") -> list[tuple[str, bool]]:
    """Return (part, True if the separator before it is not a blank) for the parts of a text between separators.
    Separators in marks of unknown values are ignored. Separators at either end give empty parts.

    The second value is True if the separator before the part ends an empty field, as all separators except blanks do.
    """
    if not separators:
        return [(text, False)]
    blanks = re.escape("".join(char for char in separators if char in " \t\n"))
    others = re.escape("".join(char for char in separators if char not in " \t\n"))
    patterns = [*([f"[{blanks}]*[{others}][{blanks}]*" if blanks else f"[{others}]"] if others else [])]
    patterns += [f"[{blanks}]+"] if blanks else []
    marks = iter(MARK.findall(text))
    parts = re.split(f"({'|'.join(patterns)})", MARK.sub(OPEN, text))
    fields = [re.sub(OPEN, lambda _: f"{OPEN}{next(marks)}{CLOSE}", part) for part in parts[::2]]
    return list(zip(fields, [False, *(bool(separator.strip(" \t\n")) for separator in parts[1::2])], strict=True))


WORK = 10_000_000  # characters that are created or read; real launch scripts take up to about 100,000
WORD = 16  # extra cost of a word in characters
EXPRESSION = 200  # cost in characters of a variable in arithmetic, which is an expression itself
PARSED = 10  # cost of a parsed character


@dataclass
class CharacterBudget:
    """Limit of the characters that interpretation of a launch script may create and read, so that it always ends.

    Attributes:
        left: characters that may still be created.
    """

    left: int = WORK

    def spend_characters(self, characters: int) -> None:
        """Subtract characters from the limit before they are created; a ConfigError if fewer are left.

        Raises:
            ConfigError: if none are left.
        """
        self.left -= characters
        if self.left < 0:
            raise ConfigError(
                f"the launch script creates more than {WORK:,} characters of text",
                hint="check its loops and expansions, or translate only its training command",
            )
