"""Writing Megatron's older `torch` folders, a file for every rank; `megatron_legacy` says what they are.

A file is first written without its tensors' bytes, which then go to their places one block after another.
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
    Part,
    is_projection,
    split_layer,
)
from mega_ckpt.formats.megatron_write import RELEASE, Writing, durable
from mega_ckpt.formats.torch_archive import load_archive
from mega_ckpt.journal import Finished, Once, entry_of
from mega_ckpt.pieces import Shape
from mega_ckpt.shards import raw
from mega_ckpt.stream import blocks
from mega_common.files import naming


@dataclass(frozen=True)
class _Local:
    """A rank's tensor: its name there, and the boxes (part, offset, shape) that it holds one after another.

    `part` is the first of them; `copy` says that another rank has the same.
    """

    name: str
    part: Part
    shape: Shape
    boxes: tuple[tuple[Part, Shape, Shape], ...]
    copy: bool


def write_legacy(writing: Writing, folder: Path, advance: Callable[[int], object], once: Once) -> None:
    """Write the files of all ranks into an existing folder; durable when this returns."""
    for tp, pp in itertools.product(range(writing.tp), range(writing.pp)):
        place = folder / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if writing.pp > 1 else ""))
        place.mkdir(exist_ok=True)
        tensors, last = list(_locals(writing, tp, pp)), pp == writing.pp - 1
        make = partial(_write_rank, writing, place / FILE, tensors, last=last, advance=advance)
        once(f"{RELEASE}/{place.name}/{FILE}", b"", make)


def _write_rank(
    writing: Writing, path: Path, tensors: list[_Local], *, last: bool, advance: Callable[[int], object]
) -> Finished:
    model: dict[str, Any] = {}
    for one in tensors:
        model[one.name] = torch.empty(one.shape, dtype=writing.dtype(one.part))
        if is_projection(one.name):
            model[one.name.removesuffix("weight") + "_extra_state"] = None
    if last:
        model |= dict.fromkeys(HEAD_STATES if writing.model.encoder else HEAD_STATES[:1])
    state = {"args": Namespace(**writing.args), "checkpoint_version": 3.0, "iteration": 0, "model": model}
    with torch.serialization.skip_data(), durable(path) as stream:
        torch.save(state, stream)
    places = load_archive(path)["model"]
    with naming(path), open(path, "r+b") as stream:
        for one in tensors:
            stream.seek(places[one.name].begin)
            for part, offset, shape in one.boxes:
                for start, extent in blocks(shape, writing.dtype(part)):
                    at = tuple(o + s for o, s in zip(offset, start, strict=True))
                    stream.write(raw(writing.block(part, at, extent)))
                    advance(0 if one.copy else math.prod(extent) * writing.dtype(one.part).itemsize)
        stream.flush()
        os.fsync(stream.fileno())
    return Finished(file=entry_of(path))


def _locals(writing: Writing, tp: int, pp: int) -> Iterator[_Local]:
    """The tensors of one rank, in the order of the forward pass."""
    own, first, last = writing.model.num_layers // writing.pp, pp == 0, pp == writing.pp - 1
    for parts in _together(writing.parts):
        part, *others = parts
        head, tail = split_layer(part.name)
        if head.startswith(STACKS):
            stack, _, number = head[:-1].rpartition(".")
            layer = int(number) - pp * own
            if 0 <= layer < own and others:
                yield _fused(f"{stack}.{layer}.{split_layer(part.inside)[1]}", parts, tp, writing.tp)
            elif 0 <= layer < own:
                yield from _layer(writing, part, f"{stack}.{layer}.", tail, tp)
        elif first if part.name.startswith("embedding.") else last:
            yield from _layer(writing, part, head, tail, tp)
            if part.also:
                yield replace(_local(part.also, part, tp, writing.tp), copy=True)
    if last and not first:
        embedding = next(part for part in writing.parts if part.name == EMBEDDING)
        for name, there in ((EMBEDDING, writing.model.mtp_layers), (HEAD, writing.model.tie_embeddings)):
            if there:
                yield replace(_local(name, embedding, tp, writing.tp), copy=True)


def _together(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts by the tensors of ranks that they are in."""
    return [list(group) for _, group in itertools.groupby(parts, lambda part: part.inside or part.name)]


def _fused(name: str, parts: Sequence[Part], rank: int, tp: int) -> _Local:
    """A rank's rows of each of several parts, which all have the same other axes."""
    first = parts[0]
    boxes = [
        (part, (rank * (rows := part.shape[0] // tp), *(0,) * len(part.shape[1:])), (rows, *part.shape[1:]))
        for part in parts
    ]
    total = sum(shape[0] for _, _, shape in boxes)
    return _Local(name, first, (total, *((1,) if first.taps else ()), *first.shape[1:]), tuple(boxes), copy=False)


def _layer(writing: Writing, part: Part, head: str, tail: str, tp: int) -> Iterator[_Local]:
    if not tail.startswith(EXPERTS):
        name = part.local if writing.implementation == "local" else part.te
        whole = writing.implementation != "local" and "_down_proj." in tail
        yield _local(head + (name or tail), part, tp, writing.tp, whole=whole)
        return
    for expert in range(part.shape[0]):
        name = f"{head}mlp.experts.local_experts.{expert}.{tail.removeprefix(EXPERTS)}"
        yield _local(name, part, tp, writing.tp, expert)


def _local(name: str, part: Part, rank: int, tp: int, expert: int | None = None, *, whole: bool = False) -> _Local:
    """A rank's share of a part, or of one expert of it, which then has no axis for them."""
    shape, offset = list(part.shape), [0] * len(part.shape)
    copy = rank > 0 and (part.axis is None or whole)
    if expert is not None:
        shape[0], offset[0] = 1, expert
    boxes = [(tuple(offset), tuple(shape))]
    if part.axis is not None and not whole:
        width = shape[part.axis] // (part.halves * tp)
        boxes = [
            (_at(offset, part.axis, (half * tp + rank) * width), _at(shape, part.axis, width))
            for half in range(part.halves)
        ]
        shape[part.axis] = part.halves * width
    held = tuple((part, *box) for box in boxes)
    return _Local(name, part, tuple(shape if expert is None else shape[1:]), held, copy)


def _at(numbers: list[int], axis: int, value: int) -> Shape:
    return (*numbers[:axis], value, *numbers[axis + 1 :])
