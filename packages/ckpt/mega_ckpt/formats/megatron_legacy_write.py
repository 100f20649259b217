"""Writer of Megatron's older `torch` folders, one file per rank; `megatron_legacy` describes the format.

A file is first written without the bytes of its tensors, which are then filled in block by block.
"""

from __future__ import annotations

import itertools
import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega_ckpt.formats.megatron_legacy import FILE
from mega_ckpt.formats.megatron_names import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    HEAD_STATES,
    STACKS,
    MegatronTensorMapping,
    is_projection_weight,
    split_megatron_layer_prefix,
)
from mega_ckpt.formats.megatron_write import RELEASE, MegatronWriteInput, open_durable_file
from mega_ckpt.formats.torch_archive import load_torch_archive
from mega_ckpt.resumable_folder import FinishedFile, RunOnce, hash_file
from mega_ckpt.shard_files import tensor_bytes
from mega_ckpt.stream_checkpoint import split_into_contiguous_slices
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.atomic_files import add_path_to_errors


@dataclass(frozen=True)
class _RankTensor:
    """A rank's tensor: its name in the file, and the boxes (part, offset, shape) concatenated in it.

    `part` is the first part; with `copy`, another rank has the same tensor.
    """

    name: str
    part: MegatronTensorMapping
    shape: TensorShape
    boxes: tuple[tuple[MegatronTensorMapping, TensorShape, TensorShape], ...]
    copy: bool


def write_megatron_legacy_checkpoint(
    writing: MegatronWriteInput, folder: Path, advance: Callable[[int], object], once: RunOnce
) -> None:
    """Write a Megatron checkpoint of the legacy format `torch` into an existing folder.
    There is one file per rank. The files are durable when this returns.
    """
    for tp, pp in itertools.product(range(writing.tp), range(writing.pp)):
        rank_folder = folder / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if writing.pp > 1 else ""))
        rank_folder.mkdir(exist_ok=True)
        tensors, last = list(_iter_rank_tensors(writing, tp, pp)), pp == writing.pp - 1
        write = partial(_write_rank, writing, rank_folder / FILE, tensors, last=last, advance=advance)
        once(f"{RELEASE}/{rank_folder.name}/{FILE}", b"", write)


def _write_rank(
    writing: MegatronWriteInput, path: Path, tensors: list[_RankTensor], *, last: bool, advance: Callable[[int], object]
) -> FinishedFile:
    model: dict[str, Any] = {}
    for one in tensors:
        model[one.name] = torch.empty(one.shape, dtype=writing.get_stored_dtype(one.part))
        if is_projection_weight(one.name):
            model[one.name.removesuffix("weight") + "_extra_state"] = None
    if last:
        model |= dict.fromkeys(HEAD_STATES if writing.model.encoder else HEAD_STATES[:1])
    state = {"args": Namespace(**writing.args), "checkpoint_version": 3.0, "iteration": 0, "model": model}
    with torch.serialization.skip_data(), open_durable_file(path) as stream:
        torch.save(state, stream)
    stored = load_torch_archive(path)["model"]
    with add_path_to_errors(path), open(path, "r+b") as stream:
        for one in tensors:
            stream.seek(stored[one.name].begin)
            for part, offset, shape in one.boxes:
                for start, extent in split_into_contiguous_slices(shape, writing.get_stored_dtype(part)):
                    at = tuple(o + s for o, s in zip(offset, start, strict=True))
                    stream.write(tensor_bytes(writing.read_block(part, at, extent)))
                    advance(0 if one.copy else math.prod(extent) * writing.get_stored_dtype(one.part).itemsize)
        stream.flush()
        os.fsync(stream.fileno())
    return FinishedFile(file=hash_file(path))


