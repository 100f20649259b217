"""ZeRO-3 computes what the other levels compute, and what it saves does not tell the level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from parity.cases import Run
from parity.worker import Trainer, sweep, synthetic, verdicts
from ranks import run_ranks

from mega_ckpt.checkpoint import Checkpoint
from mega_ckpt.pieces import Piece
from mega_ckpt.store import save
from mega_common.errors import ConfigError
from mega_trainer.batch import micro_batches
from mega_trainer.comm import CommLog
from mega_trainer.config import RunConfig
from mega_trainer.mesh import GroupMaker
from mega_trainer.parallel.fsdp import cut_rows
from mega_trainer.step import evaluate_step

MODEL = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2,
    "vocab_size": 37,
}  # fmt: skip


def settings(zero: int, *, precision: str, parallel: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {"train": [{"path": "none"}], "seq_length": 12},
        "batch": {"micro": 1, "global": 4},
        "optimizer": {"clip_grad": 0.0},  # the norm is summed in another order
        "precision": precision,
        "debug": {"ordered_reductions": True},
        "parallel": {**(parallel or {}), "zero": zero},
        **changes,
    }


TIED = {**MODEL, "tie_embeddings": True, "num_kv_heads": 1, "vocab_size": 9}
CASES = [
    Run.of(settings(3, precision="fp64", parallel=parallel, model=model, recompute=recompute), 4)
    for model in (MODEL, TIED)
    for parallel, recompute in [
        ({}, {}),  # of the 37 or 9 rows of the vocabulary the last rank has fewer, or none
        ({"tp": 2}, {}),
        ({"tp": 2, "sp": True}, {"kind": "full"}),
    ]
]


HYBRID = [
    Run.of(settings(3, precision="fp64", parallel=parallel, model=model, optimizer={"clip_grad": 0.1}), 4)
    for model, parallel in [(MODEL, {"zero3_shard": 2}), (TIED, {"zero3_shard": 2}), (MODEL, {"zero3_shard": 4})]
]


@pytest.mark.parametrize("cases", [CASES, HYBRID], ids=["one copy", "several copies"])
def test_it_computes_what_one_process_computes(cases: list[Run]) -> None:
    results = verdicts(cases, run_ranks(sweep, 4, cases, timeout=200))
    problems = [result.problem(1e-10) for result in results]
    assert not any(problems), problems


def saved_by_levels(folder: Path) -> dict[str, Any]:
    """Checkpoints of levels 2 and 3 after the same steps, with an evaluation between; and the losses after a resume."""
    out: dict[str, Any] = {}
    maker = GroupMaker()
    for precision, parallel in (("fp32", {}), ("bf16", {}), ("bf16", {"tp": 2})):
        name = f"{precision} {parallel}"

        def case(level: int, precision: str = precision, parallel: dict[str, Any] = parallel) -> Run:
            return Run.of(settings(level, precision=precision, parallel=parallel), 4)

        for level in (2, 3):
            it = Trainer.make(case(level), dist.get_rank(), maker)
            losses = [it.step().loss for _ in range(2)]
            batch = list(
                micro_batches(
                    synthetic(it.config, 9, it.groups.dp.rank, it.groups.dp.size, True), it.config, torch.device("cpu")
                )
            )
            losses.append(evaluate_step(it.executor, batch, it.groups.dp_cp)[0])
            save(folder / name / str(level), 2, it.state.tensors(), model=it.config.model, state=it.state.numbers())
            losses.append(it.step().loss)
            out[f"{name} {level}"] = losses
        for level, other in ((2, 3), (3, 2)):
            it = Trainer.make(case(level), dist.get_rank(), maker)
            it.state.restore(next((folder / name / str(other)).glob("step-*")), None)
            out[f"{name} {level} resumed"] = it.step().loss
    return out


def test_levels_2_and_3_save_alike_and_resume_each_other(tmp_path: Path) -> None:
    found, *_ = run_ranks(saved_by_levels, 4, tmp_path, timeout=200)
    for name in {key.rsplit(" ", 1)[0] for key in found if key.endswith("2")}:
        assert found[f"{name} 3"] == pytest.approx(found[f"{name} 2"], rel=1e-6), name
        for level, other in ((2, 3), (3, 2)):
            assert found[f"{name} {level} resumed"] == pytest.approx(found[f"{name} {other}"][-1], rel=1e-6), name
        two, three = (Checkpoint.open(next((tmp_path / name / level).glob("step-*"))) for level in "23")
        assert two.keys() == three.keys()
        for key in two.keys():  # noqa: SIM118 - no mapping
            a, b = two.read(key), three.read(key)
            assert a.dtype == b.dtype
            # AdamW rounds the last elements of a shard in another way; at most a step of bf16 then
            torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-8, msg=key)


def traffic_and_memory() -> tuple[dict[tuple[str, str], int], int, int]:
    log = CommLog()
    it = Trainer.make(Run.of(settings(3, precision="bf16"), 2), dist.get_rank(), GroupMaker(), log)
    it.step()
    held = sum(shard.weights.numel() for buffer in it.optimizer.buffers for shard in buffer.shards)
    whole = sum(parameter.numel() for parameter in it.state.stages[0].parameters())
    return {key: calls for key, (calls, _) in log.counts.items()}, held, whole


def test_each_unit_is_scattered_once_a_micro_batch_and_each_rank_holds_its_share() -> None:
    for calls, held, whole in run_ranks(traffic_and_memory, 2, timeout=60):
        units, microbatches = MODEL["num_layers"] + 1, 2
        assert calls["dp_cp", "reduce_scatter"] == units * microbatches
        assert calls["dp_cp", "all_gather"] == (2 * units - 1) * microbatches  # what is no layer stays for the backward
        assert held <= whole // 2 + MODEL["vocab_size"] * MODEL["hidden_size"]
        assert held < 0.55 * whole


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_cut_rows_tile_the_pieces(ranks: int, blocks: list[int]) -> None:
    rows, pieces, start = sum(blocks), [], 0
    for index, size in enumerate(blocks):
        pieces.append(Piece(f"w{index}", (3 * size, 2), (size, 0), (start, 0), (size, 2)))
        start += size
    local = torch.arange(2 * rows).view(rows, 2)
    share, seen = -(-rows // ranks), []
    for rank in range(ranks):
        mine = local[share * rank : share * (rank + 1)]
        for piece in cut_rows(pieces, share * rank, share * (rank + 1)):
            (origin,) = [whole for whole in pieces if whole.name == piece.name]
            first = piece.global_offset[0] - origin.global_offset[0]
            assert torch.equal(piece.view(mine), origin.view(local)[first : first + piece.shape[0]])
            seen += piece.view(mine)[:, 0].tolist()
    assert seen == local[:, 0].tolist()


@pytest.mark.parametrize("change", [{"parallel": {"zero": 3, "pp": 2}}, {"optimizer": {"name": "muon"}}])
def test_what_cannot_be_combined_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.zero = 3"):
        RunConfig.parse({**settings(3, precision="bf16"), **change})
