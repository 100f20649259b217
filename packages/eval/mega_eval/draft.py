"""Speculative decoding (arXiv:2211.17192): guesses of the next tokens, which one forward pass of the model checks together.

The model's own token is chosen at each place as without a guess, by the same random number, and the guesses stand as far as
they are the same. So no text changes, greedy or drawn, seed by seed: not its distribution alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mega_common.errors import DataError

if TYPE_CHECKING:
    from mega_eval.engine import Engine, Request

FEW = 2  # tokens of a guess, which a CPU checks in little more time than it computes one
MOST = 8  # likewise, where they are likely right
LONGEST_PAUSE = 16  # steps


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """The tokens that may follow each prompt, at most as many as its `limits` allow; none where there is no guess."""


@dataclass
class Trust:
    """How many tokens are guessed next for a text, by how the guess before fared.

    `FEW`, and after a guess that was all right `MOST`; after a wrong one none for a step, after the next wrong one for two, and
    so on. So a text that repeats nothing pays for a guess in one of `LONGEST_PAUSE` steps.
    """

    _count: int = FEW
    _pause: int = 0
    _left: int = 0

    def count(self) -> int:
        """Tokens to be guessed in this step."""
        self._left = max(0, self._left - 1)
        return 0 if self._left else self._count

    def learn(self, guessed: int, right: int) -> None:
        """So many tokens were guessed, and the first of them were right."""
        if not guessed:
            return
        self._count = MOST if right == guessed else max(FEW, right)
        self._pause = 0 if right else min(self._pause + 1, LONGEST_PAUSE)
        self._left = self._pause


class NgramDrafter:
    """Repeats what followed the last tokens where they stood before, as quotations and code do.

    Args:
        texts: guesses for so many at once, and for none where there are more; None: for any number.
        longest: so many last tokens are looked for, then one less, down to two.
    """

    def __init__(self, texts: int | None = None, longest: int = 4) -> None:
        self._texts, self._longest = texts, longest

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Drafter`."""
        if self._texts is not None and len(requests) > self._texts:
            return [[] for _ in requests]
        return [self._follow(one.prompt, one.limits.max_new_tokens) for one in requests]

    def _follow(self, tokens: Sequence[int], count: int) -> list[int]:
        data = array("q", tokens)
        text, size = data.tobytes(), data.itemsize
        for n in range(min(self._longest, len(tokens) - 1), 1, -1):
            stop = len(text) - size  # a place that something follows
            while (at := text.rfind(text[-n * size :], 0, stop)) >= 0:
                if at % size == 0:
                    start = at // size + n
                    return data[start : start + count].tolist()
                stop = at + n * size - 1  # not at a token's begin: an earlier one
        return []


class ModelDrafter:
    """Lets a smaller model of the same vocabulary go on.

    Args:
        engine: the smaller model's, which has requests of nobody else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Drafter`. What the smaller model has computed of a row before lies in its engine's shared pages.

        Of a row that is longer than it can read, or has images, it says nothing.
        """
        found: list[list[int]] = [[] for _ in requests]
        places: dict[int, list[int]] = {}
        for one, guesses in zip(requests, found, strict=True):
            with suppress(DataError):
                if one.images is None:
                    places[self._engine.add(one)] = guesses
        try:
            while self._engine.waiting or self._engine.running:
                for event in self._engine.step(isolate=True):
                    places[event.request] += event.tokens
        finally:
            if self._engine.running:  # the step has failed: nothing of it may be left for the next
                self._engine.reset()
        return found
