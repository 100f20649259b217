"""One optimizer step: forward and backward over the micro-batches, the norm, the clip, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mega_data.loader import StepBatch
from mega_trainer.batch import MicroBatch, further_weights
from mega_trainer.comm import all_reduce
from mega_trainer.device import to_device, to_host
from mega_trainer.mesh import Groups
from mega_trainer.model.router import Router, balance
from mega_trainer.model.routing import SUMS, expert_layers, routing_metrics, table_of_loads
from mega_trainer.optim.clip import clip_factor
from mega_trainer.optim.zero import Optimizer
from mega_trainer.parallel.param import trains
from mega_trainer.pipeline.run import Executor
from mega_trainer.precision import LossScale


@dataclass(frozen=True)
class StepResult:
    """What a step tells.

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
        riders: as given to the step by each rank, summed over all ranks.
        figures: of an objective that measures itself, what it tells beside the loss, means as the loss is.
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
    riders: Sequence[float] = ()
    figures: Sequence[float] = ()

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train_step(
    executor: Executor,
    optimizer: Optimizer,
    batches: Sequence[MicroBatch],
    *,
    tokens: Sequence[float],
    lr: float,
    clip: float,
    decoupled_lr: float | None = None,
    loss_scale: LossScale | None = None,
    riders: Callable[[], Sequence[float]] = tuple,
    accepts: Callable[[float], bool] = lambda loss: True,
    measured: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> StepResult:
    """One step over this rank's micro-batches; every rank calls it.

    The loss is the mean over all tokens that count, of all micro-batches and data ranks: their number is known before
    the first forward, so each token's gradient is divided by it once, at its source. Nothing is updated when the
    gradient is not finite. With a `loss_scale` the gradient is made larger by it, and the norm and the update are of
    the gradient as it would be without: unscale, check, clip, step. Losses of routers join the gradient, not the loss.
    `decoupled_lr` is the rate of the input embedding and the output layer, where the optimizer holds them apart.

    The host waits for the device once, for all numbers of the step together, before the update. `riders` are numbers of
    this rank's, asked for just before, that are summed over all ranks beside the loss.

    Args:
        tokens: of the step, as `count_tokens` gives them.
        accepts: whether to update the weights after a step of that loss.
        measured: makes of the sums of this rank's losses [2] (`Executor.run`) those of an objective that measures itself, and of
            k figures more: [2 + k].

    Raises:
        TrainingError: when tokens found no room on their way to their experts; nothing is updated.
    """
    factor = 1.0 if loss_scale is None else loss_scale.value
    for stage in optimizer.stages:
        stage.begin_step()
    sums = measured(executor.run(weigh_ahead(batches, tokens), factor / max(tokens[0], 1.0), factor))
    with executor.phase("reduce"):
        for stage in optimizer.stages:
            stage.finish()
    with executor.phase("norm"):
        told, table = sum_over_ranks(executor, torch.cat([sums, to_device(riders(), sums.device)]))
        numbers = to_host(torch.cat([optimizer.grad_norm().view(1), told, table.flatten()]))
    norm, *totals = numbers[: 1 + len(told)].tolist()
    norm, ridden = norm / factor, totals[len(sums) :]
    loss, further, *figures = (total / max(tokens[0], 1.0) for total in totals[: len(sums)])
    updates = math.isfinite(loss) and math.isfinite(norm) and accepts(loss)
    routing = routing_metrics(executor.config.moe, numbers[1 + len(told) :].view_as(table), factor)
    if updates:
        with executor.phase("update"):
            optimizer.update(lr, clip_factor(norm, clip) / factor, decoupled_lr)
        move_selection(executor, table)
    result = StepResult(
        loss, norm, tokens[0], updates, further if batches[0].ahead else None, further if batches[0].pairs else None,
        routing=routing, riders=ridden, figures=figures,
    )  # fmt: skip
    if loss_scale is None:
        return result
    overflowed = loss_scale.mends(loss_finite=math.isfinite(loss), norm_finite=math.isfinite(norm))
    loss_scale.advance(overflowed=overflowed)
    return replace(result, loss_scale=factor, overflowed=overflowed)


def sum_over_ranks(executor: Executor, told: Tensor) -> tuple[Tensor, Tensor]:
    """What each rank has to tell of the step, summed over all ranks by one all-reduce.

    Args:
        told: fp64 [2 + n]: sums of losses, which tensor ranks have alike, and numbers that no two ranks have alike.

    Returns:
        `told`, and the routers' loads as in `table_of_loads`.
    """
    groups, table = executor.groups, table_of_loads(executor.loads, executor.config, told.device)
    if groups.tp.rank > 0:
        told[:2] = 0.0
    joined = torch.cat([told, table.flatten()])
    all_reduce(joined, groups.world)
    return joined[: len(told)], joined[len(told) :].view_as(table)


def move_selection(executor: Executor, table: Tensor) -> None:
    """Move the selection biases of routers that are not frozen by the step's loads of all ranks, [layers, 6 + E]."""
    if executor.config.moe is not None:
        modules = (module for stage in executor.stages.values() for module in stage.modules())
        layers = expert_layers(executor.config)
        balance(
            [module for module in modules if isinstance(module, Router) and trains(module.weight)],
            table[:, SUMS:],
            layers,
        )


def count_tokens(batch: StepBatch, further: int, groups: Groups) -> list[float]:
    """Tokens of a step whose loss counts, over all data ranks, and so those of each layer that predicts `further` tokens;
    or, of samples of two segments, behind that the number of samples.

    Summed in host memory, before the first step; those of the next one ride with the numbers of the step before it.
    """
    counts = torch.tensor(own_counts(batch, further, groups), dtype=torch.float64)
    all_reduce(counts, groups.world)
    return counts.tolist()


def own_counts(batch: StepBatch | None, further: int, groups: Groups) -> list[float]:
    """This rank's part in `count_tokens`, as its masks in host memory tell: that of the first who has these samples."""
    pairs = [] if batch is None or batch.pair_labels is None else [float(len(batch.pair_labels))]
    if batch is None or any(group.rank for group in (groups.tp, groups.cp, groups.pp)):
        return [0.0] * (1 + further + len(pairs))
    weights = [batch.loss_weights, *(further_weights(batch, k + 1) for k in range(further))]
    return [*(float(each.sum(dtype=np.float64)) for each in weights), *pairs]


def weigh_ahead(batches: Sequence[MicroBatch], tokens: Sequence[float]) -> Sequence[MicroBatch]:
    """The batches with weights of further tokens, or of pairs, that make their losses a mean of means.

    Of D layers that predict further tokens, one's tokens weigh `tokens[0]` / (D its tokens of all micro-batches and data
    ranks): the sum of all, divided by `tokens[0]` as the next tokens' is, is then the mean over the layers of their means.
    """
    step, *ahead = tokens
    factors = [step / (len(ahead) * max(count, 1.0)) for count in ahead]
    if batches[0].pairs is not None and factors:
        return [replace(b, pairs=b.pairs and replace(b.pairs, weights=b.pairs.weights * factors[0])) for b in batches]
    return [
        replace(b, ahead=[replace(a, weights=a.weights * f) for a, f in zip(b.ahead, factors, strict=True)])
        for b in batches
    ]
