"""The first step of a run by its configuration, in any layout, for tests of objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_data.batch_loader import BatchLoader
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.step_result import StepResult
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.run.build_components import connect_parallel_groups, load_datasets
from mega_trainer.run.objective_builder import build_objectives
from mega_trainer.run.train_step import StepHooks, train_step
from mega_trainer.run.training_run import build_training_state_and_executor, initialize_training_state
from mega_trainer.verify.case_comparison import compute_largest_tensor_error
from mega_trainer.verify.case_trainer import make_case_process_groups
from mega_trainer.verify.layout_case import RunYamlLayoutCase

ALONE = RankInfo()


@dataclass(frozen=True)
class ObjectiveHooks(StepHooks):
    """Hooks of a step outside of a training loop."""

    objective: TrainingObjective

    def append_metric_sums(self, sums: Tensor) -> Tensor:
        return self.objective.append_metric_sums(sums)


def step(
    raw: dict[str, Any], ranks: RankInfo = ALONE, maker: Any = None
) -> tuple[StepResult, dict[str, float], dict[str, Any], Any]:
    """The first step of a run: what it tells, its gradients, its batch."""
    config, device = RunConfig.parse(resolve_run_config(raw)), torch.device("cpu")
    groups = connect_parallel_groups(config, ranks, maker)
    training, _ = load_datasets(config, None)
    state, executor = build_training_state_and_executor(config, groups, device)
    initialize_training_state(state, None, groups.world, None)
    objective, _ = build_objectives(config, executor, device, 0, training, None)
    loader = BatchLoader(
        training,
        global_batch=config.batch.global_,
        seq_length=config.data.seq_length,
        dp_rank=groups.dp.rank,
        dp_size=groups.dp.size,
        prefetch=0,
    )
    batch = next(iter(loader))
    micro = objective.prepare_micro_batches(batch, list(split_micro_batches(batch, config, device, groups.cp)))
    result = train_step(
        executor,
        state.optimizer,
        micro,
        tokens=objective.count_step_terms(batch),
        lr=0.0,
        clip=0.0,
        hooks=ObjectiveHooks(objective),
    )
    return (
        result,
        dict(objective.metrics(result.objective_metrics, result.tokens)),
        dict(state.optimizer.gradients_by_name()),
        batch,
    )


def in_layouts(raws: list[dict[str, Any]]) -> list[str]:
    """What differs from one process, which each of the ranks is for one of the runs."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    alone: list[Any] = [None] * ranks
    maker = make_case_process_groups([RunYamlLayoutCase.from_settings(raw, ranks) for raw in raws])
    single = {**raws[rank], "parallel": {}, "output": f"{raws[rank]['output']}-alone"}
    dist.all_gather_object(alone, step(single)[:3])
    for raw, (result, figures, gradients) in zip(raws, alone, strict=True):
        ours = step(raw, RankInfo(rank, ranks, rank), maker)
        apart = [abs(ours[1][name] - value) for name, value in figures.items()]
        errors = [abs(ours[0].loss / result.loss - 1), *apart, compute_largest_tensor_error(ours[2], gradients)]
        wrong += [] if max(errors) < 1e-10 else [f"{raw['objective']} {raw['parallel']}: {errors}"]
    return wrong
