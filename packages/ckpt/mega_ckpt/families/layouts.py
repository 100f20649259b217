"""How a family stores its weights: which canonical tensors one disk tensor holds, as views of it.

A view works in both directions: read from it to load, copy into it to save. So one declaration of a family's names
serves reading, writing, slices and whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mega_ckpt.pieces import Shape


class Layout(Protocol):
    """How some canonical shapes become one disk tensor."""

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """The disk tensor's shape."""

    def views(self, disk: Tensor, parts: Sequence[Shape]) -> list[Tensor]:
        """One view of the disk tensor for each canonical part, of the part's shape."""

    @property
    def by_slab(self) -> bool:
        """Whether the first axis of disk and canonical tensors is the same, so that parts along it stand alone."""


@dataclass(frozen=True)
class Joined:
    """Canonical tensors one after another on axis 0; with `transposed`, the whole is stored as (in, out)."""

    transposed: bool = False
    by_slab: bool = False

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """Rows add up, the other axes agree."""
        joined = (sum(part[0] for part in parts), *parts[0][1:])
        return joined[::-1] if self.transposed else joined

    def views(self, disk: Tensor, parts: Sequence[Shape]) -> list[Tensor]:
        """Blocks of rows, or of columns when transposed."""
        rows = disk.t() if self.transposed else disk
        return list(torch.split(rows, [part[0] for part in parts]))


@dataclass(frozen=True)
class OneSlab:
    """One slab of a stack of experts (or heads), stored without that axis."""

    by_slab: bool = False

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """The slab without its axis of length one."""
        (slab,) = parts
        return slab[1:]

    def views(self, disk: Tensor, parts: Sequence[Shape]) -> list[Tensor]:
        """The tensor with that axis again."""
        return [disk.unsqueeze(0)]


@dataclass(frozen=True)
class Taps:
    """Weights [channels, k] of convolutions one after another, with an axis of length one in the middle."""

    by_slab: bool = False

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """[all channels, 1, k]."""
        return (sum(part[0] for part in parts), 1, parts[0][1])

    def views(self, disk: Tensor, parts: Sequence[Shape]) -> list[Tensor]:
        """Blocks of channels, without that axis."""
        return list(torch.split(disk.squeeze(1), [part[0] for part in parts]))


@dataclass(frozen=True)
class InTurns:
    """Stacks of experts [E, F, D] or [E, F] whose rows take turns, each expert's matrix stored as (in, out): GPT-OSS."""

    by_slab: bool = True

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """[E, D, F times the number of parts]."""
        (experts, rows, *rest), *_ = parts
        return (experts, *rest, rows * len(parts))

    def views(self, disk: Tensor, parts: Sequence[Shape]) -> list[Tensor]:
        """Every so many columns."""
        return [disk[..., index :: len(parts)].movedim(-1, 1) for index in range(len(parts))]


@dataclass(frozen=True)
class Halves:
    """Stacks of experts [E, F, D] one after another on axis 1, each matrix stored as (out, in): Granite."""

    by_slab: bool = True

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """[E, rows of all parts, D]."""
        return (parts[0][0], sum(part[1] for part in parts), parts[0][2])

    def views(self, disk: Tensor, parts: Sequence[Shape]) -> list[Tensor]:
        """Blocks of each matrix's rows."""
        return list(torch.split(disk, [part[1] for part in parts], dim=1))


PLAIN = Joined()
TRANSPOSED = Joined(transposed=True)


@dataclass(frozen=True)
class Rule:
    """Where canonical tensors are on disk. `{i}` in the names runs over layers, `{e}` in `disk` over the first axis of a stack, of
    experts mostly.

    A rule whose canonical tensors a model does not have (a bias, say) does not apply to it; nor does one whose `beside`
    it lacks, or whose `unless` it has. `by` names a kind of heads ("kv", "query", "delta") where the rows of each head follow those of the
    one before: all parts of the first head, then all of the second.
    """

    disk: str
    parts: tuple[str, ...]
    layout: Layout = PLAIN
    by: str = ""
    beside: str = ""
    unless: str = ""

    def applies(self, index: int, tensors: Mapping[str, Shape]) -> bool:
        """Whether it is for layer `index` of a model with these tensors."""
        beside, *parts, unless = (name.replace("{i}", str(index)) for name in (self.beside, *self.parts, self.unless))
        return all(name in tensors for name in (*parts, *([beside] if beside else []))) and unless not in tensors


