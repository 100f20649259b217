"""Storage layout of a family: the canonical tensors in each disk tensor, as views of it.

A view works in both directions: read from it to load, copy into it to save. So one declaration of a family's names
serves reading, writing, slices and whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mega_ckpt.tensor_pieces import TensorShape


class DiskLayout(Protocol):
    """Interface of the layout of one or more of mega's (canonical) tensors, `parts`, in one tensor on disk."""

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the shape of the tensor on disk that stores canonical tensors of the shapes in `parts`."""

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return one view of the tensor `disk` for each canonical tensor stored in it, with the shape in `parts`."""

    @property
    def splits_on_first_axis(self) -> bool:
        """True if a disk tensor and the canonical tensors in it share their first axis, the experts.
        If so, the tensors can be split along that axis.
        """


@dataclass(frozen=True)
class ConcatLayout:
    """Layout of canonical tensors concatenated on axis 0; with `transposed`, the result is stored as (in, out)."""

    transposed: bool = False
    splits_on_first_axis: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the shape of the disk tensor that concatenates canonical tensors of shapes `parts`.
        The rows of all tensors are added up; other axes are unchanged. The shape is reversed if `transposed`.
        """
        joined = (sum(part[0] for part in parts), *parts[0][1:])
        return joined[::-1] if self.transposed else joined

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return a view of each canonical tensor in the disk tensor that concatenates them.
        A view is a block of the disk tensor's rows, or of its columns if `transposed`.
        """
        rows = disk.t() if self.transposed else disk
        return list(torch.split(rows, [part[0] for part in parts]))


@dataclass(frozen=True)
class UnstackedLayout:
    """Layout of one slice of a stacked canonical tensor (one expert or head), stored on disk without the stack axis."""

    splits_on_first_axis: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the shape of the only canonical tensor in `parts` without its first axis, which has length one."""
        (slab,) = parts
        return slab[1:]

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return the disk tensor with the stack axis, of length one, added in front."""
        return [disk.unsqueeze(0)]


@dataclass(frozen=True)
class ConvLayout:
    """Disk layout of depthwise convolution weights [channels, k] concatenated on axis 0.
    They are stored with an axis of length one in the middle.
    """

    splits_on_first_axis: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the disk shape [channels of all concatenated convolutions, 1, k]."""
        return (sum(part[0] for part in parts), 1, parts[0][1])

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return a view of each concatenated convolution: a block of channels, without the middle axis."""
        return list(torch.split(disk.squeeze(1), [part[0] for part in parts]))


@dataclass(frozen=True)
class SingletonAxesLayout:
    """Layout of a tensor stored with axes of length one `before` and `after` its own; by default a vector as one row."""

    before: int = 1
    after: int = 0
    splits_on_first_axis: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the part's shape with the axes of length one around it."""
        (part,) = parts
        return (*(1,) * self.before, *part, *(1,) * self.after)

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return the disk tensor without the axes of length one."""
        (part,) = parts
        return [disk.view(part)]


@dataclass(frozen=True)
class InterleavedExpertsLayout:
    """Disk layout of GPT-OSS, where several tensors of stacked experts have their rows interleaved.
    The tensors are [experts, rows, columns], or [experts, rows] for biases. Each expert's matrix is stored as (in,
    out).
    """

    splits_on_first_axis: bool = True

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the shape of the disk tensor that interleaves n canonical tensors of shapes `parts`.
        It is [experts, columns, rows * n] for parts [experts, rows, columns], and has no columns for biases.
        """
        (experts, rows, *rest), *_ = parts
        return (experts, *rest, rows * len(parts))

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return a strided view of each canonical tensor in the disk tensor that interleaves them.
        Tensor i of n is every n-th column of the disk tensor from i on, moved to axis 1.
        """
        return [disk[..., index :: len(parts)].movedim(-1, 1) for index in range(len(parts))]


@dataclass(frozen=True)
class ConcatExpertsLayout:
    """Disk layout of Granite, where stacked experts are concatenated on axis 1.
    Experts are [experts, rows, columns]; each matrix is stored as (out, in). With `transposed`, as in Qwen3-VL, it is
    stored as (in, out) unless it is square, which transformers reads as (out, in).
    """

    splits_on_first_axis: bool = True
    transposed: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the shape of the disk tensor that concatenates stacked experts of shapes `parts`.
        It is [experts, rows of all tensors, columns] for parts [experts, rows, columns]; the last two axes are swapped if
        `transposed`.
        """
        experts, rows, columns = parts[0][0], sum(part[1] for part in parts), parts[0][2]
        return (experts, columns, rows) if self.transposed else (experts, rows, columns)

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return a view of each concatenated tensor: a block of the rows of each expert's matrix."""
        turned = self.transposed and disk.shape[1] != disk.shape[2]
        return list(torch.split(disk.mT if turned else disk, [part[1] for part in parts], dim=1))


