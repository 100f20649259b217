"""The first step of a run by its configuration, in any layout, for tests of objectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from parity.worker import difference, make_groups

from mega_data.loader import Loader
from mega_trainer.batch import micro_batches
from mega_trainer.build import connect, load_data
from mega_trainer.config import RunConfig, resolve
from mega_trainer.objectives.build import make_objectives
from mega_trainer.ranks import Ranks
from mega_trainer.step import StepResult, train_step
from mega_trainer.train import assemble, begin

ALONE = Ranks()


def step(
    raw: dict[str, Any], ranks: Ranks = ALONE, maker: Any = None
) -> tuple[StepResult, dict[str, float], dict[str, Any], Any]:
    """The first step of a run: what it tells, its gradients, its batch."""
    config, device = RunConfig.parse(resolve(raw)), torch.device("cpu")
    groups = connect(config, ranks, maker)
    training, _ = load_data(config, None)
    state, executor = assemble(config, groups, device)
    begin(state, None, groups.world, None)
    objective, _ = make_objectives(config, executor, device, 0, training, None)
    loader = Loader(
        training,
        global_batch=config.batch.global_,
        seq_length=config.data.seq_length,
        dp_rank=groups.dp.rank,
        dp_size=groups.dp.size,
        prefetch=0,
    )
    batch = next(iter(loader))
    micro = objective.prepared(batch, list(micro_batches(batch, config, device, groups.cp)))
    result = train_step(
        executor, state.optimizer, micro, tokens=objective.counts(batch), lr=0.0, clip=0.0, measured=objective.measured
    )
    return result, dict(objective.told(result.figures, result.tokens)), dict(state.optimizer.gradients()), batch


def in_layouts(raws: list[dict[str, Any]]) -> list[str]:
    """What differs from one process, which each of the ranks is for one of the runs."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    alone: list[Any] = [None] * ranks
    maker = make_groups([SimpleNamespace(raw=resolve(raw), ranks=ranks) for raw in raws])  # type: ignore[misc]
    single = {**raws[rank], "parallel": {}, "output": f"{raws[rank]['output']}-alone"}
    dist.all_gather_object(alone, step(single)[:3])
    for raw, (result, figures, gradients) in zip(raws, alone, strict=True):
        ours = step(raw, Ranks(rank, ranks, rank), maker)
        apart = [abs(ours[1][name] - value) for name, value in figures.items()]
        errors = [abs(ours[0].loss / result.loss - 1), *apart, difference(ours[2], gradients)]
        wrong += [] if max(errors) < 1e-10 else [f"{raw['objective']} {raw['parallel']}: {errors}"]
    return wrong
