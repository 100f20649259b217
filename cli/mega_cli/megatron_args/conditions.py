"""Conditions of a script, `[ ... ]` and `[[ ... ]]`, as far as the script itself decides them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from mega_cli.megatron_args.shell import MARK, is_unset

Truth = bool | None  # None: not known

NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


def test(words: Sequence[str]) -> Truth:
    """Whether a command holds; only tests of text and numbers are known.

    A parameter that the script does not set counts as empty where only its presence is asked for.
    """
    if words[:1] == ["!"]:
        return negation(test(words[1:]))
    if words[:1] == ["[["] and words[-1] == "]]":
        return _any(words[1:-1], "||", "&&")
    if words[:1] == ["["] and words[-1] == "]":
        return _any(words[1:-1], "-o", "-a")
    if words[:1] == ["test"]:
        return _any(words[1:], "-o", "-a")
    return {"true": True, ":": True, "false": False}.get(" ".join(words))


def negation(value: Truth) -> Truth:
    """The opposite; of what is not known, not known."""
    return None if value is None else not value


def both(left: Truth, right: Truth) -> Truth:
    """Whether both hold."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def either(left: Truth, right: Truth) -> Truth:
    """Whether one of the two holds."""
    return negation(both(negation(left), negation(right)))


def _any(words: Sequence[str], or_: str, and_: str) -> Truth:
    if or_ in words:
        at = words.index(or_)
        return either(_any(words[:at], or_, and_), _any(words[at + 1 :], or_, and_))
    if and_ in words:
        at = words.index(and_)
        return both(_any(words[:at], or_, and_), _any(words[at + 1 :], or_, and_))
    return _single(words, pattern=or_ == "||")


def _single(words: Sequence[str], *, pattern: bool) -> Truth:
    match words:
        case ["!", *rest]:
            return negation(_single(rest, pattern=pattern))
        case ["-n", text] | [text]:
            return _present(text)
        case ["-z", text]:
            return negation(_present(text))
        case [left, "=" | "==" | "!=" as sign, right] if not MARK.search(left + right):
            same = fnmatchcase(left, right) if pattern else left == right
            return same == (sign != "!=")
        case [left, sign, right] if sign in NUMERIC:
            try:
                return NUMERIC[sign](int(left), int(right))
            except ValueError:
                return None
    return None


def _present(text: str) -> Truth:
    if is_unset(text):
        return False
    return bool(text) if MARK.sub("", text) or not text else None
