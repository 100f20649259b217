"""Writing a checkpoint of Megatron-Core from any source, a block at a time, in either of its formats.

What is written is what Megatron calls a release: `release/` and a tracker file that says so. It has weights and settings, no
optimizer, and a run that loads it starts at its first step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from mega_ckpt.formats.megatron import TRACKER
from mega_ckpt.formats.megatron_args import write_args
from mega_ckpt.formats.megatron_contents import overlap
from mega_ckpt.formats.megatron_names import Part, parts_of
from mega_ckpt.journal import Once, always
from mega_ckpt.pieces import Shape, crop
from mega_ckpt.source import Source, cast_dtype, put_file
from mega_common.files import naming

RELEASE = "release"


class Writing:
    """What both formats need of a source: Megatron's tensors, cast, any rectangle of them.

    Attributes:
        model: what the weights are of.
        tp, pp: sizes of the run that it is written for.
        implementation: Megatron's `--transformer-impl`, `transformer_engine` or `local`.
        args: Megatron's settings.
        parts: its tensors, as one rank would have them.
    """

    def __init__(
        self, source: Source, tp: int, pp: int, dtype: torch.dtype | None, implementation: str = "transformer_engine"
    ) -> None:
        self._source, self._dtype = source, dtype
        self.model, self.tp, self.pp, self.implementation = source.model, tp, pp, implementation
        self.args = write_args(source.model, tp, pp) | {"transformer_impl": implementation}
        self.parts = parts_of(source.model, self.args["padded_vocab_size"])

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(self.dtype(part).itemsize * torch.Size(part.shape).numel() for part in self.parts)

    def dtype(self, part: Part) -> torch.dtype:
        """What a tensor is written as."""
        return cast_dtype(self._source, part.pieces[0].name, self._dtype)

    def block(self, part: Part, offset: Shape, shape: Shape) -> Tensor:
        """`tensor[offset : offset + shape]`; zeros where it has no element of the model."""
        out = torch.zeros(shape, dtype=self.dtype(part)) if part.padded else torch.empty(shape, dtype=self.dtype(part))
        for piece in part.pieces:
            shared = overlap(offset, shape, piece.local_start, piece.shape)
            if shared:
                start, extent = shared
                place = tuple(s - a + b for s, a, b in zip(start, piece.local_start, piece.global_offset, strict=True))
                inside = tuple(s - o for s, o in zip(start, offset, strict=True))
                crop(out, inside, extent).copy_(self._source.read_slice(piece.name, place, extent))
        return out


def write_release(
    writing: Writing,
    folder: Path,
    write: Callable[[Writing, Path, Callable[[int], object], Once], None],
    advance: Callable[[int], object] = lambda _: None,
    once: Once = always,
) -> None:
    """Write a release into an existing folder; durable when this returns.

    Args:
        writing: what to write.
        folder: to hold the tracker file.
        write: fills the folder beside it, in one of the formats.
        advance: told of bytes as they are written.
        once: passes over files of tensors that are there already; nothing else is.
    """
    (folder / RELEASE).mkdir(exist_ok=True)
    write(writing, folder / RELEASE, advance, once)
    put_file(folder / TRACKER, RELEASE.encode())


@contextlib.contextmanager
def durable(path: Path) -> Iterator[IO[bytes]]:
    """A new file to write, which is on the disk afterwards."""
    with naming(path), open(path, "xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
