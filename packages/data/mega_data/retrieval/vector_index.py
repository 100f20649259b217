"""Nearest-neighbor search by faiss, and sharded storage of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.atomic_files import open_atomic_file
from mega_common.errors import ConfigError, MissingPackageError
from mega_common.progress_logging import ProgressBar

SHARD = 1 << 14  # rows of a file


class VectorShards:
    """Array of `rows` rows in the files FOLDER/NAME-00000.npy and so on, some of which may be missing.

    Args:
        shard: rows of a file, but for the last.
    """

    def __init__(self, folder: Path, name: str, rows: int, shard: int = SHARD) -> None:
        self._folder, self._name, self._shard, self.rows = folder, name, shard, rows

    def __len__(self) -> int:
        return self.rows

    def iterate_missing(self) -> Iterator[range]:
        """Yield the rows of each file that does not exist yet."""
        for first in range(0, self.rows, self._shard):
            if not self._get_path(first).exists():
                yield range(first, min(first + self._shard, self.rows))

    def write_shard(self, first: int, values: npt.NDArray[Any]) -> None:
        """Write the file that begins with row `first`."""
        with open_atomic_file(self._get_path(first)) as stream:
            np.save(stream, values)

    def iterate_blocks(self, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows [first, last), one file at a time, through memory maps; the files must exist."""
        for begin in range(first - first % self._shard, last, self._shard):
            found = np.load(self._get_path(begin), mmap_mode="r")
            yield found[max(0, first - begin) : last - begin]

    def sample_rows(self, first: int, last: int, step: int) -> npt.NDArray[Any]:
        """Return about every `step`-th of the rows [first, last) as one array."""
        return np.concatenate([block[::step] for block in self.iterate_blocks(first, last)])

    def _get_path(self, first: int) -> Path:
        return self._folder / f"{self._name}-{first // self._shard:05}.npy"


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
EXACT = 1 << 18  # vectors among which all distances are computed
WHOLE = 1 << 21  # vectors that are kept whole
TRAINED_ON = 1 << 19
LISTS = 1 << 13
PAIRS = 1 << 18  # distances of candidates that are held at a time


def select_index_type(vectors: int, width: int) -> str:
    """Return the faiss index type for a number of vectors: all distances; lists of which some are probed; or lists with
    at most 64 bytes per vector.
    """
    if vectors <= EXACT:
        return "Flat"
    lists = min(LISTS, 1 << round(math.log2(math.sqrt(vectors))))
    return f"IVF{lists},Flat" if vectors <= WHOLE else f"IVF{lists},PQ{math.gcd(width, 64)}"


class NearestVectors:
    """Nearest-neighbor index of the first `count` rows of vectors, by Euclidean distance.

    Args:
        factory: a string of faiss's `index_factory`.
        probes: lists that are looked at for each vector, of an index that has some.

    Raises:
        MissingPackageError: without faiss.
        ConfigError: when faiss cannot build what is asked for.
    """

    def __init__(self, vectors: VectorShards, count: int, *, factory: str, probes: int) -> None:
        try:
            import faiss
        except ImportError:
            raise MissingPackageError(
                "neighbours are searched by the package faiss", hint="pip install 'mega-data[retro]'"
            ) from None
        width, self._count = next(vectors.iterate_blocks(0, count)).shape[1], count
        try:
            self._index: Any = faiss.index_factory(width, factory)
            if not self._index.is_trained:
                step = max(1, count // TRAINED_ON)
                self._index.train(np.ascontiguousarray(vectors.sample_rows(0, count, step)))
            with ProgressBar("indexing", total=count, unit="chunks") as bar:
                for block in vectors.iterate_blocks(0, count):
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

    def search_nearest(
        self, vectors: Floats, count: int, allowed: Callable[[Ints, Ints], npt.NDArray[np.bool_]]
    ) -> Ints:
        """Return the `count` nearest allowed rows, the nearest first: int64 [n, count], -1 if there are fewer.

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
