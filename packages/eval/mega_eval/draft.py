"""Speculative decoding (arXiv:2211.17192): guesses of the next tokens, which one forward pass of the model checks together.

The model's own token is chosen at each place as without a guess, by the same random number, and the guesses stand as far as
they are the same. So no text changes, greedy or drawn, seed by seed: not its distribution alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from mega_eval.text import Limits

if TYPE_CHECKING:
    from mega_eval.engine import Engine, Request


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """The tokens that may follow each prompt, at most as many as its `limits` allow; none where there is no guess."""


class NgramDrafter:
    """Repeats what followed the last tokens where they stood before, as quotations and code do.

    Args:
        count: most tokens of a guess.
        longest: so many last tokens are looked for, then one less, down to two.
    """

    def __init__(self, count: int = 8, longest: int = 4) -> None:
        self._count, self._longest = count, longest

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Drafter`."""
        return [self._follow(one.prompt)[: one.limits.max_new_tokens] for one in requests]

    def _follow(self, tokens: Sequence[int]) -> list[int]:
        data = array("q", tokens)
        text, size = data.tobytes(), data.itemsize
        for n in range(min(self._longest, len(tokens) - 1), 1, -1):
            stop = len(text) - size  # a place that something follows
            while (at := text.rfind(text[-n * size :], 0, stop)) >= 0:
                if at % size == 0:
                    start = at // size + n
                    return data[start : start + self._count].tolist()
                stop = at + n * size - 1  # not at a token's begin: an earlier one
        return []


class ModelDrafter:
    """Lets a smaller model of the same vocabulary go on.

    Args:
        engine: the smaller model's, which has requests of nobody else.
        count: tokens of a guess.
    """

    def __init__(self, engine: Engine, count: int = 4) -> None:
        self._engine, self._count = engine, count

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Drafter`. What the smaller model has computed of a row before lies in its engine's shared pages."""
        found: dict[int, list[int]] = {}
        for one in requests:
            limits = Limits(min(self._count, one.limits.max_new_tokens))
            found[self._engine.add(replace(one, limits=limits))] = []
        while self._engine.waiting or self._engine.running:
            for event in self._engine.step():
                found[event.request] += event.tokens
        return list(found.values())
