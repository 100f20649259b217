"""Whole runs on two ranks: what a level, a precision or an optimizer needs from validation, saving and going on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training


def runs(stages: list[dict[str, Any]]) -> list[int]:
    """One run after another on these ranks; the steps each has done."""
    ranks = RankInfo(dist.get_rank(), dist.get_world_size())
    return [run_training(RunConfig.parse(raw), ranks).step for raw in stages]


def numbers(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def losses(folder: Path) -> list[float]:
    return numbers(folder, "loss")


CHANGES: dict[str, dict[str, Any]] = {
    "zero 3, async": {"parallel": {"zero": 3}, "checkpoint": {"async": True}},
    "zero 3, bf16, offload": {"parallel": {"zero": 3}, "precision": "bf16", "optimizer": {"offload": True}},
    "zero 2, muon": {"parallel": {"zero": 2}, "optimizer": {"name": "muon"}},
    "zero 2, fp16": {"parallel": {"zero": 2}, "precision": "fp16"},
    "zb-h1, fp16": {"parallel": {"pp": 2, "schedule": "zb-h1"}, "precision": "fp16"},
    "zbv, tied": {
        "model": {"tie_embeddings": True, "num_layers": 4},
        "parallel": {"pp": 2, "virtual_stages": 2, "schedule": "zbv"},
    },
}


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    stages = []
    for name, change in CHANGES.items():
        whole, halves = (
            settings(**change, train={"steps": 4, "eval_every": 2, "eval_steps": 1}, output=str(tmp_path / name / part))
            for part in ("whole", "halves")
        )
        stages += [whole, {**halves, "train": {**halves["train"], "steps": 2}, "lr_schedule": {"decay_steps": 4}}]
        stages += [{**halves, "lr_schedule": {"decay_steps": 4}}]
    assert run_ranks(runs, 2, stages, timeout=120) == [[4, 2, 4] * len(CHANGES)] * 2
    for name in CHANGES:
        whole = losses(tmp_path / name / "whole")
        assert len(whole) == 4, name
        assert losses(tmp_path / name / "halves") == whole, name


def test_context_parallel_runs_train_and_validate_as_one_process_does(
    settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The last steps go on in another layout."""
    common = {"train": {"steps": 6, "eval_every": 2, "eval_steps": 2}, "precision": "fp64"}
    alone = settings(**common, output=str(tmp_path / "alone"))
    split = settings(**common, output=str(tmp_path / "split"), lr_schedule={"decay_steps": 6})
    first = {**split, "train": {**common["train"], "steps": 4}, "parallel": {"cp": 2, "zero": 2}}
    then = {**split, "parallel": {"cp": 2, "cp_kind": "alltoall"}}
    run_training(RunConfig.parse(alone), RankInfo())
    assert run_ranks(runs, 2, [first, then], timeout=60) == [[4, 6]] * 2
    for name in ("loss", "valid_loss", "grad_norm"):
        found, expected = numbers(tmp_path / "split", name), numbers(tmp_path / "alone", name)
        assert found == pytest.approx(expected, rel=1e-9), name
