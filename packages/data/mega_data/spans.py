"""How T5 corrupts a text: how many tokens leave it in how many spans, and how long it may be then (Raffel et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """How T5 corrupts `tokens` of text: `hidden` of them, in `count` spans."""

    tokens: int
    hidden: int
    count: int

    @classmethod
    def of(cls, tokens: int, share: float, mean: float) -> Spans:
        """For a text of `tokens`, at least 2."""
        hidden = min(max(round(tokens * share), 1), tokens - 1)
        return cls(tokens, hidden, min(max(round(hidden / mean), 1), tokens - hidden))

    @classmethod
    def fitting(cls, room: int, share: float, mean: float) -> Spans:
        """For the longest text that leaves no more than `room` tokens, sentinels and the end token included."""
        found = cls.of(2, share, mean)
        while (more := cls.of(found.tokens + 1, share, mean)).left <= room:
            found = more
        return found

    @property
    def left(self) -> int:
        """Tokens of the encoder."""
        return self.tokens - self.hidden + self.count + 1

    def draw(self, random: np.random.RandomState) -> list[Ints]:
        """Positions of each span: text and spans by turns, text first, every way to part them equally likely."""
        hidden, text = _parted(self.hidden, self.count, random), _parted(self.tokens - self.hidden, self.count, random)
        ends = np.cumsum(text + hidden)
        return [np.arange(end - size, end) for end, size in zip(ends.tolist(), hidden.tolist(), strict=True)]


def _parted(total: int, parts: int, random: np.random.RandomState) -> Ints:
    """Sizes of `parts` parts of `total`, one at least each: int64 [parts]."""
    cuts = np.sort(random.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)
