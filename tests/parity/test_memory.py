"""What context parallelism is for: N ranks hold 1/N of the activations each, and a ring never more than its share.

Every tensor that a forward and backward makes is counted while it lives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live import Live
from parity.cases import case
from ranks import run_ranks

from mega_ckpt.tensor_pieces import ShardedTensor
from mega_common.model_config import ModelConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.rng import TOKENS
from mega_trainer.plan.part_memory import count_model_part_memory
from mega_trainer.plan.training_layout import TrainingLayout
from mega_trainer.verify.case_trainer import CaseTrainer, make_case_process_groups
from mega_trainer.verify.layout_case import CONTEXT_KINDS, LayoutCase
from mega_trainer.verify.synthetic_batches import make_synthetic_batch

S, F, RANKS = 256, 128, 8
SEVERAL = (2, RANKS)  # what holds of the most ranks that share a sequence, and of the fewest, holds between
MODEL: dict[str, Any] = {
    "num_layers": 6, "hidden_size": 32, "ffn_hidden_size": F, "num_attention_heads": 8, "vocab_size": 64, "init_std": 0.2,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "layers": ["mamba+mlp", "delta+mlp"] * 2, "num_layers": 4, "position": "none",
    "mamba": {"num_heads": 8, "head_dim": 4, "state_size": 2, "chunk_size": 16},
    "delta": {"num_key_heads": 8, "num_value_heads": 8, "key_head_dim": 2, "value_head_dim": 4, "chunk_size": 16},
}  # fmt: skip


@dataclass(frozen=True)
class Bytes:
    """Of one rank: what a forward keeps, the most at any moment, the largest tensor."""

    kept: int
    peak: int
    largest: int


def measured(cases: list[LayoutCase]) -> list[Bytes | None]:
    """On each rank, of each case."""
    rank, maker, out = dist.get_rank(), make_case_process_groups(cases), []
    for one in cases:
        out.append(_measure(CaseTrainer.build(one, rank, maker)) if rank < one.ranks else None)
    return out


def _measure(trainer: CaseTrainer) -> Bytes:
    (model,) = trainer.executor.stages.values()
    batch = make_synthetic_batch(trainer.config, 0, 0, 1, trainer.case.closed)
    (micro,) = split_micro_batches(batch, trainer.config, torch.device("cpu"), trainer.groups.cp)
    with Live() as live:
        context = trainer.executor._batch_context(0, micro)
        loss, *_ = model.run_stage(None, micro, context)
        kept = _settled(live)
        loss.backward()
    return Bytes(kept, live.peak, live.largest)


def _settled(live: Live) -> int:
    """What is alive once nothing goes any more: a thread of gloo may hold a result for a moment longer than we do."""
    seen: list[int] = []
    while len(seen) < 3 or len(set(seen[-3:])) > 1:
        time.sleep(0.02)
        seen.append(live.now)
    return seen[-1]


def of(kind: str, ranks: int, *, closed: bool = False, **fields: Any) -> LayoutCase:
    return LayoutCase(
        "long", MODEL | fields, ranks, {"cp": ranks, "cp_kind": kind, "zero": 0}, micro=1, batch=1, length=S, precision="fp32",
        closed=closed,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Bytes]:
    """The largest of all ranks, by case."""
    cases = {f"{kind} {n}": of(kind, n) for kind in CONTEXT_KINDS for n in (1, *SEVERAL)}
    for n in SEVERAL:
        cases[f"ring {n}, documents"] = of("ring", n, closed=True)
        cases[f"ring {n}, dropout"] = of("ring", n, embedding_dropout=0.1, residual_dropout=0.1)
    for kind, n in product(("ring", "alltoall"), (1, *SEVERAL)):
        cases[f"states, {kind} {n}"] = of(kind, n, closed=True, **HYBRID)
    ranks = zip(*run_ranks(measured, RANKS, list(cases.values())), strict=True)
    out = {}
    for name, results in zip(cases, ranks, strict=True):
        there = [one for one in results if one is not None]
        out[name] = Bytes(*(max(getattr(one, what) for one in there) for what in ("kept", "peak", "largest")))
    return out


@pytest.mark.parametrize("kind", [*CONTEXT_KINDS, "states, ring", "states, alltoall"])
@pytest.mark.parametrize("ranks", SEVERAL)
def test_a_rank_keeps_its_share(found: dict[str, Bytes], kind: str, ranks: int) -> None:
    assert found[f"{kind} {ranks}"].kept * ranks < 1.1 * found[f"{kind} 1"].kept


@pytest.mark.parametrize("ranks", [1, *SEVERAL])
def test_the_plan_knows(found: dict[str, Bytes], ranks: int) -> None:
    """But what a micro-batch's layers share, which this forward made and the plan counts apart."""
    model, shape = ModelConfig.model_validate(MODEL), TrainingLayout(S, cp=ranks, precision="fp32", device="cpu")
    parts = count_model_part_memory(model, shape)
    planned = sum(part.kept for part in (*parts.layers, parts.head)) + parts.context
    assert planned == pytest.approx(found[f"ring {ranks}"].kept, rel=0.02)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_the_peak_of_a_ring_is_a_share(found: dict[str, Bytes], ranks: int) -> None:
    # a block's scores, which live while the plain kernel computes them, are what the largest blocks pay above their share
    assert found[f"ring {ranks}"].peak * ranks < 1.15 * found["ring 1"].peak


