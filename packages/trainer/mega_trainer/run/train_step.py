"""One optimizer step (forward and backward over the micro-batches, gradient norm, clip, update), and one validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from mega_data.blended_dataset import BlendedDataset
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.device import to_device, to_host
from mega_trainer.job.step_result import StepResult, StepScalars
from mega_trainer.model.expert_router import ExpertRouter, update_selection_bias
from mega_trainer.optim.gradient_clipping import LossScale, gradient_clip_factor
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.parallel.expert_routing import (
    SUMS,
    compute_routing_metrics,
    list_expert_layers,
    tabulate_expert_loads,
)
from mega_trainer.parallel.parameter_info import is_trainable
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.run.training_context import TrainingContext


class StepHooks:
    """Hooks by which a training loop extends `train_step`; the defaults do nothing."""

    def append_metric_sums(self, sums: Tensor) -> Tensor:
        """Append the sums of the objective's k further metrics to this rank's loss sums of a step: [2 + k].
        `sums` are the loss sums [2].
        """
        return sums

    def local_scalars(self) -> StepScalars:
        """Return this rank's scalars to be summed over all ranks with the loss; called just before the all-reduce."""
        return StepScalars()

    def accepts_loss(self, loss: float) -> bool:
        """Return whether to update the weights after a step with this loss; must be equal on all ranks."""
        return True


def train_step(
    executor: PipelineExecutor,
    optimizer: ShardedOptimizer,
    batches: Sequence[MicroBatch],
    *,
    tokens: Sequence[float],
    lr: float,
    clip: float,
    decoupled_lr: float | None = None,
    loss_scale: LossScale | None = None,
    hooks: StepHooks | None = None,
) -> StepResult:
    """Run one optimizer step on this rank's micro-batches: forward, backward, update. A collective call of all ranks.

    The loss is the mean over the unmasked tokens of all micro-batches and data ranks. Their number is known before the
    first forward, so each token's gradient is divided by it once, at its source. Losses of routers join the gradient, not
    the loss. Nothing is updated if the gradient is not finite. The host waits for the device once, before the update.

    Args:
        tokens: number of loss terms of the step, as `count_step_tokens` returns them.
        clip: largest gradient norm; 0 for no clipping.
        decoupled_lr: learning rate of the input embedding and the output layer, if the optimizer keeps them separate.

    Raises:
        TrainingError: when tokens exceed the capacity of expert dispatch; nothing is updated.
    """
    hooks, factor = hooks or StepHooks(), loss_scale.value if loss_scale else 1.0
    for stage in optimizer.stages:
        stage.begin_step()
    batches = normalize_auxiliary_loss_weights(batches, tokens)
    sums = hooks.append_metric_sums(executor.run_operations(batches, factor / max(tokens[0], 1.0), factor))
    with executor.phase("reduce"):
        for stage in optimizer.stages:
            stage.finish_gradients()
    with executor.phase("norm"):
        local = to_device(hooks.local_scalars().to_list(), sums.device)
        scalars, loads = sum_step_scalars(executor, torch.cat([sums, local, *executor.indexer_losses]))
        numbers = to_host(torch.cat([optimizer.compute_grad_norm().view(1), scalars, loads.flatten()]))
    norm, *totals = numbers[: 1 + len(scalars)].tolist()
    loss, second_loss, *metrics = (total / max(tokens[0], 1.0) for total in totals[: len(sums)])
    norm, updates = norm / factor, math.isfinite(loss) and math.isfinite(norm) and hooks.accepts_loss(loss)
    table = numbers[1 + len(scalars) :].view_as(loads)
    routing = compute_routing_metrics(executor.model_config.moe, table, factor)  # raises before an update
    routing |= {"indexer_loss": totals[-1] / factor} if executor.indexer_losses else {}
    if updates:
        with executor.phase("update"):
            optimizer.apply_update(lr, gradient_clip_factor(norm, clip) / factor, decoupled_lr)
        update_router_biases(executor, loads)
    result = StepResult(
        loss=loss,
        grad_norm=norm,
        tokens=tokens[0],
        updated=updates,
        mtp_loss=second_loss if batches[0].mtp_targets else None,
        pair_loss=second_loss if batches[0].segment_order else None,
        routing=routing,
        scalars=StepScalars.from_list(totals[len(sums) : len(sums) + len(local)]),
        objective_metrics=metrics,
    )
    return result if loss_scale is None else _update_loss_scale(loss_scale, result)


