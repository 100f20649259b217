"""Layouts that the numbers of a run, of its GPUs and of their nodes allow, with what their memory is, about."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from mega_common.model_config import ModelConfig
from mega_trainer.config import RunConfig
from mega_trainer.plan.advice import run_shape
from mega_trainer.plan.flops import Parameters
from mega_trainer.plan.layers import kept_elements, widest
from mega_trainer.plan.machine import Machine
from mega_trainer.plan.shape import RecomputeKind, RunShape

LEAST_CHUNK = 2048  # tokens of a context rank: with fewer, attention does not hide what travels
Settings = dict[str, Any]  # by path, as `--set` takes them
RECOMPUTE: tuple[RecomputeKind, ...] = ("none", "selective", "full")


def candidates(config: RunConfig, ranks: int, machine: Machine) -> Iterator[tuple[Settings, RunShape]]:
    """Combinations of settings that the numbers allow, with the shapes of their runs. Tensor ranks share a node."""
    model, batch, length = config.model, config.batch.global_, config.data.seq_length
    base = run_shape(config.model_copy(update={"parallel": type(config.parallel)()}), 1)
    experts = model.moe.num_experts if model.moe else 1
    degrees = [n for n in _divisors(ranks) if n <= max(model.num_layers, machine.ranks_per_node, length // LEAST_CHUNK)]
    for tp, pp, cp in product(degrees, repeat=3):
        fits = (
            model.num_attention_heads % tp == 0
            and length % (2 * cp * tp) == 0
            and (cp == 1 or length // cp >= LEAST_CHUNK)
        )
        if tp > machine.ranks_per_node or pp > model.num_layers or ranks % (tp * pp * cp) or not fits:
            continue
        dp = ranks // (tp * pp * cp)
        kinds: list[Literal["ring", "alltoall"]] = ["ring", "alltoall"] if cp > 1 else ["ring"]
        micros = [n for n in sorted({1, 2, 4, 8, config.batch.micro}) if batch % (n * dp) == 0]
        eps = _divisors(math.gcd(experts, dp * cp * tp))
        choices = product(
            micros, eps, pipelines(model.num_layers, pp), [1, 2, 3] if pp == 1 else [1, 2], RECOMPUTE, kinds
        )
        for micro, ep, (schedule, virtual), zero, recompute, kind in choices:
            run = replace(
                base, micro_batch=micro, microbatches=batch // (micro * dp), tp=tp, sp=tp > 1, pp=pp, virtual_stages=virtual,
                schedule=schedule, pipeline_layout=None, cp=cp, cp_kind=kind, ep=ep, dp=dp, zero=zero, recompute=recompute,
                recompute_layers=None, offload=0, expert_tp=1, modules=("norm", "activation"),
            )  # fmt: skip
            yield settings_of(run), run


def settings_of(run: RunShape) -> Settings:
    """What makes a run of that shape, by path."""
    return {
        "parallel.tp": run.tp, "parallel.sp": run.sp, "parallel.pp": run.pp, "parallel.virtual_stages": run.virtual_stages,
        "parallel.schedule": run.schedule, "parallel.pipeline_layout": None, "parallel.cp": run.cp, "parallel.cp_kind": run.cp_kind,
        "parallel.ep": run.ep, "parallel.expert_tp": run.expert_tp, "parallel.dp": run.dp, "parallel.zero": run.zero,
        "parallel.zero3_shard": None, "parallel.zero3_layers": None, "batch.micro": run.micro_batch,
        "recompute": {"kind": run.recompute}, "offload.activations": 0,
    }  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def pipelines(layers: int, pp: int) -> list[tuple[str, int]]:
    """Schedules and numbers of virtual stages for so many layers: as few layers a stage as one, by steps of a factor of two."""
    if pp == 1:
        return [("1f1b", 1)]
    most = layers // pp
    virtual = sorted({1, *(most // part for part in (1, 2, 3, 4, 8) if most // part > 1)})
    return [*(("1f1b", stages) for stages in virtual), ("zb-h1", 1), *([("zbv", 2)] if most >= 2 else [])]


@dataclass(frozen=True)
class RoughMemory:
    """Bytes of the first pipeline rank, about: enough to leave out what cannot fit before `memory` counts all that is kept.

    Attributes:
        model: which.
        count: its parameters.
        split, whole: those of all layers, as in `LayerParameters`.
        stack: experts of the layer that has most.
        wide: the feed-forward width of the widest layer.
    """

    model: ModelConfig
    count: Parameters
    split: int
    whole: int
    stack: int
    wide: int

    @classmethod
    def of(cls, model: ModelConfig, count: Parameters) -> RoughMemory:
        """What is the same in all layouts, added up once."""
        layers = count.layers
        split, whole = (sum(getattr(layer, name) for layer in layers) for name in ("split", "whole"))
        return cls(model, count, split, whole, max(layer.experts for layer in layers), widest(model))

    def bytes(self, run: RunShape) -> float:
        """In that layout."""
        model, count, block, alone = self.model, self.count, run.ep * run.expert_tp, run.pp == 1
        dense = (self.split / run.tp + self.whole) / run.pp + (count.embedding + count.head * alone) / run.tp
        experts = count.experts / block / run.pp
        apart = 0.0 if run.offload_optimizer else 12.0
        shared = dense / run.sharers + experts / max(1, run.dp * run.cp * run.tp // block)
        sums = {2: 4 / run.sharers, 3: 0.0}.get(run.zero, 4.0)
        states = apart * shared + (6 * shared if run.zero == 3 else (2 + sums) * (dense + experts))
        # the backward of a layer, which has its rows of experts thrice, and adds up the gradients of one of their stacks
        rows = model.hidden_size * (model.moe.top_k if model.moe else 0) / run.tp
        kept, every = (kept_elements(model, each, self.wide) for each in (run, replace(run, recompute="none")))
        work = 2 * self.wide / run.tp + 3 * rows + (every if run.recompute == "full" else 0.0)
        loss = 6 * model.vocab_size / run.tp * alone
        flight = run.pp + (run.virtual_stages - 1) * run.pp / run.virtual_stages if run.pp > 1 else 1
        held = 2 * kept * model.num_layers / run.pp * min(flight, run.microbatches)
        tokens = run.micro_batch * run.seq_length / run.cp
        return states + 4 / 3 * self.stack / block + tokens * (held + max(loss, 2 * work))