PLAIN = ConcatLayout()
TRANSPOSED = ConcatLayout(transposed=True)
LAYER = "model.layers.{i}"  # prefix of a decoder layer's canonical tensors
QKV = tuple(f"{LAYER}.self_attn.{name}_proj" for name in "qkv")


@dataclass(frozen=True)
class TensorRule:
    """Rule for the disk name and disk layout of some canonical tensors of a model.
    `{i}` in the names runs over layer numbers, and in `disk` `{i//2}` over pairs of layers, in which `{i%2}` is the first or
    second, `{e}` in `disk` over the first axis of a stack, usually of experts.

    A rule applies only to models that have all of its canonical tensors (some models lack biases).

    Attributes:
        disk: name on disk.
        parts: canonical names of the tensors in it.
        layout: their layout.
        per_head: kind of heads ("kv", "query", "delta", "lightning", or "quarter" for four groups of heads) by which the rows of the parts are interleaved: all parts of the
            first head, then all of the second. Empty: the parts are not interleaved.
        requires: a canonical tensor that the model must have.
        unless: a canonical tensor that the model must not have.
    """

    disk: str
    parts: tuple[str, ...]
    layout: DiskLayout = PLAIN
    per_head: str = ""
    requires: str = ""
    unless: str = ""

    def applies_to_layer(self, index: int, tensors: Mapping[str, TensorShape]) -> bool:
        """Return whether the rule applies to layer `index` of a model with these canonical `tensors`, {name: shape}."""
        required = [*self.parts, self.requires] if self.requires else self.parts
        return self.unless.replace("{i}", str(index)) not in tensors and all(
            name.replace("{i}", str(index)) in tensors for name in required
        )


def weight_bias_rules(
    disk: str, *modules: str, layout: DiskLayout = PLAIN, per_head: str = "", requires: str = "", unless: str = ""
) -> tuple[TensorRule, TensorRule]:
    """Return the tensor rules for weights and biases of modules that are stored as one module.
    The first rule is for the weights, the second for the biases, of the canonical `modules` that are stored as module
    `disk`.

    `requires` and `unless` are modules, which a model has if it has their weights.
    """
    requires, unless = (f"{module}.weight" if module else "" for module in (requires, unless))
    weight, bias = (
        TensorRule(f"{disk}.{kind}", tuple(f"{name}.{kind}" for name in modules), layout, per_head, requires, unless)
        for kind in ("weight", "bias")
    )
    return weight, bias


@dataclass(frozen=True)
class TensorSlice:
    """A rectangle [offset, offset + shape) of the canonical tensor `name`."""

    name: str
    offset: TensorShape
    shape: TensorShape


