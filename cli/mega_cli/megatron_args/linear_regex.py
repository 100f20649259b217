"""Regular expressions of a script, matched in linear time by RE2: Python's own engine may need exponential time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import re2


class LinearMatch(Protocol):
    """Match of a regular expression by RE2, with the interface of `re.Match`."""

    def __getitem__(self, group: int) -> str: ...

    def end(self) -> int:
        """Return the offset in the text where the match ends."""


def search_extended_regex(pattern: str, text: str) -> bool | None:
    """Return whether a POSIX extended regular expression matches anywhere in a text, or None if RE2 does not support
    it.
    """
    try:
        return _compiled(pattern, posix=True, longest=True).search(text) is not None
    except (re2.error, ValueError):
        return None


def matches_whole_text(pattern: str, text: str) -> bool | None:
    """Return whether a regular expression matches all of a text, or None if RE2 does not support it."""
    try:
        return _compiled(pattern).fullmatch(text) is not None
    except (re2.error, ValueError):
        return None


def matching_prefix_length(pattern: str, text: str, *, longest: bool) -> int | None:
    """Return the length of the prefix of a text that a regular expression matches, -1 if none does, None if RE2 does
    not support the pattern.

    The shortest prefix is found if the pattern has lazy repetitions (`*?`).
    """
    try:
        found: LinearMatch | None = _compiled(pattern, longest=longest).match(text)
    except (re2.error, ValueError):
        return None
    return -1 if found is None else found.end()


def substitute_longest(
    pattern: str, instead: str, text: str, spend: Callable[[int], None], *, every: bool
) -> str | None:
    """Replace the first match of a regular expression by `instead`, or every match, each as long as possible; empty
    matches are not replaced. None if RE2 does not support the pattern.

    `spend` is called with the length of the result before it is created.
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
    """Replace every match of a regular expression that RE2 supports by a template with group references."""
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
