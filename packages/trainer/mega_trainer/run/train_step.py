"""One optimizer step: forward and backward over the micro-batches, gradient norm, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mega_data.batch_loader import StepBatch
from mega_trainer.data.micro_batch import MicroBatch, mtp_label_weights
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.device import to_device, to_host
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.model.expert_router import ExpertRouter, update_selection_bias
from mega_trainer.optim.gradient_clipping import gradient_clip_factor
from mega_trainer.optim.loss_scale import LossScale
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.parallel.expert_routing import (
    SUMS,
    compute_routing_metrics,
    list_expert_layers,
    tabulate_expert_loads,
)
from mega_trainer.parallel.parameter_info import is_trainable
from mega_trainer.pipeline.executor import PipelineExecutor


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        loss: mean per token.
        grad_norm: before the clip.
        tokens: how many counted.
        updated: whether the weights changed; not when a number was not finite, or the loss was not accepted.
        mtp_loss: of the layers that predict further tokens: each one's mean per token, and the mean of these.
        pair_loss: of a model that tells the order of two segments: mean per sample.
        loss_scale: that of this step, in fp16.
        overflowed: the gradient was too large for fp16 under this loss scale; a smaller one may mend it.
        routing: of models with experts, as `routing_metrics` tells it.
        extra_scalars: as given to the step by each rank, summed over all ranks.
        objective_metrics: of an objective that measures itself, what it tells beside the loss, means as the loss is.
    """

    loss: float
    grad_norm: float
    tokens: float
    updated: bool
    mtp_loss: float | None = None
    pair_loss: float | None = None
    loss_scale: float | None = None
    overflowed: bool = False
    routing: Mapping[str, float] = field(default_factory=dict)
    extra_scalars: Sequence[float] = ()
    objective_metrics: Sequence[float] = ()

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


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
    extra_scalars: Callable[[], Sequence[float]] = tuple,
    accepts_loss: Callable[[float], bool] = lambda loss: True,
    measure_losses: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> StepResult:
    """Run one step over this rank's micro-batches; every rank calls it.

    The loss is the mean over all tokens that count, of all micro-batches and data ranks: their number is known before
    the first forward, so each token's gradient is divided by it once, at its source. Nothing is updated when the
    gradient is not finite. With a `loss_scale` the gradient is made larger by it, and the norm and the update are of
    the gradient as it would be without: unscale, check, clip, step. Losses of routers join the gradient, not the loss.
    `decoupled_lr` is the rate of the input embedding and the output layer, where the optimizer holds them apart.

    The host waits for the device once, for all numbers of the step together, before the update. `extra_scalars` are numbers of
    this rank's, asked for just before, that are summed over all ranks beside the loss.

    Args:
        tokens: of the step, as `count_tokens` gives them.
        accepts_loss: whether to update the weights after a step of that loss.
        measure_losses: makes of the sums of this rank's losses [2] (`PipelineExecutor.run`) those of an objective that measures itself, and of
            k figures more: [2 + k].

    Raises:
        TrainingError: when tokens found no room on their way to their experts; nothing is updated.
    """
    factor = 1.0 if loss_scale is None else loss_scale.value
    for stage in optimizer.stages:
        stage.begin_step()
    sums = measure_losses(
        executor.run_operations(normalize_mtp_weights(batches, tokens), factor / max(tokens[0], 1.0), factor)
    )
    with executor.phase("reduce"):
        for stage in optimizer.stages:
            stage.finish_gradients()
    with executor.phase("norm"):
        told, table = sum_step_scalars(executor, torch.cat([sums, to_device(extra_scalars(), sums.device)]))
        numbers = to_host(torch.cat([optimizer.compute_grad_norm().view(1), told, table.flatten()]))
    norm, *totals = numbers[: 1 + len(told)].tolist()
    norm, ridden = norm / factor, totals[len(sums) :]
    loss, further, *figures = (total / max(tokens[0], 1.0) for total in totals[: len(sums)])
    updates = math.isfinite(loss) and math.isfinite(norm) and accepts_loss(loss)
    routing = compute_routing_metrics(executor.model_config.moe, numbers[1 + len(told) :].view_as(table), factor)
    if updates:
        with executor.phase("update"):
            optimizer.apply_update(lr, gradient_clip_factor(norm, clip) / factor, decoupled_lr)
        update_router_biases(executor, table)
    result = StepResult(
        loss, norm, tokens[0], updates, further if batches[0].mtp_targets else None, further if batches[0].segment_order else None,
        routing=routing, extra_scalars=ridden, objective_metrics=figures,
    )  # fmt: skip
    if loss_scale is None:
        return result
    overflowed = loss_scale.can_fix_overflow(loss_finite=math.isfinite(loss), norm_finite=math.isfinite(norm))
    loss_scale.update_scale(overflowed=overflowed)
    return replace(result, loss_scale=factor, overflowed=overflowed)


