"""LoRA adapters of a model's projections, sharded over ranks like the projections; one adapter, or a selection per row.

Gradients are summed over the tensor ranks if each rank has only a part of the sequence or of the projection's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from mega_ckpt.lora_tensors import MAGNITUDE, A, AdaptedModule, B
from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.model.parameter_builder import ParameterBuilder
from mega_trainer.parallel.lora_layers import (
    ExpertLoraAdapter,
    LoraAdapterLayer,
    LoraOutputColumns,
    PerRowAdapters,
)
from mega_trainer.parallel.parallel_linear import ParallelLinearFunction, apply_grouped_linear
from mega_trainer.parallel.tensor_parallel import SplitHeads, gather_from_sequence_parallel_region, sum_partial_results


def build_column_adapter(
    build: ParameterBuilder, blocks: Sequence[SplitHeads], width: int, *, whole: bool = False
) -> LoraAdapterLayer | PerRowAdapters | None:
    """Build the LoRA adapter of a fused column-parallel layer, or return None if no projection is adapted.

    With `whole`, the layer's input is whole on every tensor rank, and the caller sums its gradient over them.
    """
    return _make_each_adapter(build, partial(_column_adapter, blocks=blocks, width=width, whole=whole))


def build_row_adapter(build: ParameterBuilder, name: str, width: int) -> LoraAdapterLayer | PerRowAdapters | None:
    """Build the LoRA adapter of a row-parallel projection [D, width], or return None if it is not adapted."""
    return _make_each_adapter(build, partial(_row_adapter, name=name, width=width))


def build_replicated_adapter(build: ParameterBuilder, name: str) -> LoraAdapterLayer | PerRowAdapters | None:
    """Build the LoRA adapter of a projection that is whole on every tensor rank; return None if it is not adapted."""
    return _make_each_adapter(build, partial(_whole_adapter, name=name))


def _make_each_adapter(
    build: ParameterBuilder, make: Callable[[ParameterBuilder], LoraAdapterLayer | None]
) -> LoraAdapterLayer | PerRowAdapters | None:
    """Return the adapter that `make` builds, or with a pool of adapters a selection of one per adapter."""
    if build.choice is None:
        return make(build)
    pool = {name: make(replace(build, choice=None, adapts=own)) for name, own in build.choice.adapts.items()}
    adapters = {name: adapter for name, adapter in pool.items() if adapter is not None}
    return PerRowAdapters(build.choice.selection, adapters) if adapters else None


def _column_adapter(
    build: ParameterBuilder, blocks: Sequence[SplitHeads], width: int, *, whole: bool
) -> LoraAdapterLayer | None:
    tp, updates, pieces, b, magnitudes, drop = build.groups.tp, [], [], [], [], 0.0
    column = start = 0
    for block in blocks:
        module = build.adapts.get(block.name)
        own = max(1, block.count // tp.size) * block.size
        if module is not None:
            rank = module.rank
            updates.append(LoraOutputColumns(column, own, rank, module.scale))
            pieces.append(TensorPiece(block.name + A, (rank, width), (0, 0), (start, 0), (rank, width)))
            b += build.build_head_parameters([replace(block, name=block.name + B)], (rank,))
            start, drop = start + rank, module.dropout
            if module.has_magnitude:
                magnitudes += build.build_head_parameters([replace(block, name=block.name + MAGNITUDE)], fill=1.0)
        column += own
    if not updates:
        return None
    sync = (tp,) if whole or build.sp else ()
    a = build.build_parameter((start, width), pieces, std=lora_init_std(width), grad_sync=sync, replicas=(tp,))
    meet = _identity if whole else partial(gather_from_sequence_parallel_region, group=tp, sp=build.sp)
    dropout = _input_dropout(drop, blocks[0].name, width, whole=whole)
    return LoraAdapterLayer(_linear(build), a, b, updates, meet, dropout, magnitudes, _identity)


def _row_adapter(build: ParameterBuilder, name: str, width: int) -> LoraAdapterLayer | None:
    tp, module = build.groups.tp, build.adapts.get(name)
    if module is None:
        return None
    own, rank = width // tp.size, module.rank
    piece = TensorPiece(name + A, (rank, width), (0, tp.rank * own), (0, 0), (rank, own))
    a = build.build_parameter(piece.shape, [piece], std=lora_init_std(width))
    b = build.build_replicated(name + B, (module.out_features, rank))
    drop = _input_dropout(module.dropout, name, width, first=tp.rank * own, whole=True)
    meet = partial(sum_partial_results, group=tp, sp=build.sp)
    updates = [LoraOutputColumns(0, module.out_features, rank, module.scale)]
    sum_squares = partial(sum_partial_results, group=tp, sp=False)
    magnitudes = _dora_magnitudes(build, name, module)
    return LoraAdapterLayer(_linear(build), a, [b], updates, meet, drop, magnitudes, sum_squares)


def _whole_adapter(build: ParameterBuilder, name: str) -> LoraAdapterLayer | None:
    module = build.adapts.get(name)
    if module is None:
        return None
    a = build.build_replicated(name + A, module.tensor_shapes[0], std=lora_init_std(module.in_features))
    b = build.build_replicated(name + B, module.tensor_shapes[1])
    drop = _input_dropout(module.dropout, name, module.in_features)
    updates = [LoraOutputColumns(0, module.out_features, module.rank, module.scale)]
    magnitudes = _dora_magnitudes(build, name, module)
    return LoraAdapterLayer(_linear(build), a, [b], updates, _identity, drop, magnitudes, _identity)


def build_expert_adapter(
    build: ParameterBuilder, name: str, *, parts: int = 1, columns: bool = False
) -> ExpertLoraAdapter | None:
    """Build the LoRA adapter of an expert projection, or return None if the projection is not adapted.
    The adapter is for `parts` stacked projections split by rows, or for one split by columns.
    """
    module = build.adapts.get(name)
    if module is None:
        return None
    replicas, rank, width = (build.groups.expert_tp,), module.rank, module.in_features
    if columns:
        a = [build.make_expert_piece(name + A, (rank, width), axis=1)]
        b = [build.make_expert_piece(name + B, (module.out_features, rank), axis=None)]
    else:
        rows = module.out_features // parts
        a = [build.make_expert_piece(name + A, (rank, width), axis=None)]
        b = [build.make_expert_piece(name + B, (rows, rank), axis=0, place=i, among=parts) for i in range(parts)]
    down = build.build_expert_parameter(_shape(a), a, std=lora_init_std(width), replicas=() if columns else replicas)
    up = build.build_expert_parameter(_shape(b), b, replicas=replicas if columns else ())
    linear = partial(apply_grouped_linear, kernels=build.kernels, deferred=build.deferred)
    return ExpertLoraAdapter(linear, down, up, module.scale)


def lora_init_std(width: int) -> float:
    """Return the initial standard deviation of LoRA's A, 1 / sqrt(3 width), as of PEFT's uniform one; B starts at zero."""
    return 1 / math.sqrt(3 * width)


def _shape(pieces: Sequence[TensorPiece]) -> tuple[int, ...]:
    return sum(piece.shape[1] for piece in pieces), *pieces[0].shape[2:]


def _linear(build: ParameterBuilder) -> ParallelLinearFunction:
    """Return the adapter's linear function, never in fp8: LoRA ranks are not multiples of fp8 block sizes."""
    return ParallelLinearFunction(build.kernels, build.deferred)


def _dora_magnitudes(build: ParameterBuilder, name: str, module: AdaptedModule) -> list[nn.Parameter]:
    """Return the DoRA magnitudes of a projection whose output is whole on every tensor rank."""
    return [build.build_replicated(name + MAGNITUDE, (module.out_features,), fill=1.0)] if module.has_magnitude else []


def _input_dropout(p: float, name: str, width: int, **part: Any) -> Callable[[SeededDropout, Tensor], Tensor]:
    return partial(SeededDropout.drop_projection_inputs, p=p, site=f"{name}.lora", width=width, **part)


def _identity(x: Tensor) -> Tensor:
    return x
