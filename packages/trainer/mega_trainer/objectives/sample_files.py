"""Arrays of samples in files, by the number of the sample: so they fit any layout, batch size and worker.

A folder has safetensors files of neighbouring samples, `samples-000000000512.safetensors` from sample 512 on. Of each array
a file has the elements of all samples one after another, as `NAME`, and where each sample's begin and end, as `NAME.bounds`,
int64 [samples + 1] (in elements of the first axis). A file appears whole, by a rename: a kill leaves those that are there,
and what fills the folder goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mega_ckpt.formats.safetensors import Header, SafetensorsFile
from mega_ckpt.shards import raw
from mega_common.errors import DataError
from mega_common.files import atomic_file


class SampleFiles:
    """The files of a folder.

    Args:
        folder: of what is told of the samples of one data set by one model, and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[range, Mapping[str, Tensor]] = {}

    def end(self, start: int) -> int:
        """The first sample from `start` on that no file has."""
        while (found := self._span(start)) is not None:
            start = found.stop
        return start

    def write(self, first: int, arrays: Mapping[str, Sequence[np.ndarray]]) -> None:
        """A file of the samples from `first` on, of each the arrays by name; durable when this returns."""
        tensors: dict[str, Tensor] = {}
        for name, each in arrays.items():
            bounds = np.cumsum([0, *map(len, each)])
            tensors |= {name: torch.from_numpy(np.concatenate(each)), f"{name}.bounds": torch.from_numpy(bounds)}
        header = Header.make({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, {"format": "pt"})
        with atomic_file(self.folder / f"samples-{first:012d}.safetensors") as stream:
            stream.write(header.start)
            for name in header.entries:
                stream.write(raw(tensors[name].contiguous()))

    def read(self, name: str, sample: int) -> np.ndarray:
        """An array of a sample.

        Raises:
            DataError: when no file has it.
        """
        span = self._span(sample)
        if span is None:
            raise DataError(f"{self.folder}: has nothing of sample {sample}", hint="move it away: it is made anew")
        held, place = self._files[span], sample - span.start
        begin, end = held[f"{name}.bounds"][place : place + 2].tolist()
        found: np.ndarray = held[name][begin:end].numpy()
        return found

    def _span(self, sample: int) -> range | None:
        """The samples of the file that has this one."""
        for span in self._files:
            if sample in span:
                return span
        for path in self.folder.glob("samples-*.safetensors"):
            first = int(path.stem.rpartition("-")[2])
            if all(span.start != first for span in self._files):
                file = SafetensorsFile.open(path)
                held = {name: file.read(name) for name in file.header.entries}
                count = next(len(bounds) for name, bounds in held.items() if name.endswith(".bounds")) - 1
                self._files[range(first, first + count)] = held
        return next((span for span in self._files if sample in span), None)