def _iter_rank_tensors(writing: MegatronWriteInput, tp: int, pp: int) -> Iterator[_RankTensor]:
    """Yield the tensors of one rank, in the order of the forward pass."""
    own, first, last = writing.model.num_layers // writing.pp, pp == 0, pp == writing.pp - 1
    for parts in _group_fused_parts(writing.parts):
        part, *others = parts
        head, tail = split_megatron_layer_prefix(part.name)
        if head.startswith(STACKS):
            stack, _, number = head[:-1].rpartition(".")
            layer = int(number) - pp * own
            if 0 <= layer < own and others:
                yield _fused_tensor(
                    f"{stack}.{layer}.{split_megatron_layer_prefix(part.inside)[1]}", parts, tp, writing.tp
                )
            elif 0 <= layer < own:
                yield from _iter_layer_tensors(writing, part, f"{stack}.{layer}.", tail, tp)
        elif first if part.name.startswith("embedding.") else last:
            yield from _iter_layer_tensors(writing, part, head, tail, tp)
            if part.also:
                yield replace(_rank_tensor(part.also, part, tp, writing.tp), copy=True)
    if last and not first:
        embedding = next(part for part in writing.parts if part.name == EMBEDDING)
        for name, needed in ((EMBEDDING, writing.model.mtp_layers), (HEAD, writing.model.tie_embeddings)):
            if needed:
                yield replace(_rank_tensor(name, embedding, tp, writing.tp), copy=True)


def _group_fused_parts(parts: Sequence[MegatronTensorMapping]) -> list[list[MegatronTensorMapping]]:
    """Group parts by the rank tensors that they are stored in."""
    return [list(group) for _, group in itertools.groupby(parts, lambda part: part.inside or part.name)]


def _fused_tensor(name: str, parts: Sequence[MegatronTensorMapping], rank: int, tp: int) -> _RankTensor:
    """Return a rank's rows of several parts that share all other axes."""
    first = parts[0]
    boxes = [
        (part, (rank * (rows := part.shape[0] // tp), *(0,) * len(part.shape[1:])), (rows, *part.shape[1:]))
        for part in parts
    ]
    total = sum(shape[0] for _, _, shape in boxes)
    return _RankTensor(name, first, (total, *((1,) if first.taps else ()), *first.shape[1:]), tuple(boxes), copy=False)


def _iter_layer_tensors(
    writing: MegatronWriteInput, part: MegatronTensorMapping, head: str, tail: str, tp: int
) -> Iterator[_RankTensor]:
    if not tail.startswith(EXPERTS):
        name = part.local if writing.implementation == "local" else part.te
        whole = writing.implementation != "local" and "_down_proj." in tail
        yield _rank_tensor(head + (name or tail), part, tp, writing.tp, whole=whole)
        return
    for expert in range(part.shape[0]):
        name = f"{head}mlp.experts.local_experts.{expert}.{tail.removeprefix(EXPERTS)}"
        yield _rank_tensor(name, part, tp, writing.tp, expert)


def _rank_tensor(
    name: str, part: MegatronTensorMapping, rank: int, tp: int, expert: int | None = None, *, whole: bool = False
) -> _RankTensor:
    """Return a rank's shard of a part, or of one expert of it, which then has no expert axis."""
    shape, offset = list(part.shape), [0] * len(part.shape)
    copy = rank > 0 and (part.axis is None or whole)
    if expert is not None:
        shape[0], offset[0] = 1, expert
    boxes = [(tuple(offset), tuple(shape))]
    if part.axis is not None and not whole:
        width = shape[part.axis] // (part.halves * tp)
        boxes = [
            (_with_axis(offset, part.axis, (half * tp + rank) * width), _with_axis(shape, part.axis, width))
            for half in range(part.halves)
        ]
        shape[part.axis] = part.halves * width
    held = tuple((part, *box) for box in boxes)
    return _RankTensor(name, part, tuple(shape if expert is None else shape[1:]), held, copy)


def _with_axis(numbers: list[int], axis: int, value: int) -> TensorShape:
    return (*numbers[:axis], value, *numbers[axis + 1 :])
