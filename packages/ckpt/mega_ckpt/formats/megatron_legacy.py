"""Megatron's older `torch` folders: one file per rank with its tensors, under the names of its modules.

    iter_0000100/mp_rank_{tp}[_{pp}][_{ep}]/model_optim_rng.pt

Each stage numbers its layers from zero; their offset is the number of layers before them: chunk 0 of all stages, then
chunk 1 of all stages in an interleaved pipeline. Source: Megatron-LM, megatron/training/checkpointing.py.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mega_ckpt.formats.dcp import StoredTensorSlice
from mega_ckpt.formats.megatron_contents import MegatronContents, MegatronOptimizerState, MegatronTensor
from mega_ckpt.formats.megatron_names import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    MegatronTensorMapping,
    infer_megatron_args_from_names,
    normalize_megatron_tensor_name,
    split_megatron_layer_prefix,
)
from mega_ckpt.formats.torch_archive import StoredTensor, load_torch_archive, namespace_attributes
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError

FILE, BUCKETS = "model_optim_rng.pt", "distrib_optim.pt"
_FILES = (FILE, "model_rng.pt")
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_NO_NAMES = (
    "in the format torch the optimizer's tensors have rank-local numbers instead of names "
    "(save with --ckpt-format torch_dist in Megatron)"
)
_NUMBER = re.compile(r"^((?:encoder|decoder)\.layers\.)(\d+)")
_NO_WEIGHTS = ("_extra_state", "rotary_pos_emb.inv_freq")
_BY_EXPERT = (
    r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.*)",
    r"mlp\.experts\.(?P<rest>linear_.*\.\w+?)(?P<expert>\d+)",
)

Chunk = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class _RankFile:
    """Contents of one file: model chunks, as tensors by name."""

    tp: int
    pp: int
    ep: int
    chunks: Sequence[Chunk]


@dataclass(frozen=True)
class _LocalTensor:
    """A tensor of one rank as a rectangle of a `MegatronTensorMapping`, without the offset of tensor parallelism; experts are on
    axis 0, starting at `expert`.
    """

    shape: TensorShape
    source: StoredTensor
    change: Callable[[Tensor], Tensor]
    expert: int = 0


def open_megatron_legacy_checkpoint(folder: Path) -> MegatronContents:
    """Open a Megatron checkpoint of the legacy format `torch`, one file per rank, without reading its tensors.

    Raises:
        CheckpointError: when a rank is missing, or a file is damaged or has a function or class that is not allowed.
    """
    files = {_FOLDER.fullmatch(path.name): path for path in sorted(folder.glob("mp_rank_*"))}
    states = [(match, _load_rank_state(path)) for match, path in files.items() if match]
    args = namespace_attributes(states[0][1].get("args")) if states else {}
    only_experts = args.get("pipeline_model_parallel_size") == 1 and args.get("expert_model_parallel_size") not in (
        None,
        1,
    )
    ranks = []
    for match, state in states:
        tp, second, third = (int(number or 0) for number in match.groups())
        pp, ep = (0, second) if only_experts else (second, third)
        ranks.append(_RankFile(tp, pp, ep, list(_iter_chunks(state, folder / match[0]))))
    present = {(rank.tp, rank.pp, rank.ep) for rank in ranks}
    sizes = [1 + max(numbers) for numbers in zip(*present, strict=True)]
    sizes[0] = max(sizes[0], int(args.get("tensor_model_parallel_size") or 1))
    missing = next((rank for rank in itertools.product(*map(range, sizes)) if rank not in present), None)
    if missing or not ranks:
        tp, pp, ep = missing or (0, 0, 0)
        raise CheckpointError(
            f"{folder}: the file of tp rank {tp}, pp rank {pp}, ep rank {ep} is missing (mp_rank_{tp:02d})",
            hint="copy the folder of every rank",
        )
    args = args | infer_megatron_args_from_names(name for rank in ranks for chunk in rank.chunks for name in chunk)
    if args.get("is_encoder_decoder") and sizes[1] > 1:
        raise CheckpointError(
            f"{folder}: a T5 with pipeline parallelism is not supported in the format torch",
            hint="save it with --ckpt-format torch_dist",
        )
    iteration = states[0][1].get("iteration")
    tensors = sum(len(chunk) for rank in ranks for chunk in rank.chunks)
    has_optimizer = "optimizer" in states[0][1] or any(folder.glob(f"mp_rank_*/{BUCKETS}"))
    return MegatronContents(
        "torch", args, iteration if isinstance(iteration, int) else None, tensors, lambda parts: _assemble_tensors(ranks, sizes, parts),
        optimizer=MegatronOptimizerState(unreadable_reason=_NO_NAMES if has_optimizer else ""),
    )  # fmt: skip


def _load_rank_state(folder: Path) -> Mapping[str, Any]:
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{folder}: {FILE} is missing")
    state = load_torch_archive(path)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: not a rank file of Megatron")
    return state


def _iter_chunks(state: Mapping[str, Any], source: Path) -> Iterator[Chunk]:
    names = sorted(
        (name for name in state if re.fullmatch(r"model\d*", str(name))), key=lambda name: int(name[5:] or 0)
    )
    for name in names:
        chunk = state[name]
        if not isinstance(chunk, Mapping) or "language_model" in chunk:
            raise CheckpointError(
                f"{source}: models from before Megatron-Core are not supported",
                hint="load it in Megatron-LM and save it with --use-mcore-models",
            )
        yield {
            str(key).removeprefix("module."): value for key, value in chunk.items()
            if isinstance(value, StoredTensor) and not str(key).endswith(_NO_WEIGHTS)
        }  # fmt: skip


def _assemble_tensors(
    ranks: Sequence[_RankFile], sizes: Sequence[int], parts: Sequence[MegatronTensorMapping]
) -> dict[str, MegatronTensor]:
    """Assemble the tensors of the ranks, by the names of `parts`."""
    by_name, held = {part.name: part for part in parts}, dict[str, MegatronTensor]()
    fused = defaultdict[str, list[MegatronTensorMapping]](list)
    for one in parts:
        fused[one.inside].append(one)
    for rank, chunk, before in _iter_with_offset(ranks):
        for name, stored in chunk.items():
            if normalize_megatron_tensor_name(name) != name and normalize_megatron_tensor_name(name) in chunk:
                continue  # the same tensor under two names
            if (name == HEAD and name not in by_name) or (name == EMBEDDING and rank.pp):
                continue  # the last stage's copy of the embedding
            full, local = _locate_in_part(_offset_layer(name, before), stored, by_name, sizes[2])
            part, blocks = by_name.get(full), _split_fused_rows(fused.get(full, []), stored, sizes[0])
            if blocks:
                for block, inner in blocks if rank.ep == 0 else ():
                    _add_local_tensor(held, block, inner, rank, sizes)
            elif part is None:
                held[full] = MegatronTensor(stored.dtype, stored.shape)
            elif EXPERTS in full or rank.ep == 0:
                _add_local_tensor(held, part, local, rank, sizes)
    return held


def _split_fused_rows(
    parts: Sequence[MegatronTensorMapping], stored: StoredTensor, tp: int
) -> list[tuple[MegatronTensorMapping, _LocalTensor]]:
    """Return the rows of a rank's tensor that belong to each part; empty if the shape does not match."""
    rows = [part.shape[0] // tp for part in parts]
    if stored.shape[:1] != (sum(rows),):
        return []
    starts = itertools.accumulate(rows, initial=0)
    return [
        (part, _LocalTensor((count, *part.shape[1:]), stored, _row_slicer(start, count, part.shape[1:])))
        for part, start, count in zip(parts, starts, rows, strict=False)
    ]


def _row_slicer(start: int, count: int, rest: TensorShape) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.narrow(0, start, count).reshape(count, *rest)


def _iter_with_offset(ranks: Sequence[_RankFile]) -> Iterator[tuple[_RankFile, Chunk, int]]:
    """Yield every chunk of every rank, with the number of layers before it."""
    for tp, ep in sorted({(rank.tp, rank.ep) for rank in ranks}):
        stages = sorted((rank for rank in ranks if (rank.tp, rank.ep) == (tp, ep)), key=lambda rank: rank.pp)
        before = 0
        for chunks in itertools.zip_longest(*(rank.chunks for rank in stages), fillvalue={}):
            for rank, chunk in zip(stages, chunks, strict=True):
                yield rank, chunk, before
                layers = {int(found[2]) for name in chunk if (found := _NUMBER.match(name))}
                before += 1 + max(layers, default=-1)


def _offset_layer(name: str, layers: int) -> str:
    """Return the name with its layer number increased by `layers`."""
    return _NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + layers}", name)