@dataclass(frozen=True)
class Slab:
    """A rectangle of a canonical tensor."""

    name: str
    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class DiskTensor:
    """One tensor of a file: its name and shape there, and the slabs of canonical tensors it holds."""

    name: str
    shape: Shape
    slabs: tuple[Slab, ...]
    layout: Layout

    def views(self, disk: Tensor) -> list[tuple[Slab, Tensor]]:
        """Each slab with the view of the disk tensor that it is."""
        return list(zip(self.slabs, self.layout.views(disk, [slab.shape for slab in self.slabs]), strict=True))

    def portions(self) -> Iterator[DiskTensor]:
        """The tensor in contiguous parts that need little memory: those of one expert each, or all of it."""
        if not self.layout.by_slab:
            yield self
            return
        for index in range(self.shape[0]):
            slabs = [replace(slab, offset=(index, *slab.offset[1:]), shape=(1, *slab.shape[1:])) for slab in self.slabs]
            yield replace(self, shape=(1, *self.shape[1:]), slabs=tuple(slabs))


def disk_tensors(
    rules: Sequence[Rule], tensors: Mapping[str, Shape], layers: int, heads: Mapping[str, int] | None = None
) -> dict[str, DiskTensor]:
    """Expand `rules` for a model with these canonical `tensors`; what no rule covers is stored under its own name.

    `heads` tells how many there are of each kind that rules go by. The result is in the order of `tensors`, which is the
    order of the forward pass.
    """
    found: dict[str, list[DiskTensor]] = {name: [] for name in tensors}
    covered: set[str] = set()
    for rule in rules:
        for index in range(layers) if "{i}" in rule.disk else (0,):
            parts = [part.replace("{i}", str(index)) for part in rule.parts]
            if rule.applies(index, tensors):
                covered.update(parts)
                found[parts[0]] += _expand(rule, index, parts, tensors, heads or {})
    for name, shape in tensors.items():
        if name not in covered:
            found[name].append(DiskTensor(name, shape, (_whole(name, shape),), PLAIN))
    return {disk.name: disk for disks in found.values() for disk in disks}


def _expand(
    rule: Rule, index: int, parts: Sequence[str], tensors: Mapping[str, Shape], heads: Mapping[str, int]
) -> list[DiskTensor]:
    name = rule.disk.replace("{i}", str(index))
    if rule.by:
        count = heads[rule.by]
        slabs = [_head(part, tensors[part], head, count) for head in range(count) for part in parts]
        return [_disk(rule.layout, name, slabs)]
    if "{e}" not in name:
        return [_disk(rule.layout, name, [_whole(part, tensors[part]) for part in parts])]
    return [
        _disk(rule.layout, name.replace("{e}", str(expert)), [_expert(part, tensors[part], expert) for part in parts])
        for expert in range(tensors[parts[0]][0])
    ]


def _disk(layout: Layout, name: str, slabs: Sequence[Slab]) -> DiskTensor:
    return DiskTensor(name, layout.shape([slab.shape for slab in slabs]), tuple(slabs), layout)


def _whole(name: str, shape: Shape) -> Slab:
    return Slab(name, (0,) * len(shape), shape)


def _head(name: str, shape: Shape, head: int, heads: int) -> Slab:
    rows = shape[0] // heads
    return Slab(name, (head * rows, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))


def _expert(name: str, shape: Shape, expert: int) -> Slab:
    return Slab(name, (expert, *(0,) * (len(shape) - 1)), (1, *shape[1:]))
