"""Writer of Megatron-Core checkpoints from any source, one block at a time, in either format.

The output is what Megatron calls a release: `release/` and a tracker file. It has weights and settings but no optimizer
state, and a run that loads it starts at step 0.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from mega_ckpt.formats.megatron_args import write_megatron_args
from mega_ckpt.formats.megatron_names import MegatronTensorMapping, list_megatron_tensor_mappings
from mega_ckpt.formats.megatron_source import TRACKER
from mega_ckpt.resumable_folder import RunOnce, write_without_journal
from mega_ckpt.tensor_pieces import TensorShape, compute_slice_overlap, crop_tensor
from mega_ckpt.weight_source import WeightSource, choose_cast_dtype, write_file_durably
from mega_common.atomic_files import add_path_to_errors
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

RELEASE = "release"


class MegatronWriteInput:
    """Input of the writers of Megatron's checkpoint formats `torch_dist` and `torch`.
    It has the weights of a source as Megatron's tensors, cast, readable by rectangle.

    Attributes:
        model: configuration of the model.
        tp, pp: tensor and pipeline parallel sizes of the run that it is written for.
        implementation: Megatron's `--transformer-impl`, `transformer_engine` or `local`.
        args: Megatron's settings.
        parts: its tensors, as on a single rank.
    """

    def __init__(
        self,
        source: WeightSource,
        tp: int,
        pp: int,
        dtype: torch.dtype | None,
        implementation: str = "transformer_engine",
    ) -> None:
        self._source, self._dtype = source, dtype
        self.model, self.tp, self.pp, self.implementation = source.model, tp, pp, implementation
        self.args = write_megatron_args(source.model, tp, pp) | {"transformer_impl": implementation}
        self.parts = list_megatron_tensor_mappings(source.model, self.args["padded_vocab_size"])

    @property
    def total_bytes(self) -> int:
        """Total size in bytes of the tensors to write."""
        return sum(self.get_stored_dtype(part).itemsize * torch.Size(part.shape).numel() for part in self.parts)

    def get_stored_dtype(self, part: MegatronTensorMapping) -> torch.dtype:
        """Return the dtype that a Megatron tensor is written in."""
        return choose_cast_dtype(self._source, part.pieces[0].name, self._dtype)

    def read_block(self, part: MegatronTensorMapping, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Return `tensor[offset : offset + shape]` of the Megatron tensor `part`.
        Padding rows of the vocabulary are zeros.
        """
        out = (
            torch.zeros(shape, dtype=self.get_stored_dtype(part))
            if part.has_vocabulary_rows
            else torch.empty(shape, dtype=self.get_stored_dtype(part))
        )
        for piece in part.pieces:
            shared = compute_slice_overlap(offset, shape, piece.local_start, piece.shape)
            if shared:
                start, extent = shared
                global_start = tuple(
                    s - a + b for s, a, b in zip(start, piece.local_start, piece.global_offset, strict=True)
                )
                inside = tuple(s - o for s, o in zip(start, offset, strict=True))
                crop_tensor(out, inside, extent).copy_(self._source.read_tensor_slice(piece.name, global_start, extent))
        return out


def write_megatron_release_folder(
    writing: MegatronWriteInput,
    folder: Path,
    write: Callable[[MegatronWriteInput, Path, Callable[[int], object], RunOnce], None],
    advance: Callable[[int], object] = lambda _: None,
    once: RunOnce = write_without_journal,
) -> None:
    """Write a Megatron checkpoint, with tracker file and subfolder `release`, into an existing folder.
    The files are durable when this returns.

    Args:
        writing: weights and settings to write.
        folder: folder of the tracker file.
        write: writes the subfolder `release`, in one of the formats.
        advance: called with the bytes of each block that is written.
        once: skips tensor files that are already complete; other files are always written.
    """
    (folder / RELEASE).mkdir(exist_ok=True)
    write(writing, folder / RELEASE, advance, once)
    write_file_durably(folder / TRACKER, RELEASE.encode())


@contextlib.contextmanager
def open_durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Context manager that yields a new binary file to write, flushed to disk on exit; an existing file is an error."""
    with add_path_to_errors(path), open(path, "xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def check_megatron_parallel_sizes(
    model: ModelConfig, parts: Sequence[MegatronTensorMapping], tp: int, pp: int, *, ranks: bool, local: bool
) -> None:
    """Raise CheckpointError if Megatron cannot load the model with these tensor and pipeline parallel sizes.

    Args:
        model: the model to write.
        parts: Megatron's tensors of it.
        tp, pp: the sizes.
        ranks: one file per rank (`torch`), which older versions of Megatron must be able to load.
        local: layers of `--transformer-impl local`.

    Raises:
        CheckpointError: naming the size, what it must divide, and sizes that do.
    """
    if model.encoder and pp > 1:
        raise CheckpointError(f"pp = {pp} is not supported with a T5 in Megatron", hint="use --pp 1")
    layers = model.num_layers
    if layers % pp:
        fits = [n for n in range(1, layers + 1) if layers % n == 0]
        raise CheckpointError(f"pp = {pp} must divide the {layers} layers", hint=f"use --pp with one of {fits}")
    if problem := next(_size_problems(model, parts, tp, ranks=ranks, local=local), None):
        fits = [n for n in range(1, tp) if not any(_size_problems(model, parts, n, ranks=ranks, local=local))]
        raise CheckpointError(f"tp = {tp} must divide {problem}", hint=f"use --tp with one of {fits}")


def _size_problems(
    model: ModelConfig, parts: Sequence[MegatronTensorMapping], tp: int, *, ranks: bool, local: bool
) -> Iterator[str]:
    """Yield a description of everything that `tp` does not divide."""
    groups, heads = model.key_value_heads, model.num_attention_heads
    if groups % tp and (ranks or tp % groups):
        yield f"the {groups} key/value heads" + ("" if ranks else " or be a multiple of them")
    if heads % tp:
        yield f"the {heads} attention heads"
    if (mamba := model.mamba) and (mamba.num_groups % tp or mamba.num_heads % tp):
        yield f"the {mamba.num_heads} heads in {mamba.num_groups} groups of the Mamba-2 layers"
    for part in parts:
        whole = not local and "_down_proj." in part.name  # each rank has all of it
        if part.axis is not None and not whole and part.shape[part.axis] % (part.halves * tp):
            yield f"{part.name} {list(part.shape)}"