def sum_step_scalars(executor: PipelineExecutor, scalars: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the step's scalars of all ranks by one all-reduce.

    Args:
        scalars: fp64 [2 + n]: sums of losses, which tensor ranks have alike, and numbers that no two ranks have alike.

    Returns:
        `scalars`, and the routers' loads as in `tabulate_expert_loads`.
    """
    groups, table = (
        executor.parallel_groups,
        tabulate_expert_loads(executor.loads, executor.model_config, scalars.device),
    )
    if groups.tp.rank > 0:
        scalars[:2] = 0.0
    joined = torch.cat([scalars, table.flatten()])
    all_reduce(joined, groups.world)
    return joined[: len(scalars)], joined[len(scalars) :].view_as(table)


def update_router_biases(executor: PipelineExecutor, table: Tensor) -> None:
    """Update the selection biases of trainable routers by the step's loads over all ranks, [layers, 6 + E]."""
    if executor.model_config.moe is not None:
        modules = (module for stage in executor.stages.values() for module in stage.modules())
        layers = list_expert_layers(executor.model_config)
        update_selection_bias(
            [module for module in modules if isinstance(module, ExpertRouter) and is_trainable(module.weight)],
            table[:, SUMS:],
            layers,
        )


def count_step_tokens(batch: StepBatch, mtp_layers: int, groups: ParallelGroups) -> list[float]:
    """Return the tokens of a step whose loss counts, over all data ranks, then those of each of `mtp_layers` MTP
    layers; for samples of two segments, the number of samples comes last.

    Summed in host memory, before the first step; those of the next one ride with the numbers of the step before it.
    """
    counts = torch.tensor(count_local_tokens(batch, mtp_layers, groups), dtype=torch.float64)
    all_reduce(counts, groups.world)
    return counts.tolist()


def count_local_tokens(batch: StepBatch | None, mtp_layers: int, groups: ParallelGroups) -> list[float]:
    """Return this rank's part of `count_step_tokens` from host-side masks; among ranks with the same samples only the
    first counts.
    """
    pairs = [] if batch is None or batch.pair_labels is None else [float(len(batch.pair_labels))]
    if batch is None or any(group.rank for group in (groups.tp, groups.cp, groups.pp)):
        return [0.0] * (1 + mtp_layers + len(pairs))
    weights = [batch.loss_weights, *(mtp_label_weights(batch, k + 1) for k in range(mtp_layers))]
    return [*(float(each.sum(dtype=np.float64)) for each in weights), *pairs]


def normalize_mtp_weights(batches: Sequence[MicroBatch], tokens: Sequence[float]) -> Sequence[MicroBatch]:
    """Return the batches with the weights of MTP labels, or of segment pairs, scaled so that their losses become a mean
    of means.

    Of D layers that predict further tokens, one's tokens weigh `tokens[0]` / (D its tokens of all micro-batches and data
    ranks): the sum of all, divided by `tokens[0]` as the next tokens' is, is then the mean over the layers of their means.
    """
    step, *ahead = tokens
    factors = [step / (len(ahead) * max(count, 1.0)) for count in ahead]
    if batches[0].segment_order is not None and factors:
        return [
            replace(
                b,
                segment_order=b.segment_order
                and replace(b.segment_order, weights=b.segment_order.weights * factors[0]),
            )
            for b in batches
        ]
    return [
        replace(b, mtp_targets=[replace(a, weights=a.weights * f) for a, f in zip(b.mtp_targets, factors, strict=True)])
        for b in batches
    ]