def _update_loss_scale(loss_scale: LossScale, result: StepResult) -> StepResult:
    """Adapt the loss scale after a step; return the result with the scale that the step had."""
    used = loss_scale.value
    overflowed = loss_scale.can_fix_overflow(
        loss_finite=math.isfinite(result.loss), norm_finite=math.isfinite(result.grad_norm)
    )
    loss_scale.update_scale(overflowed=overflowed)
    return replace(result, loss_scale=used, overflowed=overflowed)


def sum_step_scalars(executor: PipelineExecutor, scalars: Tensor) -> tuple[Tensor, Tensor]:
    """Return a step's scalars and the routers' expert loads, both summed over all ranks by one all-reduce.
    The scalars are losses, metrics and token counts.

    Args:
        scalars: fp64 [2 + n]: two sums of losses, which tensor ranks have in common, and n numbers of each rank alone.

    Returns:
        `scalars`, and the routers' loads as in `tabulate_expert_loads`.
    """
    groups = executor.parallel_groups
    loads = tabulate_expert_loads(executor.loads, executor.model_config, scalars.device)
    if groups.tp.rank > 0:
        scalars[:2].zero_()
    joined = torch.cat([scalars, loads.flatten()])
    all_reduce(joined, groups.world)
    return joined[: len(scalars)], joined[len(scalars) :].view_as(loads)


def update_router_biases(executor: PipelineExecutor, loads: Tensor) -> None:
    """Update the selection biases of trainable routers to balance the experts.
    `loads` are the step's expert loads over all ranks, [layers with experts, 6 + number of experts].
    """
    if executor.model_config.moe is not None:
        modules = (module for stage in executor.stages.values() for module in stage.modules())
        routers = [module for module in modules if isinstance(module, ExpertRouter) and is_trainable(module.weight)]
        update_selection_bias(routers, loads[:, SUMS:], list_expert_layers(executor.model_config))


def normalize_auxiliary_loss_weights(batches: Sequence[MicroBatch], tokens: Sequence[float]) -> Sequence[MicroBatch]:
    """Return micro-batches with scaled weights of their auxiliary losses (MTP layers or segment order).
    The scale makes each auxiliary loss a mean over its own labels, and the MTP loss the mean over layers.

    With D MTP layers, the weights of layer d are multiplied by `tokens[0]` / (D `tokens[d]`). The sum of all, divided by
    `tokens[0]` as the next-token loss is, is then the mean over the layers of their mean losses.
    """
    step, *counts = tokens
    factors = [step / (len(counts) * max(count, 1.0)) for count in counts]
    if batches[0].segment_order is not None and factors:
        return [_scale_segment_order(batch, factors[0]) for batch in batches]
    return [
        replace(b, mtp_targets=[replace(a, weights=a.weights * f) for a, f in zip(b.mtp_targets, factors, strict=True)])
        for b in batches
    ]


def _scale_segment_order(batch: MicroBatch, factor: float) -> MicroBatch:
    pairs = batch.segment_order
    return replace(batch, segment_order=pairs and replace(pairs, weights=pairs.weights * factor))


@torch.no_grad()
def evaluate_losses(
    executor: PipelineExecutor,
    steps: Iterable[Sequence[MicroBatch]],
    totals: Callable[[PipelineExecutor, Tensor, Sequence[MicroBatch]], Tensor],
) -> list[float]:
    """Return the mean loss over the micro-batches of all steps, and the means of further metrics, forward only.
    The metrics are the objective's; the host waits for the device once, at the end.

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
    """Evaluate the loss and objective metrics on the first `eval_steps` global batches of `data`; return them by name.
    The names are those in metrics.jsonl; the batches are the same at every call.
    """
    config, executor, objective = context.state.config, context.executor, context.valid_objective
    batches = islice(context.loader_factory(data, global_batch=config.batch.global_), config.train.eval_steps)
    with executor.evaluation_mode(), executor.phase("evaluate"):
        loss, *metrics = evaluate_losses(
            executor, map(context.make_validation_batches, batches), objective.validation_totals
        )
    return {"valid_loss": loss} | {f"valid_{name}": value for name, value in objective.metrics(metrics).items()}