def _locate_in_part(
    name: str, stored: StoredTensor, parts: Mapping[str, MegatronTensorMapping], ep: int
) -> tuple[str, _LocalTensor]:
    """Return the name of the part that a tensor belongs to, and its rectangle of the part."""
    head, tail = split_megatron_layer_prefix(name)
    for pattern in _BY_EXPERT:
        if found := re.fullmatch(pattern, tail):
            local = _LocalTensor((1, *stored.shape), stored, lambda tensor: tensor[None], int(found["expert"]))
            return f"{head}{EXPERTS}{found['rest']}", local
    if found := re.fullmatch(r"mlp\.experts\.weight([12])", tail):
        full = f"{head}{EXPERTS}linear_fc{found[1]}.weight"
        experts = parts[full].shape[0] // ep if full in parts else 1
        return full, _split_grouped_experts(stored, experts, first=found[1] == "1")
    return normalize_megatron_tensor_name(name), _LocalTensor(stored.shape, stored, lambda tensor: tensor)


def _split_grouped_experts(stored: StoredTensor, experts: int, *, first: bool) -> _LocalTensor:
    """Return all experts of a rank, each (in, out), from their concatenation, stored in the shape of one matrix."""
    rows, columns = stored.shape
    into, out = (rows, columns // experts) if first else (rows // experts, columns)
    return _LocalTensor((experts, out, into), stored, lambda tensor: tensor.reshape(experts, into, out).transpose(1, 2))


def _add_local_tensor(
    held: dict[str, MegatronTensor],
    part: MegatronTensorMapping,
    local: _LocalTensor,
    rank: _RankFile,
    sizes: Sequence[int],
) -> None:
    """Add a rank's tensor at its position, separately for each half that tensor parallelism splits."""
    tp, _, ep = sizes
    shape, offset = list(local.shape), [0] * len(local.shape)
    if EXPERTS in part.name:
        offset[0], shape[0] = rank.ep * (part.shape[0] // ep) + local.expert, part.shape[0]
    # Some projections are sharded in one kind of layer, and whole on every rank in another.
    split = part.axis if part.has_vocabulary_rows or tuple(shape) != part.shape else None
    if split is None and rank.tp:
        return
    if split is not None:
        shape[split] *= tp
    target = held.setdefault(part.name, MegatronTensor(local.source.dtype, tuple(shape)))
    if split is None:
        target.stored_boxes.append(
            StoredTensorSlice(tuple(offset), local.shape, lambda: local.change(local.source.read()))
        )
        return
    width = local.shape[split] // part.halves
    extent = (*local.shape[:split], width, *local.shape[split + 1 :])
    for half in range(part.halves):
        half_offset = (*offset[:split], (half * tp + rank.tp) * width, *offset[split + 1 :])
        target.stored_boxes.append(
            StoredTensorSlice(half_offset, extent, _half_reader(local, split, half * width, width))
        )


def _half_reader(local: _LocalTensor, axis: int, start: int, width: int) -> Callable[[], Tensor]:
    return lambda: local.change(local.source.read()).narrow(axis, start, width)
