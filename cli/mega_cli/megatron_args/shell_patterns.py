"""Patterns of a script: shell patterns (`*`, `?` and `[...]`) and regular expressions.

RE2 matches regular expressions in linear time; Python's own engine may need exponential time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import re2

from mega_cli.megatron_args.shell_words import MARK, OPEN, WordPiece


class Re2Match(Protocol):
    """Match of a regular expression by RE2, with the interface of `re.Match`."""

    def __getitem__(self, group: int) -> str: ...

    def end(self) -> int:
        """Return the offset in the text where the match ends."""


def search_extended_regex(pattern: str, text: str) -> bool | None:
    """Return whether a POSIX extended regular expression matches in a text, or None if RE2 does not support it."""
    try:
        return _compiled(pattern, posix=True, longest=True).search(text) is not None
    except (re2.error, ValueError):
        return None


def is_regex_fullmatch(pattern: str, text: str) -> bool | None:
    """Return whether a regular expression matches all of a text, or None if RE2 does not support it."""
    try:
        return _compiled(pattern).fullmatch(text) is not None
    except (re2.error, ValueError):
        return None


def matching_prefix_length(pattern: str, text: str, *, longest: bool) -> int | None:
    """Return the length of a text's prefix that a regular expression matches, -1 for none, None if not supported by RE2.

    The shortest prefix is found if the pattern has lazy repetitions (`*?`).
    """
    try:
        found: Re2Match | None = _compiled(pattern, longest=longest).match(text)
    except (re2.error, ValueError):
        return None
    return -1 if found is None else found.end()


def replace_longest_matches(
    pattern: str, instead: str, text: str, spend: Callable[[int], None], *, every: bool
) -> str | None:
    """Return a text with the first or `every` longest match of a regular expression replaced; None if RE2 lacks support.
    Matches are replaced by `instead`; empty matches are not replaced. `spend` is called with the length of the
    result before it is created.
    """
    try:
        compiled = _compiled(pattern, longest=True)
        found = sum(1 for _ in compiled.finditer(text))
        spend(len(text) + found * len(instead))
        result: str = compiled.sub(lambda match: instead if match[0] else "", text, 0 if every else 1)
    except (re2.error, ValueError):
        return None
    return result


def replace_regex_matches(pattern: str, template: str, text: str) -> str:
    """Return a text with every match of a regular expression (RE2) replaced by a template with group references."""
    result: str = _compiled(pattern).sub(template, text)
    return result


def escape_regex(text: str) -> str:
    """Return a regular expression that matches only this text."""
    result: str = re2.escape(text)
    return result


@lru_cache(256)
def _compiled(pattern: str, *, posix: bool = False, longest: bool = False) -> re2._Regexp:
    options = re2.Options()
    options.posix_syntax = options.perl_classes = options.word_boundary = options.one_line = posix
    options.longest_match, options.log_errors = longest, False
    return re2.compile(pattern, options)


EXTENDED = re.compile(r"[@+?!*]\(")
LETTERS: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
TOKEN = re.compile(r"\\.|\[[!^]?\]?(?:\[:\w+:\]|[^]])*\]|.", re.DOTALL)


def escape_shell_pattern(text: str) -> str:
    """Return a shell pattern that matches only this text."""
    return re.sub(r"([*?[\\])", r"\\\1", text)


def convert_pieces_to_shell_pattern(pieces: Sequence[WordPiece | None]) -> str:
    """Return a shell word as one shell pattern in which quoted text is literal.
    The word is given as its quoted and unquoted pieces.
    """
    return "".join(
        escape_shell_pattern(piece.text) if piece.kind == "quoted" else piece.text for piece in pieces if piece
    )


def convert_shell_pattern_to_regex(pattern: str, *, repeat: str = "*", backwards: bool = False) -> str | None:
    """Return the regular expression of a shell pattern, or None for bash's extended patterns such as `@(a|b)`.

    Args:
        repeat: how `*` repeats: `*`, or `*?` for as little as it can.
        backwards: match a text that is read from its end.
    """
    if EXTENDED.search(pattern):
        return None

    def convert_bracket(token: str) -> str:
        if token in "*?":
            return "." + repeat if token == "*" else "."
        if token[0] == "[" and len(token) > 1:
            return "[" + re.sub(r"^[!^]", "^", token[1:-1]).replace("\\", "\\\\") + "]"
        return escape_regex(token[-1])

    tokens = [convert_bracket(match[0]) for match in TOKEN.finditer(pattern)]
    return "(?s:" + "".join(reversed(tokens) if backwards else tokens) + ")"


def matches_shell_pattern(text: str, pattern: str) -> bool | None:
    """Return whether a shell pattern matches the whole text, or None if one has unknown values or is not supported."""
    regex = convert_shell_pattern_to_regex(pattern)
    return None if regex is None or MARK.search(text + pattern) else is_regex_fullmatch(regex, text)


def apply_shell_parameter_expansion(
    text: str, operator: str, pieces: Sequence[WordPiece | None], spend: Callable[[int], None]
) -> str | None:
    """Return a shell variable's text after an expansion such as `${NAME#pattern}`, or None if it is unknown.
    Others are `${NAME/pattern/text}` or `${NAME^^}`. The operand is `pieces`.
    """
    if operator in LETTERS and not pieces:
        return None if MARK.search(text) else LETTERS[operator](text)
    if operator in ("#", "##", "%", "%%"):
        return _trimmed(text, operator, convert_pieces_to_shell_pattern(pieces))
    return _replaced(text, operator, pieces, spend) if operator in ("/", "//", "/#", "/%") else None


def _trimmed(text: str, operator: str, pattern: str) -> str | None:
    backwards, longest = operator[0] == "%", len(operator) == 2
    regex = convert_shell_pattern_to_regex(pattern, repeat="*" if longest else "*?", backwards=backwards)
    if regex is None or MARK.search(pattern):
        return None
    length = matching_prefix_length(regex, text[::-1] if backwards else text, longest=longest)
    if length is None or length < 0:
        return None if length is None or MARK.search(text) else text
    cut = len(text) - length if backwards else length
    removed, kept = (text[cut:], text[:cut]) if backwards else (text[:cut], text[cut:])
    # The unknown text may contain a shorter match, or a longer one.
    open_ = MARK.search(kept if longest else removed)
    return None if open_ or len(MARK.findall(kept)) != kept.count(OPEN) else kept


def _replaced(text: str, operator: str, pieces: Sequence[WordPiece | None], spend: Callable[[int], None]) -> str | None:
    before: list[WordPiece] = []
    after: list[WordPiece] = []
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
    regex = convert_shell_pattern_to_regex(convert_pieces_to_shell_pattern(before))
    if regex is None or MARK.search(text + convert_pieces_to_shell_pattern(before)):
        return None
    regex = {"/#": rf"\A{regex}", "/%": rf"{regex}\z"}.get(operator, regex)
    return replace_longest_matches(regex, instead, text, spend, every=operator == "//")
