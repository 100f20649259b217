"""Tensors of `torch_dist` folders that Megatron saved with `singleton_local_shards`, joined as it saves them without.

linear_fc1.weight_w, _v             the gate rows and the up rows, else one tensor [2F, D]
experts.experts.{e}.linear_fc1...   a tensor for each expert, else one tensor [E, 2F, D]
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from mega_ckpt.formats.dcp import Saved, Stored
from mega_common.errors import CheckpointError

_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
_EXPERT = re.compile(r"(.*mlp\.experts\.experts\.)(\d+)\.(linear_fc[12]\.(?:weight|bias))")


def join_singletons(tensors: Mapping[str, Saved]) -> dict[str, Saved]:
    """Return the tensors with halves and experts joined; others as they are.

    Raises:
        CheckpointError: naming a tensor whose counterpart is missing or has another shape or dtype.
    """
    return _join_experts(_join_halves(tensors))


def _join_halves(tensors: Mapping[str, Saved]) -> dict[str, Saved]:
    out: dict[str, Saved] = {}
    for key, one in tensors.items():
        if (found := _HALF.fullmatch(key)) is None:
            out[key] = one
            continue
        gate, up = (tensors.get(f"{found[1]}_{half}") for half in "wv")
        if gate is None or up is None or (gate.shape, gate.dtype) != (up.shape, up.dtype):
            raise CheckpointError(f"{key}: its other half (_w, _v) is missing, or of another shape or dtype")
        rows = gate.shape[0]
        moved = [replace(chunk, offset=(chunk.offset[0] + rows, *chunk.offset[1:])) for chunk in up.chunks]
        out[found[1]] = Saved(gate.dtype, (2 * rows, *gate.shape[1:]), [*gate.chunks, *moved])
    return out


def _join_experts(tensors: Mapping[str, Saved]) -> dict[str, Saved]:
    out: dict[str, Saved] = {}
    experts: defaultdict[str, dict[int, Saved]] = defaultdict(dict)
    for key, one in tensors.items():
        if found := _EXPERT.fullmatch(key):
            experts[found[1] + found[3]][int(found[2])] = one
        else:
            out[key] = one
    for key, held in experts.items():
        first = held[min(held)]
        if sorted(held) != list(range(len(held))) or any(
            (one.shape, one.dtype) != (first.shape, first.dtype) for one in held.values()
        ):
            raise CheckpointError(f"{key}: an expert is missing, or of another shape or dtype than the others")
        chunks = [_of_expert(chunk, index) for index, one in held.items() for chunk in one.chunks]
        out[key] = Saved(first.dtype, (len(held), *first.shape), chunks)
    return out


def _of_expert(chunk: Stored, index: int) -> Stored:
    read: Callable[[], Tensor] = chunk.read
    return Stored((index, *chunk.offset), (1, *chunk.shape), lambda: read().unsqueeze(0))