@dataclass(frozen=True)
class DiskTensor:
    """One tensor in a model's file: its name and shape on disk, and the slices of canonical tensors in it."""

    name: str
    shape: TensorShape
    slabs: tuple[TensorSlice, ...]
    layout: DiskLayout

    def slice_views(self, disk: Tensor) -> list[tuple[TensorSlice, Tensor]]:
        """Return each canonical slice with its view of `disk`, the content of the disk tensor."""
        return list(
            zip(self.slabs, self.layout.canonical_views(disk, [slab.shape for slab in self.slabs]), strict=True)
        )

    def fit_to_shape(self, shape: TensorShape) -> DiskTensor:
        """Return this disk tensor, or its variant with experts stored as (out, in) if only that has `shape`.
        Transformers 5 saves transposed experts as (out, in), and reads either.
        """
        if shape == self.shape or not isinstance(self.layout, ConcatExpertsLayout) or not self.layout.transposed:
            return self
        layout = ConcatExpertsLayout()
        other = replace(self, shape=layout.disk_shape([slab.shape for slab in self.slabs]), layout=layout)
        return other if other.shape == shape else self

    def split_portions(self) -> Iterator[DiskTensor]:
        """Yield the disk tensor in contiguous portions that need little memory.
        Portions are one per expert if the layout allows it, else the whole tensor.
        """
        if not self.layout.splits_on_first_axis:
            yield self
            return
        for index in range(self.shape[0]):
            slabs = [replace(slab, offset=(index, *slab.offset[1:]), shape=(1, *slab.shape[1:])) for slab in self.slabs]
            yield replace(self, shape=(1, *self.shape[1:]), slabs=tuple(slabs))


def expand_tensor_rules(
    rules: Sequence[TensorRule], tensors: Mapping[str, TensorShape], layers: int, heads: Mapping[str, int] | None = None
) -> dict[str, DiskTensor]:
    """Return {disk name: DiskTensor} of a model with these canonical `tensors`, by applying `rules`.
    A tensor without a rule keeps its canonical name.

    `heads` is the number of heads of each kind that rules refer to (`TensorRule.per_head`). The result is in the order
    of `tensors`, which is the order of the forward pass.
    """
    found: dict[str, list[DiskTensor]] = {name: [] for name in tensors}
    covered: set[str] = set()
    for rule in rules:
        for index in range(layers) if "{i" in rule.disk else (0,):
            parts = [part.replace("{i}", str(index)) for part in rule.parts]
            if rule.applies_to_layer(index, tensors):
                covered.update(parts)
                found[parts[0]] += _expand_rule(rule, index, parts, tensors, heads or {})
    for name, shape in tensors.items():
        if name not in covered:
            found[name].append(DiskTensor(name, shape, (_whole_slice(name, shape),), PLAIN))
    return {disk.name: disk for disks in found.values() for disk in disks}


def _expand_rule(
    rule: TensorRule, index: int, parts: Sequence[str], tensors: Mapping[str, TensorShape], heads: Mapping[str, int]
) -> list[DiskTensor]:
    name = rule.disk.replace("{i}", str(index)).replace("{i//2}", str(index // 2)).replace("{i%2}", str(index % 2))
    if rule.per_head:
        count = heads[rule.per_head]
        slabs = [_head_slice(part, tensors[part], head, count) for head in range(count) for part in parts]
        return [_disk_tensor(rule.layout, name, slabs)]
    if "{e}" not in name:
        return [_disk_tensor(rule.layout, name, [_whole_slice(part, tensors[part]) for part in parts])]
    return [
        _disk_tensor(
            rule.layout,
            name.replace("{e}", str(expert)),
            [_expert_slice(part, tensors[part], expert) for part in parts],
        )
        for expert in range(tensors[parts[0]][0])
    ]


def _disk_tensor(layout: DiskLayout, name: str, slabs: Sequence[TensorSlice]) -> DiskTensor:
    return DiskTensor(name, layout.disk_shape([slab.shape for slab in slabs]), tuple(slabs), layout)


def _whole_slice(name: str, shape: TensorShape) -> TensorSlice:
    return TensorSlice(name, (0,) * len(shape), shape)


def _head_slice(name: str, shape: TensorShape, head: int, heads: int) -> TensorSlice:
    rows = shape[0] // heads
    return TensorSlice(name, (head * rows, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))


def _expert_slice(name: str, shape: TensorShape, expert: int) -> TensorSlice:
    return TensorSlice(name, (expert, *(0,) * (len(shape) - 1)), (1, *shape[1:]))
