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
    """Array of `rows` rows stored in the files FOLDER/NAME-00000.npy and so on, some of which may be missing.

    Args:
        shard: rows of a file; the last file may have fewer.
    """

    def __init__(self, folder: Path, name: str, rows: int, shard: int = SHARD) -> None:
        self._folder, self._name, self._shard, self.rows = folder, name, shard, rows

    def __len__(self) -> int:
        return self.rows

    def iterate_missing_ranges(self) -> Iterator[range]:
        """Yield the row range of each `.npy` file that does not exist yet."""
        for first in range(0, self.rows, self._shard):
            if not self._get_path(first).exists():
                yield range(first, min(first + self._shard, self.rows))

    def write_shard(self, first: int, values: npt.NDArray[Any]) -> None:
        """Write `values` as the `.npy` file whose first row is `first`, atomically."""
        with open_atomic_file(self._get_path(first)) as stream:
            np.save(stream, values)

    def iterate_blocks(self, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows [first, last), one file at a time, as memory maps; all these files must exist."""
        for begin in range(first - first % self._shard, last, self._shard):
            found = np.load(self._get_path(begin), mmap_mode="r")
            yield found[max(0, first - begin) : last - begin]

    def sample_rows(self, first: int, last: int, step: int) -> npt.NDArray[Any]:
        """Return about every `step`-th row of [first, last) as one array."""
        return np.concatenate([block[::step] for block in self.iterate_blocks(first, last)])

    def _get_path(self, first: int) -> Path:
        return self._folder / f"{self._name}-{first // self._shard:05}.npy"


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
MAX_FLAT = 1 << 18  # vectors; up to this number all distances are computed
MAX_UNCOMPRESSED = 1 << 21  # vectors; more are compressed by product quantisation
TRAINING_VECTORS = 1 << 19
MAX_LISTS = 1 << 13
PAIRS = 1 << 18  # candidate distances in memory at a time


def select_index_type(vectors: int, width: int) -> str:
    """Return the faiss `index_factory` string for `vectors` vectors of `width` values: Flat (exact), IVF lists, or for
    many vectors IVF lists with at most 64 bytes per vector.
    """
    if vectors <= MAX_FLAT:
        return "Flat"
    lists = min(MAX_LISTS, 1 << round(math.log2(math.sqrt(vectors))))
    return f"IVF{lists},Flat" if vectors <= MAX_UNCOMPRESSED else f"IVF{lists},PQ{math.gcd(width, 64)}"


class NearestVectors:
    """Faiss index of the first `count` rows of `vectors` that finds nearest neighbors by Euclidean distance.

    Args:
        factory: faiss index factory string.
        probes: number of lists of an IVF index that are probed for each vector.

    Raises:
        MissingPackageError: if faiss is not installed.
        ConfigError: if faiss cannot build the index.
    """

    def __init__(self, vectors: VectorShards, count: int, *, factory: str, probes: int) -> None:
        try:
            import faiss
        except ImportError:
            raise MissingPackageError(
                "mega data retrieve requires the package faiss", hint="pip install 'mega-data[retro]'"
            ) from None
        width, self._count = next(vectors.iterate_blocks(0, count)).shape[1], count
        try:
            self._index: Any = faiss.index_factory(width, factory)
            if not self._index.is_trained:
                step = max(1, count // TRAINING_VECTORS)
                self._index.train(np.ascontiguousarray(vectors.sample_rows(0, count, step)))
            with ProgressBar("indexing", total=count, unit="chunks") as bar:
                for block in vectors.iterate_blocks(0, count):
                    self._index.add(np.ascontiguousarray(block))
                    bar.advance(len(block))
            lists = faiss.try_extract_index_ivf(self._index)
            if lists is not None:
                lists.nprobe = min(probes, lists.nlist)
        except RuntimeError as error:
            reason = str(error).rsplit(": ", 1)[-1]
            raise ConfigError(
                f"--index {factory}: faiss cannot build it for {count:,} vectors of {width} numbers ({reason})",
                hint="use Flat, which is always possible, or another string of faiss's index factory",
            ) from None

    def search_nearest(
        self, vectors: Floats, count: int, allowed: Callable[[Ints, Ints], npt.NDArray[np.bool_]]
    ) -> Ints:
        """Return the row numbers of the `count` nearest allowed rows for each of n query vectors, the nearest first:
        int64 [n, count], -1 if there are fewer.

        Args:
            vectors: fp32 [n, D].
            allowed: function of vector numbers, int64 [m], and rows, int64 [m, c] with -1 for none, that returns which
                rows are allowed: bool [m, c].
        """
        nearest = np.full((len(vectors), count), -1, np.int64)
        todo, width = np.arange(len(vectors)), min(4 * count, self._count)
        while todo.size:
            short = []
            for start in range(0, todo.size, step := max(1, PAIRS // width)):
                batch = todo[start : start + step]
                rows = self._index.search(np.ascontiguousarray(vectors[batch]), width)[1]
                good = allowed(batch, rows)
                first = np.argsort(~good, axis=1, kind="stable")[:, :count]
                chosen = np.where(np.take_along_axis(good, first, 1), np.take_along_axis(rows, first, 1), -1)
                nearest[batch, : chosen.shape[1]] = chosen
                short.append(batch[(good.sum(1) < count) & (rows[:, -1] >= 0)])
            if width == self._count:
                break
            todo, width = np.concatenate(short), min(4 * width, self._count)
        return nearest
