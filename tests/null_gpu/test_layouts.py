"""Layouts of several ranks train over ProcessGroupNCCL, whose collectives return at once: what hosts do, and in which order."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity import eight_bits
from parity.cases import all_layouts, covering
from ranks import run_ranks
from torch.distributed._symmetric_memory import _test_mode

from mega_trainer.verify.case_trainer import CaseTrainer, copy_sharded_tensors_to_host, make_case_process_groups
from mega_trainer.verify.layout_case import LayoutCase


def train_all(cases: Sequence[LayoutCase], store: Path) -> list[str]:
    """A step of each case on this rank's device; what went wrong, by case."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    maker = make_case_process_groups(cases)
    for case in cases:
        try:
            trainer = CaseTrainer.build(case, rank, maker, device=torch.device("cuda", rank))
            with _test_mode():  # GEMMs of symmetric memory by NCCL, as the stand-in has no memory of other devices
                trainer.run(case.steps)
            copy_sharded_tensors_to_host(trainer.state.checkpoint_tensors())
        except Exception:  # noqa: BLE001 - whatever a case raises is reported with its name
            wrong.append(f"{case} on rank {rank}: {traceback.format_exc()[-800:]}")
            break  # ranks that go on would wait for this one
    return wrong


def layouts(ranks: int, count: int) -> list[LayoutCase]:
    """A covering of the layouts of so many ranks, in bf16, and every fourth in fp16; memory settings and optimizers are drawn."""
    found = covering([one for one in all_layouts() if one.ranks == ranks], count)
    return [replace(one, precision="fp16" if number % 4 == 3 else "bf16", steps=1) for number, one in enumerate(found)]


def eight_bit_layouts(ranks: int) -> list[LayoutCase]:
    """Of the recipes that a Hopper GPU has for experts."""
    found = [
        one for recipe in ("tensorwise", "rowwise") for one in eight_bits.all_layouts(recipe) if one.ranks == ranks
    ]
    return [replace(one, wide=False) for one in covering(found, 8)]


@pytest.mark.parametrize(("ranks", "count"), [(2, 24), (4, 56), (8, 20)])
def test_layouts_train(ranks: int, count: int, tmp_path: Path) -> None:
    found = run_ranks(train_all, ranks, layouts(ranks, count), tmp_path / "store", timeout=1800)
    assert not [problem for wrong in found for problem in wrong]


def test_eight_bit_layouts_train(tmp_path: Path) -> None:
    found = run_ranks(train_all, 4, eight_bit_layouts(4), tmp_path / "store", timeout=1800)
    assert not [problem for wrong in found for problem in wrong]
