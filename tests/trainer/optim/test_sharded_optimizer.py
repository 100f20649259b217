"""The optimizer over shards: where its state lives and how it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor
from mega_trainer.distributed.process_groups import ProcessGroupCache
from mega_trainer.verify.case_trainer import CaseTrainer
from mega_trainer.verify.layout_case import RunYamlLayoutCase


def settings(precision: str, *, offload: bool, **changes: Any) -> dict[str, Any]:
    optimizer = {"offload": offload, **changes.pop("optimizer", {})}
    return {
        "model": {
            "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2,
            "vocab_size": 37,
        },
        "data": {"train": [{"path": "none"}], "seq_length": 12},
        "batch": {"micro": 1, "global": 4},
        "optimizer": optimizer,
        "precision": precision,
        **changes,
    }  # fmt: skip


def values(tensors: dict[str, ShardedTensor]) -> dict[str, Any]:
    return {name: [(b.offset, b.tensor.double().tolist()) for b in held.boxes] for name, held in tensors.items()}


def trained(
    case: RunYamlLayoutCase, rank: int = 0, maker: ProcessGroupCache | None = None
) -> tuple[list[float], dict[str, Any]]:
    it = CaseTrainer.build(case, rank, maker)
    losses = [it.step().loss for _ in range(3)]
    return losses, values(it.state.checkpoint_tensors())


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_offloaded_state_changes_no_bits(precision: str, name: str) -> None:
    here, there = (
        trained(RunYamlLayoutCase.from_settings(settings(precision, offload=offload, optimizer={"name": name})))
        for offload in (False, True)
    )
    assert here == there


def offloaded_on_two_ranks() -> list[bool]:
    maker, same = ProcessGroupCache(), []
    for zero in (1, 2, 3):
        plain, offloaded = (
            trained(
                RunYamlLayoutCase.from_settings(settings("bf16", offload=offload, parallel={"zero": zero}), 2),
                dist.get_rank(),
                maker,
            )
            for offload in (False, True)
        )
        same.append(plain == offloaded)
    return same


def test_offloaded_state_changes_no_bits_at_any_level() -> None:
    assert run_ranks(offloaded_on_two_ranks, 2, timeout=60) == [[True] * 3] * 2


def test_offloaded_state_is_apart_from_the_model_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    case = RunYamlLayoutCase.from_settings(settings("fp32", offload=True))
    straight, resumed = CaseTrainer.build(case), CaseTrainer.build(case)
    straight.step()
    for slot in straight.optimizer.slots:
        assert slot.main.data_ptr() != slot.shard.weights.data_ptr()
        assert slot.grads.data_ptr() != slot.shard.grads.data_ptr()
    state = straight.state
    folder = save_sharded_checkpoint(
        tmp_path, 1, state.checkpoint_tensors(), model=straight.config.model, state=state.checkpoint_state()
    )
    resumed.state.restore_checkpoint(folder, None)
    assert straight.step() == resumed.step()
    assert values(resumed.state.checkpoint_tensors()) == values(straight.state.checkpoint_tensors())


def test_main_weights_are_saved_where_they_are_more_precise() -> None:
    for precision, kept in (("fp32", False), ("bf16", True)):
        for offload in (False, True):
            held = CaseTrainer.build(
                RunYamlLayoutCase.from_settings(settings(precision, offload=offload))
            ).state.checkpoint_tensors()
            assert any(name.startswith("optimizer/main/") for name in held) is kept
            weights = {name.removeprefix("weights/") for name in held if name.startswith("weights/")}
            assert {name.removeprefix("optimizer/exp_avg/") for name in held if "/exp_avg/" in name} == weights


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is for CUDA devices")
def test_host_memory_is_pinned_for_a_gpu() -> None:
    from mega_trainer.optim.optimizer_slots import _padded_copy

    copy = _padded_copy(torch.ones(3, device="cuda"), to_host=True)
    assert copy.is_pinned()
    assert copy[:3].tolist() == [1.0] * 3
