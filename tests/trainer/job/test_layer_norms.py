"""Norms by layer are those of the whole, in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.rank_info import RankInfo
from mega_trainer.job.step_replay import read_recorded_steps
from mega_trainer.run.training_run import run_training

Settings = Callable[..., dict[str, Any]]


def sweep(runs: list[dict[str, Any]]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for raw in runs:
        run_training(RunConfig.parse(raw), RankInfo(rank, size, rank))


def test_norms_by_layer_add_up_and_are_the_same_in_any_layout(settings: Settings, tmp_path: Path) -> None:
    def raw(name: str, **parallel: Any) -> dict[str, Any]:
        sections = {"train": {"steps": 2}, "precision": "fp64", "optimizer": {"clip_grad": 0.1}, "parallel": parallel}
        return settings(**sections, batch={"micro": 1}, debug={"layer_norms_every": 2}, output=str(tmp_path / name))

    run_training(RunConfig.parse(raw("alone")), RankInfo())
    run_ranks(sweep, 4, [raw("cut", tp=2, pp=2, zero=0), raw("sharded", zero=3)])
    alone = read_recorded_steps(tmp_path / "alone")
    line, kinds = alone[2], ("layer_grad_norm/", "layer_weight_norm/")
    assert not any(key.startswith(kinds) for key in alone[1])
    norms = {key: value for key, value in line.items() if key.startswith(kinds)}
    assert {key.split("/")[1] for key in norms} == {"embed_tokens", "0", "1", "norm", "lm_head"}
    assert math.hypot(*(norms[key] for key in norms if "grad" in key)) == pytest.approx(line["grad_norm"], rel=1e-12)
    for name in ("cut", "sharded"):
        other = read_recorded_steps(tmp_path / name)[2]
        assert {key: other[key] for key in norms} == pytest.approx(norms, rel=1e-10), name
