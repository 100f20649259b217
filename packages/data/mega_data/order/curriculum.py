"""A blend that changes: at stated numbers of samples, where a data set has been read as often as it may be, at a resume."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from mega_common.errors import DataError
from mega_data.config import Begun, DataConfig, weight_at
from mega_data.order.blend import StableBlend
from mega_data.order.parts import Part


@dataclass(frozen=True)
class Stage:
    """A part of a run in which the blend is one.

    Attributes:
        first: number of its first sample.
        chosen: the data sets that it has.
        read: samples that were read of each data set, of all of them, before it.
    """

    first: int
    blend: StableBlend
    chosen: Sequence[int]
    read: Sequence[int]

    def counts(self, k: int) -> list[int]:
        """How many of the samples before `k`, which is in this stage, are of each data set."""
        counts = list(self.read)
        for source, count in zip(self.chosen, self.blend.counts(k - self.first), strict=True):
            counts[source] += count
        return counts


class StagedBlend:
    """A pure function of its arguments and k. Each data set goes on with its next sample from stage to stage.

    Args:
        weights: of each data set, from which sample on; some may be 0. The first begins where the blend does.
        limits: samples that may be read of each data set, None for any number. Where one is reached, the others go on
            by their weights.
        read: samples that were read of each before the blend began.
    """

    def __init__(
        self, weights: Sequence[tuple[int, Sequence[float]]], limits: Sequence[int | None], read: Sequence[int]
    ) -> None:
        self.identity = f"staged {weights} limits={limits} read={read}"
        self._weights, self._limits, self._read = weights, limits, read
        self._coming, self._lock = self._plan(list(read)), Lock()
        self._stages: list[Stage] = []
        self._end: float = weights[0][0]  # up to which the stages are made

    def locate(self, k: int) -> tuple[int, int]:
        """The data set of sample `k`, and its number there.

        Raises:
            DataError: when all data sets have been read as often as they may be.
        """
        stage = self._stage(k)
        source, number = stage.blend.locate(k - stage.first)
        return stage.chosen[source], stage.read[stage.chosen[source]] + number

    def counts(self, k: int) -> list[int]:
        """How many of the samples before `k` are of each data set; `k` may be the end."""
        if k <= self._weights[0][0]:
            return list(self._read)
        return self._stage(k - 1).counts(k)

    def _stage(self, k: int) -> Stage:
        with self._lock:  # asked by the thread that loads and by the one that tells
            while self._end <= k:
                try:
                    stage, self._end = next(self._coming)
                except StopIteration:
                    raise DataError(
                        f"sample {k}: every data set has been read as often as its max_epochs allows",
                        hint="raise max_epochs, add data, or train fewer steps",
                    ) from None
                self._stages.append(stage)
        return self._stages[bisect_right(self._stages, k, key=lambda stage: stage.first) - 1]

    def _plan(self, read: list[int]) -> Iterator[tuple[Stage, float]]:
        """The stages in turn, each with where it ends."""
        ends = [first for first, _ in self._weights[1:]]
        for (first, weights), end in zip(self._weights, [*ends, math.inf], strict=True):
            at: float = first
            while at < end:
                chosen = [i for i, weight in enumerate(weights) if weight > 0 and self._left(i, read) > 0]
                if not chosen:
                    return
                stage = Stage(int(at), StableBlend([weights[i] for i in chosen]), chosen, list(read))
                at = min(end, at + self._lasts(stage.blend, [self._left(i, read) for i in chosen]))
                yield stage, at
                if at < math.inf:
                    read = stage.counts(int(at))

    def _left(self, source: int, read: Sequence[int]) -> float:
        limit = self._limits[source]
        return math.inf if limit is None else limit - read[source]

    def _lasts(self, blend: StableBlend, left: Sequence[float]) -> float:
        """After how many samples of a blend the first data set has given as many as are left of it."""
        if min(left) == math.inf:
            return math.inf
        high = 1
        while all(count < most for count, most in zip(blend.counts(high), left, strict=True)):
            high *= 2

        def reached(k: int) -> bool:
            return any(count >= most for count, most in zip(blend.counts(k), left, strict=True))

        return bisect_left(range(high + 1), True, key=reached)


def training_blend(
    parts: Sequence[Part], config: DataConfig, limits: Sequence[int | None]
) -> StableBlend | StagedBlend:
    """The blend of the training split in another order than Megatron's; `limits` as in `StagedBlend`."""
    begun = config.begun or Begun(samples=0, read={})
    weights = weights_by_sample([part.weights for part in parts], config.seq_length, begun.samples)
    read = [begun.read.get(name, 0) for name in names_of(part.name for part in parts)]
    if config.begun is None and len(weights) == 1 and all(weights[0][1]) and not any(limits):
        return StableBlend(weights[0][1])
    return StagedBlend(weights, limits, read)


def fixed_blend(parts: Sequence[Part]) -> StableBlend | StagedBlend:
    """That of another split, which is the same whenever it is read: by the weights that a run begins with."""
    weights = [part.weights[0] for part in parts]
    return StableBlend(weights) if all(weights) else StagedBlend([(0, weights)], [None] * len(parts), [0] * len(parts))


def names_of(paths: Iterable[Path | str]) -> list[str]:
    """The paths of data sets, each with a number where one comes again."""
    seen: Counter[str] = Counter()
    names = []
    for path in map(str, paths):
        seen[path] += 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return names


def weights_by_sample(
    curricula: Sequence[Mapping[int, float]], seq_length: int, first: int
) -> list[tuple[int, list[float]]]:
    """The weights of data sets that say their own from some numbers of tokens on: from which sample on they are which, the
    first of these `first`.

    A change counts from the first sample that begins with so many tokens or more before it.
    """
    steps = sorted({-(-tokens // seq_length) for each in curricula for tokens in each})
    begins = [first, *(step for step in steps if step > first)]
    return [(begin, [weight_at(each, begin * seq_length) for each in curricula]) for begin in begins]
