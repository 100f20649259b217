"""Patterns of a shell: what `*`, `?` and `[...]` match in a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mega_cli.megatron_args.linear import escaped, full_match, prefix_length, substitute
from mega_cli.megatron_args.shell import MARK, OPEN, Piece

EXTENDED = re.compile(r"[@+?!*]\(")
LETTERS: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
TOKEN = re.compile(r"\\.|\[[!^]?\]?(?:\[:\w+:\]|[^]])*\]|.", re.DOTALL)


def quoted(text: str) -> str:
    """A text as a pattern that matches nothing else."""
    return re.sub(r"([*?[\\])", r"\\\1", text)


def pattern_of(pieces: Sequence[Piece | None]) -> str:
    """Pieces as a pattern: what is quoted stands for itself."""
    return "".join(quoted(piece.text) if piece.kind == "quoted" else piece.text for piece in pieces if piece)


def glob_regex(pattern: str, *, repeat: str = "*", backwards: bool = False) -> str | None:
    """Return the regular expression of a pattern; None for the extended patterns of bash.

    Args:
        repeat: how `*` repeats: `*`, or `*?` for as little as it can.
        backwards: match a text that is read from its end.
    """
    if EXTENDED.search(pattern):
        return None

    def one(token: str) -> str:
        if token in "*?":
            return "." + repeat if token == "*" else "."
        if token[0] == "[" and len(token) > 1:
            return "[" + re.sub(r"^[!^]", "^", token[1:-1]).replace("\\", "\\\\") + "]"
        return escaped(token[-1])

    tokens = [one(match[0]) for match in TOKEN.finditer(pattern)]
    return "(?s:" + "".join(reversed(tokens) if backwards else tokens) + ")"


def matches(text: str, pattern: str) -> bool | None:
    """Return whether a text is of a pattern, if that is known."""
    regex = glob_regex(pattern)
    return None if regex is None or MARK.search(text + pattern) else full_match(regex, text)


def changed(text: str, operator: str, pieces: Sequence[Piece | None], spend: Callable[[int], None]) -> str | None:
    """`${NAME#pattern}`, `${NAME/pattern/text}`, `${NAME^^}` and the like; None for what is not known."""
    if operator in LETTERS and not pieces:
        return None if MARK.search(text) else LETTERS[operator](text)
    if operator in ("#", "##", "%", "%%"):
        return _trimmed(text, operator, pattern_of(pieces))
    return _replaced(text, operator, pieces, spend) if operator in ("/", "//", "/#", "/%") else None


def _trimmed(text: str, operator: str, pattern: str) -> str | None:
    backwards, longest = operator[0] == "%", len(operator) == 2
    regex = glob_regex(pattern, repeat="*" if longest else "*?", backwards=backwards)
    if regex is None or MARK.search(pattern):
        return None
    length = prefix_length(regex, text[::-1] if backwards else text, longest=longest)
    if length is None or length < 0:
        return None if length is None or MARK.search(text) else text
    cut = len(text) - length if backwards else length
    removed, kept = (text[cut:], text[:cut]) if backwards else (text[:cut], text[cut:])
    # What is not known may hold a shorter match, or a longer one.
    open_ = MARK.search(kept if longest else removed)
    return None if open_ or len(MARK.findall(kept)) != kept.count(OPEN) else kept


def _replaced(text: str, operator: str, pieces: Sequence[Piece | None], spend: Callable[[int], None]) -> str | None:
    before: list[Piece] = []
    after: list[Piece] = []
    for piece in filter(None, pieces):
        if not after and piece.kind == "plain" and "/" in piece.text:
            head, _, tail = piece.text.partition("/")
            before.append(piece._replace(text=head))
            after.append(piece._replace(text=tail))
        else:
            (after or before).append(piece)
    instead = "".join(piece.text for piece in after)
    if any("&" in piece.text for piece in after if piece.kind != "quoted"):
        return None  # the text that matches from bash 5.2 on, and itself before
    if not any(piece.text for piece in before):  # matches the empty text at an anchor, and nothing elsewhere
        return {"/#": instead + text, "/%": text + instead}.get(operator, text)
    regex = glob_regex(pattern_of(before))
    if regex is None or MARK.search(text + pattern_of(before)):
        return None
    regex = {"/#": rf"\A{regex}", "/%": rf"{regex}\z"}.get(operator, regex)
    return substitute(regex, instead, text, spend, every=operator == "//")
