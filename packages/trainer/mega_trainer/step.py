"""One optimizer step: forward and backward over the micro-batches, the norm, the clip, the update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mega_trainer.batch import MicroBatch
from mega_trainer.comm import Group, all_reduce
from mega_trainer.model.router import Router, balance
from mega_trainer.model.routing import SUMS, loads_of_all, routing_metrics
from mega_trainer.optim.clip import clip_factor
from mega_trainer.optim.zero import Optimizer
from mega_trainer.pipeline.run import Executor
from mega_trainer.precision import LossScale


@dataclass(frozen=True)
class StepResult:
    """What a step tells.

    Attributes:
        loss: mean per token.
        grad_norm: before the clip.
        tokens: how many counted.
        updated: whether the weights changed; not when a number was not finite.
        mtp_loss: of the layers that predict further tokens: each one's mean per token, and the mean of these.
        loss_scale: that of this step, in fp16.
        overflowed: the gradient was too large for fp16 under this loss scale; a smaller one may mend it.
        routing: of models with experts, as `routing_metrics` tells it.
    """

    loss: float
    grad_norm: float
    tokens: float
    updated: bool
    mtp_loss: float | None = None
    loss_scale: float | None = None
    overflowed: bool = False
    routing: Mapping[str, float] = field(default_factory=dict)


def train_step(
    executor: Executor,
    optimizer: Optimizer,
    batches: Sequence[MicroBatch],
    *,
    lr: float,
    clip: float,
    data: Group,
    decoupled_lr: float | None = None,
    loss_scale: LossScale | None = None,
) -> StepResult:
    """One step over this rank's micro-batches; every rank calls it.

    The loss is the mean over all tokens that count, of all micro-batches and data ranks: their number is known before
    the first forward, so each token's gradient is divided by it once, at its source. Nothing is updated when the
    gradient is not finite. With a `loss_scale` the gradient is made larger by it, and the norm and the update are of
    the gradient as it would be without: unscale, check, clip, step. Losses of routers join the gradient, not the loss.
    `decoupled_lr` is the rate of the input embedding and the output layer, where the optimizer holds them apart.
    """
    factor = 1.0 if loss_scale is None else loss_scale.value
    tokens = count_tokens(batches, data)
    batches = weigh_ahead(batches, tokens, data)
    for stage in optimizer.stages:
        stage.begin_step()
    sums = executor.run(batches, factor / max(tokens, 1.0), factor)
    for stage in optimizer.stages:
        stage.finish()
    loss = mean_loss(sums[0], tokens, data, executor.group)
    mtp_loss = mean_loss(sums[1], tokens, data, executor.group) if batches[0].ahead else None
    norm = optimizer.grad_norm().item() / factor
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.update(lr, clip_factor(norm, clip) / factor, decoupled_lr)
    routing = finish_routing(executor, factor, move=finite)
    if loss_scale is None:
        return StepResult(loss, norm, tokens, finite, mtp_loss, routing=routing)
    overflowed = loss_scale.mends(loss_finite=math.isfinite(loss), norm_finite=math.isfinite(norm))
    loss_scale.advance(overflowed=overflowed)
    return StepResult(loss, norm, tokens, finite, mtp_loss, factor, overflowed, routing)


def finish_routing(executor: Executor, loss_scale: float, *, move: bool) -> dict[str, float]:
    """What the routers did in the step; their selection biases move by it if the weights did."""
    model = next(iter(executor.stages.values()))
    config, moe = model.config, model.config.moe
    if moe is None:
        return {}
    layers = [layer for layer in range(config.num_layers + config.mtp_layers) if config.has_experts(layer)]
    table = loads_of_all(executor.loads, layers, moe.num_experts, model.groups.world)
    if move:
        modules = (module for stage in executor.stages.values() for module in stage.modules())
        balance([module for module in modules if isinstance(module, Router)], table[:, SUMS:], layers)
    return routing_metrics(table, moe.top_k, loss_scale)


@torch.no_grad()
def evaluate_step(executor: Executor, batches: Sequence[MicroBatch], data: Group) -> tuple[float, float]:
    """Forward only: (sum of the token losses over all ranks, tokens that counted)."""
    tokens = count_tokens(batches, data)
    return mean_loss(executor.run(batches, 1.0)[0], 1.0, data, executor.group), tokens


def count_tokens(batches: Sequence[MicroBatch], data: Group) -> float:
    """Tokens of the step whose loss counts, over all data ranks.

    Summed in host memory: on a device the sum would queue up behind the weights that are still being gathered.
    """
    tokens = torch.stack([batch.weights.sum(dtype=torch.float64) for batch in batches]).sum().cpu()
    all_reduce(tokens, data)
    return tokens.item()


def weigh_ahead(batches: Sequence[MicroBatch], tokens: float, data: Group) -> Sequence[MicroBatch]:
    """The batches with weights of further tokens that make their losses a mean of means.

    Of D layers that predict further tokens, one's tokens weigh `tokens` / (D its tokens of all micro-batches and data
    ranks): the sum of all, divided by `tokens` as the next tokens' is, is then the mean over the layers of their means.
    """
    layers = len(batches[0].ahead)
    if not layers:
        return batches
    counts = torch.stack([torch.stack([a.weights.sum(dtype=torch.float64) for a in b.ahead]) for b in batches])
    counts = counts.sum(0).cpu()
    all_reduce(counts, data)
    factors = [tokens / (layers * max(count, 1.0)) for count in counts.tolist()]
    return [
        replace(b, ahead=[replace(a, weights=a.weights * f) for a, f in zip(b.ahead, factors, strict=True)])
        for b in batches
    ]


def mean_loss(loss_sum: torch.Tensor, tokens: float, data: Group, pipeline: Group) -> float:
    """The loss per token from each rank's sum; only the last stage has any."""
    all_reduce(loss_sum, data)
    all_reduce(loss_sum, pipeline)
    return loss_sum.item() / max(tokens, 1.0)
