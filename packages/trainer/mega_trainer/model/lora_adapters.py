"""LoRA adapters of a model's projections, sharded over ranks like the projections; one adapter or several to select
from per row.

Gradients are summed over tensor ranks where each sees only a part: of the sequence, or of what a projection goes into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mega_ckpt.lora_tensors import MAGNITUDE, A, AdaptedModule, B
from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.parallel.lora_layers import (
    AdapterSelection,
    ExpertLoraAdapter,
    LoraAdapterLayer,
    LoraUpdate,
    PerRowAdapters,
)
from mega_trainer.parallel.parallel_linear import LinearFunction, apply_grouped_linear
from mega_trainer.parallel.tensor_parallel import SplitHeads, gather_sequence, sum_partial_results

if TYPE_CHECKING:
    from mega_trainer.model.layer_builder import LayerBuilder


@dataclass(frozen=True)
class LoraAdapterPool:
    """LoRA adapters of which each batch row uses one or none: the adapted projections of each adapter, by adapter name."""

    selection: AdapterSelection
    adapts: Mapping[str, Mapping[str, AdaptedModule]]


def build_column_adapter(
    build: LayerBuilder, blocks: Sequence[SplitHeads], width: int, *, whole: bool = False
) -> LoraAdapterLayer | PerRowAdapters | None:
    """Build the LoRA adapter of a fused column-parallel layer, or return None where no projection is adapted.

    With `whole`, the layer's input is whole on every tensor rank, and its gradient is summed over them elsewhere.
    """
    return _make_each_adapter(build, partial(_column_adapter, blocks=blocks, width=width, whole=whole))


def build_row_adapter(build: LayerBuilder, name: str, width: int) -> LoraAdapterLayer | PerRowAdapters | None:
    """Build the LoRA adapter of a row-parallel projection [D, width]."""
    return _make_each_adapter(build, partial(_row_adapter, name=name, width=width))


def build_replicated_adapter(build: LayerBuilder, name: str) -> LoraAdapterLayer | PerRowAdapters | None:
    """Build the LoRA adapter of a projection that every tensor rank holds whole."""
    return _make_each_adapter(build, partial(_whole_adapter, name=name))


def _make_each_adapter(
    build: LayerBuilder, make: Callable[[LayerBuilder], LoraAdapterLayer | None]
) -> LoraAdapterLayer | PerRowAdapters | None:
    """Return the adapter that `make` builds, or a selection of one per adapter where there are several."""
    if build.choice is None:
        return make(build)
    each = {name: make(replace(build, choice=None, adapts=own)) for name, own in build.choice.adapts.items()}
    found = {name: adapter for name, adapter in each.items() if adapter is not None}
    return PerRowAdapters(build.choice.selection, found) if found else None


def _column_adapter(
    build: LayerBuilder, blocks: Sequence[SplitHeads], width: int, *, whole: bool
) -> LoraAdapterLayer | None:
    tp, updates, pieces, b, lengths, drop = build.groups.tp, [], [], [], [], 0.0
    place = start = 0
    for block in blocks:
        of = build.adapts.get(block.name)
        own = max(1, block.count // tp.size) * block.size
        if of is not None:
            updates.append(LoraUpdate(place, own, of.rank, of.scale))
            pieces.append(TensorPiece(block.name + A, (of.rank, width), (0, 0), (start, 0), (of.rank, width)))
            b += build.build_head_parameters([replace(block, name=block.name + B)], (of.rank,))
            start, drop = start + of.rank, of.dropout
            lengths += (
                build.build_head_parameters([replace(block, name=block.name + MAGNITUDE)], fill=1.0)
                if of.has_magnitude
                else []
            )
        place += own
    if not updates:
        return None
    sync = (tp,) if whole or build.sp else ()
    a = build.build_parameter((start, width), pieces, std=lora_init_std(width), grad_sync=sync, replicas=(tp,))
    meet = _identity if whole else partial(gather_sequence, group=tp, sp=build.sp)
    dropping = _input_dropout(drop, blocks[0].name, width, whole=whole)
    return LoraAdapterLayer(_linear(build), a, b, updates, meet, dropping, lengths, _identity)


def _row_adapter(build: LayerBuilder, name: str, width: int) -> LoraAdapterLayer | None:
    tp, of = build.groups.tp, build.adapts.get(name)
    if of is None:
        return None
    own = width // tp.size
    piece = TensorPiece(name + A, (of.rank, width), (0, tp.rank * own), (0, 0), (of.rank, own))
    a = build.build_parameter(piece.shape, [piece], std=lora_init_std(width))
    b = build.build_replicated(name + B, (of.out_features, of.rank))
    drop = _input_dropout(of.dropout, name, width, first=tp.rank * own, whole=True)
    meet = partial(sum_partial_results, group=tp, sp=build.sp)
    updates, total = (
        [LoraUpdate(0, of.out_features, of.rank, of.scale)],
        partial(sum_partial_results, group=tp, sp=False),
    )
    return LoraAdapterLayer(_linear(build), a, [b], updates, meet, drop, _dora_magnitudes(build, name, of), total)


def _whole_adapter(build: LayerBuilder, name: str) -> LoraAdapterLayer | None:
    of = build.adapts.get(name)
    if of is None:
        return None
    a = build.build_replicated(name + A, of.tensor_shapes[0], std=lora_init_std(of.in_features))
    b = build.build_replicated(name + B, of.tensor_shapes[1])
    drop = _input_dropout(of.dropout, name, of.in_features)
    updates = [LoraUpdate(0, of.out_features, of.rank, of.scale)]
    return LoraAdapterLayer(
        _linear(build), a, [b], updates, _identity, drop, _dora_magnitudes(build, name, of), _identity
    )


def build_expert_adapter(
    build: LayerBuilder, name: str, *, parts: int = 1, columns: bool = False
) -> ExpertLoraAdapter | None:
    """Build the LoRA adapter of an expert projection: `parts` stacked projections split by rows, or one split by
    columns.
    """
    of = build.adapts.get(name)
    if of is None:
        return None
    same, part = (build.groups.expert_tp,), of.out_features // parts
    if columns:
        a = [build.make_expert_piece(name + A, (of.rank, of.in_features), axis=1)]
        b = [build.make_expert_piece(name + B, (of.out_features, of.rank), axis=None)]
    else:
        a = [build.make_expert_piece(name + A, (of.rank, of.in_features), axis=None)]
        b = [
            build.make_expert_piece(name + B, (part, of.rank), axis=0, place=place, among=parts)
            for place in range(parts)
        ]
    down = build.build_expert_parameter(
        _shape(a), a, std=lora_init_std(of.in_features), replicas=() if columns else same
    )
    up = build.build_expert_parameter(_shape(b), b, replicas=same if columns else ())
    linear = partial(apply_grouped_linear, kernels=build.kernels, deferred=build.deferred)
    return ExpertLoraAdapter(linear, down, up, of.scale)


def lora_init_std(width: int) -> float:
    """Return the standard deviation that A is initialised with, that of PEFT's uniform distribution; B starts from
    zero.
    """
    return 1 / math.sqrt(3 * width)


def _shape(pieces: Sequence[TensorPiece]) -> tuple[int, ...]:
    return sum(piece.shape[1] for piece in pieces), *pieces[0].shape[2:]


def _linear(build: LayerBuilder) -> LinearFunction:
    """Return the GEMM of the adapter in the model's own precision; LoRA ranks are no multiples of fp8 block sizes."""
    return LinearFunction(build.kernels, build.deferred)


def _dora_magnitudes(build: LayerBuilder, name: str, of: AdaptedModule) -> list[nn.Parameter]:
    """Return the DoRA magnitudes of a projection whose output every tensor rank has whole."""
    return [build.build_replicated(name + MAGNITUDE, (of.out_features,), fill=1.0)] if of.has_magnitude else []


def _input_dropout(p: float, name: str, width: int, **part: Any) -> Callable[[SeededDropout, Tensor], Tensor]:
    return partial(SeededDropout.drop_projection_inputs, p=p, site=f"{name}.lora", width=width, **part)


def _identity(x: Tensor) -> Tensor:
    return x
