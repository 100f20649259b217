"""Rows of numbers that are slow to make, in files of so many rows, each whole or absent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.files import atomic_file

SHARD = 1 << 14  # rows of a file


class Rows:
    """`rows` rows in the files FOLDER/NAME-00000.npy and so on, of which some are there.

    Args:
        shard: rows of a file, but for the last.
    """

    def __init__(self, folder: Path, name: str, rows: int, shard: int = SHARD) -> None:
        self._folder, self._name, self._shard, self.rows = folder, name, shard, rows

    def __len__(self) -> int:
        return self.rows

    def missing(self) -> Iterator[range]:
        """The rows of each file that is not there yet."""
        for first in range(0, self.rows, self._shard):
            if not self._file(first).exists():
                yield range(first, min(first + self._shard, self.rows))

    def put(self, first: int, values: npt.NDArray[Any]) -> None:
        """Write the file that begins with row `first`."""
        with atomic_file(self._file(first)) as stream:
            np.save(stream, values)

    def blocks(self, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """The rows [first, last), by files, which must be there; read through memory maps."""
        for begin in range(first - first % self._shard, last, self._shard):
            found = np.load(self._file(begin), mmap_mode="r")
            yield found[max(0, first - begin) : last - begin]

    def every(self, first: int, last: int, step: int) -> npt.NDArray[Any]:
        """Every step-th of the rows [first, last), about, as one array."""
        return np.concatenate([block[::step] for block in self.blocks(first, last)])

    def _file(self, first: int) -> Path:
        return self._folder / f"{self._name}-{first // self._shard:05}.npy"
