"""Speculative decoding (arXiv:2211.17192): draft tokens that one forward pass of the model verifies together.

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
    from mega_eval.inference_engine import EngineRequest, InferenceEngine

FEW = 2  # tokens of a guess, which a CPU checks in little more time than it computes one
MOST = 8  # likewise, where they are likely right
LONGEST_PAUSE = 16  # steps


class Drafter(Protocol):
    """Interface of sources of draft tokens."""

    def propose_drafts(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Return draft tokens for each request, at most as many as its `limits` allow; an empty list where there are
        none.
        """


@dataclass
class AdaptiveDraftLength:
    """Number of draft tokens for the next step of a text, adapted to how many were accepted before.

    `FEW`, and after a guess that was all right `MOST`; after a wrong one none for a step, after the next wrong one for two, and
    so on. So a text that repeats nothing pays for a guess in one of `LONGEST_PAUSE` steps.
    """

    _count: int = FEW
    _pause: int = 0
    _left: int = 0

    def next_draft_length(self) -> int:
        """Return the number of tokens to draft in this step."""
        self._left = max(0, self._left - 1)
        return 0 if self._left else self._count

    def record_acceptance(self, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted."""
        if not drafted:
            return
        self._count = MOST if accepted == drafted else max(FEW, accepted)
        self._pause = 0 if accepted else min(self._pause + 1, LONGEST_PAUSE)
        self._left = self._pause


class NgramDrafter:
    """Drafter that repeats the tokens that followed an earlier occurrence of the last n-gram, as in quotations and
    code.

    Args:
        texts: guesses for so many at once, and for none where there are more; None: for any number.
        longest: so many last tokens are looked for, then one less, down to two.
    """

    def __init__(self, texts: int | None = None, longest: int = 4) -> None:
        self._texts, self._longest = texts, longest

    def propose_drafts(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Return draft tokens for each request by n-gram lookup in its prompt."""
        if self._texts is not None and len(requests) > self._texts:
            return [[] for _ in requests]
        return [self._find_continuation(one.prompt, one.limits.max_new_tokens) for one in requests]

    def _find_continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the latest earlier occurrence of the longest matching n-gram."""
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
    """Drafter that generates tokens with a smaller model of the same vocabulary.

    Args:
        engine: the smaller model's, which has requests of nobody else.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def propose_drafts(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Return draft tokens of the smaller model; its keys and values of earlier steps are found in the shared pages
        of its engine.

        Of a row that is longer than it can read, or has images, it says nothing.
        """
        found: list[list[int]] = [[] for _ in requests]
        places: dict[int, list[int]] = {}
        for one, guesses in zip(requests, found, strict=True):
            with suppress(DataError):
                if one.images is None:
                    places[self._engine.add_request(one)] = guesses
        try:
            while self._engine.num_waiting or self._engine.num_running:
                for event in self._engine.step(isolate=True):
                    places[event.request] += event.tokens
        finally:
            if self._engine.num_running:  # the step has failed: nothing of it may be left for the next
                self._engine.drop_all_requests()
        return found
