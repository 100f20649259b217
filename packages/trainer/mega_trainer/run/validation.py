"""Loss on validation data during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from mega_data.blended_dataset import BlendedDataset
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.device import to_host
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.run.training_context import TrainingContext


@torch.no_grad()
def evaluate_losses(
    executor: PipelineExecutor,
    steps: Iterable[Sequence[MicroBatch]],
    totals: Callable[[PipelineExecutor, Tensor, Sequence[MicroBatch]], Tensor],
) -> list[float]:
    """Return the mean loss over the micro-batches of all steps, forward only, followed by the means of the objective's
    further metrics; the host waits for the device once, at the end.

    Args:
        totals: of the objective: returns, for a step's sums of losses [2], the sums to report and, last, their count.
    """
    found = [totals(executor, executor.run_operations(batches, 1.0), batches) for batches in steps]
    total, groups = torch.stack(found).sum(0), executor.parallel_groups
    if groups.tp.rank > 0 or executor.last_stage_index not in executor.stages:
        total.zero_()
    all_reduce(total, groups.world)
    *sums, count = to_host(total).tolist()
    return [each / max(count, 1.0) for each in sums]


@torch.no_grad()
def run_validation(context: TrainingContext, data: BlendedDataset) -> dict[str, float]:
    """Return the validation metrics under their metrics.jsonl names: mean loss and objective metrics over the first
    `eval_steps` global batches of `data`, the same batches at every call.
    """
    config, executor, objective = context.state.config, context.executor, context.valid_objective
    batches = islice(context.loader_factory(data, global_batch=config.batch.global_), config.train.eval_steps)
    with executor.evaluation_mode(), executor.phase("evaluate"):
        loss, *metrics = evaluate_losses(
            executor, map(context.make_validation_batches, batches), objective.validation_totals
        )
    return {"valid_loss": loss} | {f"valid_{name}": value for name, value in objective.metrics(metrics).items()}
