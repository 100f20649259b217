"""Conditions of a script, `[ ... ]` and `[[ ... ]]`, as far as the script itself determines them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mega_cli.megatron_args.shell_patterns import matches_shell_pattern, search_extended_regex
from mega_cli.megatron_args.shell_words import MARK, is_unset_shell_parameter

KnownTruth = bool | None  # None: unknown

NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
LONGEST_CONDITION = 1000  # words
SIGNS = frozenset({"=", "==", "!=", "=~", "<", ">", *NUMERIC})


class ShellConditionOperand(NamedTuple):
    """Word of a shell condition: its text, and its form as a shell pattern."""

    text: str
    pattern: str


def three_valued_not(value: KnownTruth) -> KnownTruth:
    """Return `not value`, where None is an unknown truth and stays None."""
    return None if value is None else not value


def three_valued_and(left: KnownTruth, right: KnownTruth) -> KnownTruth:
    """Return `left and right`, where None is an unknown truth: False and None is False."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def three_valued_or(left: KnownTruth, right: KnownTruth) -> KnownTruth:
    """Return `left or right`, where None is an unknown truth: True or None is True."""
    return three_valued_not(three_valued_and(three_valued_not(left), three_valued_not(right)))


class ShellConditionEvaluator:
    """Evaluator of a shell condition, `[ ... ]` or `[[ ... ]]`, given as words.

    `value` returns the text of a word in a comparison: empty for an unset variable, None if unknown. `number` evaluates
    arithmetic.
    """

    def __init__(
        self,
        words: Sequence[ShellConditionOperand],
        value: Callable[[str], str | None],
        number: Callable[[str], int | None],
    ) -> None:
        self.words, self.value, self.number = list(words), value, number

    def evaluate(self) -> KnownTruth:
        """Return the truth of the condition, or None if the script does not determine it or it is not a condition."""
        if not self.words:
            return False
        if len(self.words) > LONGEST_CONDITION:
            return None
        result = self._any()
        return None if self.words else result

    def _take(self, *texts: str) -> bool:
        found = bool(self.words) and self.words[0].text in texts
        if found:
            self.words.pop(0)
        return found

    def _any(self) -> KnownTruth:
        result = self._all()
        while self._take("||", "-o"):
            result = three_valued_or(result, self._all())
        return result

    def _all(self) -> KnownTruth:
        result = self._one()
        while self._take("&&", "-a"):
            result = three_valued_and(result, self._one())
        return result

    def _one(self) -> KnownTruth:
        texts = [word.text for word in self.words[:3]]
        if len(texts) == 3 and texts[1] in SIGNS:
            left, sign, right = self.words[:3]
            del self.words[:3]
            return self._compared(left, sign.text, right)
        if self._take("!"):
            return three_valued_not(self._one())
        if self._take("("):
            result = self._any()
            return result if self._take(")") else None
        if len(texts) > 1 and re.fullmatch("-[a-zA-Z]", texts[0]):
            del self.words[:2]
            if texts[0] in ("-n", "-z"):
                return self._present(texts[1]) == (texts[0] == "-n") if self._present(texts[1]) is not None else None
            return None
        return self._present(self.words.pop(0).text) if self.words else None

    def _compared(self, left: ShellConditionOperand, sign: str, right: ShellConditionOperand) -> KnownTruth:
        if sign in NUMERIC:
            numbers = [self._whole(left.text), self._whole(right.text)]
            if None in numbers:
                return None if any(self.value(word.text) is None for word in (left, right)) else False
            return NUMERIC[sign](*(number for number in numbers if number is not None))
        text, other = self.value(left.text), self.value(right.text)
        if text is None or other is None:
            return None
        if sign in "<>":
            return text < other if sign == "<" else text > other
        if sign == "=~":
            return None if re.search(r"\$[\w{(]", right.pattern) else search_extended_regex(right.pattern, text)
        same = matches_shell_pattern(text, right.pattern if other else "")
        return three_valued_not(same) if sign == "!=" else same

    def _whole(self, text: str) -> int | None:
        worth = self.value(text)
        return self.number(worth) if worth and worth.strip() else None

    def _present(self, text: str) -> KnownTruth:
        if is_unset_shell_parameter(text):
            return False
        return bool(text) if MARK.sub("", text) or not text else None