@pytest.mark.parametrize("ranks", SEVERAL)
@pytest.mark.parametrize("more", ["", ", documents", ", dropout"])
def test_a_ring_makes_nothing_larger_than_its_tokens_share(found: dict[str, Bytes], ranks: int, more: str) -> None:
    widest = S // ranks * 2 * F * 4  # gate and up projections of the rank's tokens
    # masks of residual dropout are drawn in blocks of tokens of a fixed size, however few of them the rank has
    block = TOKENS * MODEL["hidden_size"] * 4 if "dropout" in more else 0
    assert found[f"ring {ranks}{more}"].largest <= max(widest, block)
    if ranks == 8:
        assert found["allgather 8"].largest > widest


def staged(cases: list[LayoutCase]) -> list[tuple[int, int] | None]:
    """Of each case: bytes of what this rank brings to a checkpoint, and of all that it could."""
    rank, maker, out = dist.get_rank(), make_case_process_groups(cases), []
    for one in cases:
        if rank < one.ranks:
            state = CaseTrainer.build(one, rank, maker).state
            out.append(tuple(map(_bytes_of, (state.tensors_to_save(), state.checkpoint_tensors()))))
        else:
            out.append(None)
    return out


def _bytes_of(tensors: Mapping[str, ShardedTensor]) -> int:
    return sum(box.tensor.nbytes for held in tensors.values() for box in held.boxes)


def test_ranks_stage_a_checkpoint_once_between_them() -> None:
    """Not what another one brings; and each about as much."""
    layouts = [
        ("gqa", {"zero": 1}), ("gqa", {"zero": 0}), ("gqa", {"tp": 4}), ("tied", {"pp": 2, "zero": 1}), ("tied", {"tp": 2, "sp": True}),
        ("dense", {"zero": 3}), ("dense", {"zero": 3, "zero3_shard": 2}), ("moe", {"ep": 2, "zero": 1}), ("moe", {"tp": 2, "ep": 4, "zero": 2}),
        ("long", {"cp": 2, "zero": 1}),
    ]  # fmt: skip
    cases = [
        case(model, n, layers=2, parallel=p if n > 1 else {}, micro=1, batch=4, precision="bf16")
        for model, p in layouts
        for n in (1, 4)
    ]
    found = list(zip(*run_ranks(staged, 4, cases), strict=True))
    for (alone, *_), several, one in zip(found[::2], found[1::2], cases[1::2], strict=True):
        assert sum(brought for brought, _ in several) == alone[0], one
        assert all(brought <= could for brought, could in several)
        assert max(brought for brought, _ in several) < 0.45 * alone[0], one
