"""Nearest vectors, by faiss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError, MissingPackageError
from mega_common.log import ProgressBar
from mega_data.retrieval.vectors import Rows

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
EXACT = 1 << 18  # vectors among which all distances are computed
WHOLE = 1 << 21  # vectors that are kept whole
TRAINED_ON = 1 << 19
LISTS = 1 << 13
PAIRS = 1 << 18  # distances of candidates that are held at a time


def default_index(vectors: int, width: int) -> str:
    """What faiss is asked to build for so many vectors: every distance; lists of which some are looked at; these, and
    64 bytes or fewer a vector."""
    if vectors <= EXACT:
        return "Flat"
    lists = min(LISTS, 1 << round(math.log2(math.sqrt(vectors))))
    return f"IVF{lists},Flat" if vectors <= WHOLE else f"IVF{lists},PQ{math.gcd(width, 64)}"


class NearestVectors:
    """The first `count` rows of some vectors, searched by Euclidean distance.

    Args:
        factory: a string of faiss's `index_factory`.
        probes: lists that are looked at for each vector, of an index that has some.

    Raises:
        MissingPackageError: without faiss.
        ConfigError: when faiss cannot build what is asked for.
    """

    def __init__(self, vectors: Rows, count: int, *, factory: str, probes: int) -> None:
        try:
            import faiss
        except ImportError:
            raise MissingPackageError(
                "neighbours are searched by the package faiss", hint="pip install 'mega-data[retro]'"
            ) from None
        width, self._count = next(vectors.blocks(0, count)).shape[1], count
        try:
            self._index: Any = faiss.index_factory(width, factory)
            if not self._index.is_trained:
                step = max(1, count // TRAINED_ON)
                self._index.train(np.ascontiguousarray(vectors.every(0, count, step)))
            with ProgressBar("indexing", total=count, unit="chunks") as bar:
                for block in vectors.blocks(0, count):
                    self._index.add(np.ascontiguousarray(block))
                    bar.advance(len(block))
            lists = faiss.try_extract_index_ivf(self._index)
            if lists is not None:
                lists.nprobe = min(probes, lists.nlist)
        except RuntimeError as error:
            told = str(error).rsplit(": ", 1)[-1]
            raise ConfigError(
                f"--index {factory}: faiss cannot build it of {count:,} vectors of {width} numbers ({told})",
                hint="Flat does for any; faiss's index factory names the others",
            ) from None

    def nearest(self, vectors: Floats, count: int, allowed: Callable[[Ints, Ints], npt.NDArray[np.bool_]]) -> Ints:
        """The nearest `count` rows that are allowed, the nearest first: int64 [n, count], -1 where there is none left.

        Args:
            vectors: fp32 [n, D].
            allowed: of which of them, int64 [m], which rows, int64 [m, c] with -1 for none, are: bool [m, c].
        """
        found = np.full((len(vectors), count), -1, np.int64)
        todo, width = np.arange(len(vectors)), min(4 * count, self._count)
        while todo.size:
            short = []
            for start in range(0, todo.size, at_once := max(1, PAIRS // width)):
                own = todo[start : start + at_once]
                rows = self._index.search(np.ascontiguousarray(vectors[own]), width)[1]
                good = allowed(own, rows)
                first = np.argsort(~good, axis=1, kind="stable")[:, :count]
                chosen = np.where(np.take_along_axis(good, first, 1), np.take_along_axis(rows, first, 1), -1)
                found[own, : chosen.shape[1]] = chosen
                short.append(own[(good.sum(1) < count) & (rows[:, -1] >= 0)])
            if width == self._count:
                break
            todo, width = np.concatenate(short), min(4 * width, self._count)
        return found
