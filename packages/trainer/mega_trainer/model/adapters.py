"""Makes the adapters of low rank beside a model's projections, split over ranks as those are; or several, to be chosen from.

Gradients are summed over tensor ranks where each sees only a part: of the sequence, or of what a projection goes into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mega_ckpt.lora import MAGNITUDE, A, Adapted, B
from mega_ckpt.pieces import Piece
from mega_trainer.parallel.linear import Linear, grouped_linear
from mega_trainer.parallel.lora import Adapter, ExpertAdapter, Selected, Selection, Update
from mega_trainer.parallel.tensor import Heads, sum_over, whole_sequence
from mega_trainer.rng import Dropout

if TYPE_CHECKING:
    from mega_trainer.model.builder import Builder


@dataclass(frozen=True)
class Choice:
    """Adapters of which each batch row has one or none: the projections that each is for, by its name."""

    selection: Selection
    adapts: Mapping[str, Mapping[str, Adapted]]


def column_adapter(
    build: Builder, blocks: Sequence[Heads], width: int, *, whole: bool = False
) -> Adapter | Selected | None:
    """Beside a column-parallel layer of these projections, one below the other; none where none of them is adapted.

    With `whole`, the layer's input is whole on every tensor rank, and its gradient is summed over them elsewhere.
    """
    return _chosen(build, partial(_column_adapter, blocks=blocks, width=width, whole=whole))


def row_adapter(build: Builder, name: str, width: int) -> Adapter | Selected | None:
    """Beside a row-parallel projection [D, width]."""
    return _chosen(build, partial(_row_adapter, name=name, width=width))


def whole_adapter(build: Builder, name: str) -> Adapter | Selected | None:
    """Beside a projection that every tensor rank holds whole."""
    return _chosen(build, partial(_whole_adapter, name=name))


def _chosen(build: Builder, make: Callable[[Builder], Adapter | None]) -> Adapter | Selected | None:
    """What `make` gives, or of each of the adapters to choose from."""
    if build.choice is None:
        return make(build)
    each = {name: make(replace(build, choice=None, adapts=own)) for name, own in build.choice.adapts.items()}
    found = {name: adapter for name, adapter in each.items() if adapter is not None}
    return Selected(build.choice.selection, found) if found else None


def _column_adapter(build: Builder, blocks: Sequence[Heads], width: int, *, whole: bool) -> Adapter | None:
    tp, updates, pieces, b, lengths, drop = build.groups.tp, [], [], [], [], 0.0
    place = start = 0
    for block in blocks:
        of = build.adapts.get(block.name)
        own = max(1, block.count // tp.size) * block.size
        if of is not None:
            updates.append(Update(place, own, of.rank, of.scale))
            pieces.append(Piece(block.name + A, (of.rank, width), (0, 0), (start, 0), (of.rank, width)))
            b += build.heads([replace(block, name=block.name + B)], (of.rank,))
            start, drop = start + of.rank, of.dropout
            lengths += build.heads([replace(block, name=block.name + MAGNITUDE)], fill=1.0) if of.dora else []
        place += own
    if not updates:
        return None
    sync = (tp,) if whole or build.sp else ()
    a = build.parameter((start, width), pieces, std=start_of(width), grad_sync=sync, replicas=(tp,))
    meet = _same if whole else partial(whole_sequence, group=tp, sp=build.sp)
    dropping = _drop(drop, blocks[0].name, width, whole=whole)
    return Adapter(_linear(build), a, b, updates, meet, dropping, lengths, _same)


def _row_adapter(build: Builder, name: str, width: int) -> Adapter | None:
    tp, of = build.groups.tp, build.adapts.get(name)
    if of is None:
        return None
    own = width // tp.size
    piece = Piece(name + A, (of.rank, width), (0, tp.rank * own), (0, 0), (of.rank, own))
    a = build.parameter(piece.shape, [piece], std=start_of(width))
    b = build.replicated(name + B, (of.out, of.rank))
    drop = _drop(of.dropout, name, width, first=tp.rank * own, whole=True)
    meet = partial(sum_over, group=tp, sp=build.sp)
    updates, total = [Update(0, of.out, of.rank, of.scale)], partial(sum_over, group=tp, sp=False)
    return Adapter(_linear(build), a, [b], updates, meet, drop, _lengths(build, name, of), total)


def _whole_adapter(build: Builder, name: str) -> Adapter | None:
    of = build.adapts.get(name)
    if of is None:
        return None
    a = build.replicated(name + A, of.shapes[0], std=start_of(of.into))
    b = build.replicated(name + B, of.shapes[1])
    drop = _drop(of.dropout, name, of.into)
    updates = [Update(0, of.out, of.rank, of.scale)]
    return Adapter(_linear(build), a, [b], updates, _same, drop, _lengths(build, name, of), _same)


def expert_adapter(build: Builder, name: str, *, parts: int = 1, columns: bool = False) -> ExpertAdapter | None:
    """Beside a projection of experts: `parts` of them one below the other, split by rows; or one, split by columns."""
    of = build.adapts.get(name)
    if of is None:
        return None
    same, part = (build.groups.expert_tp,), of.out // parts
    if columns:
        a = [build.expert_piece(name + A, (of.rank, of.into), axis=1)]
        b = [build.expert_piece(name + B, (of.out, of.rank), axis=None)]
    else:
        a = [build.expert_piece(name + A, (of.rank, of.into), axis=None)]
        b = [build.expert_piece(name + B, (part, of.rank), axis=0, place=place, among=parts) for place in range(parts)]
    down = build.expert_parameter(_shape(a), a, std=start_of(of.into), replicas=() if columns else same)
    up = build.expert_parameter(_shape(b), b, replicas=same if columns else ())
    linear = partial(grouped_linear, kernels=build.kernels, deferred=build.deferred)
    return ExpertAdapter(linear, down, up, of.scale)


def start_of(width: int) -> float:
    """The standard deviation that A starts with: that of PEFT's uniform distribution. B starts from zero."""
    return 1 / math.sqrt(3 * width)


def _shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    return sum(piece.shape[1] for piece in pieces), *pieces[0].shape[2:]


def _linear(build: Builder) -> Linear:
    """In the model's own precision: ranks are no multiples of what fp8 wants."""
    return Linear(build.kernels, build.deferred)


def _lengths(build: Builder, name: str, of: Adapted) -> list[nn.Parameter]:
    """The magnitudes of a projection whose output every tensor rank has whole."""
    return [build.replicated(name + MAGNITUDE, (of.out,), fill=1.0)] if of.dora else []


def _drop(p: float, name: str, width: int, **part: Any) -> Callable[[Dropout, Tensor], Tensor]:
    return partial(Dropout.inputs, p=p, site=f"{name}.lora", width=width, **part)


def _same(x: Tensor) -> Tensor:
    return x
