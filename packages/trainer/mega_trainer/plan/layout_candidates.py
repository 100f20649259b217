"""Candidate layouts of a run for a number of GPUs, with a rough estimate of their memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from mega_common.model_config import ModelConfig
from mega_trainer.config.run_config import RunConfig
from mega_trainer.pipeline.schedules import PAIRED, V_SHAPED
from mega_trainer.plan.flops import ParameterCounts
from mega_trainer.plan.layer_flops import expert_input_width, max_active_ffn_width, saved_activation_elements
from mega_trainer.plan.machine import MachineSpec
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.training_layout import RecomputeKind, TrainingLayout

MIN_CONTEXT_TOKENS = 2048  # tokens of a context rank; with fewer, attention does not hide the communication
LayoutSettings = dict[str, Any]  # values by path, as for `--set`
ZERO_CHOICES: tuple[tuple[int, Literal["micro_batch", "step"]], ...] = (
    (0, "micro_batch"), (1, "micro_batch"), (2, "micro_batch"), (3, "micro_batch"), (3, "step"),
)  # fmt: skip
HIDDEN_EXCHANGE = "parallel.overlap_expert_exchange"
RECOMPUTE: tuple[RecomputeKind, ...] = ("none", "selective", "full")


def generate_layout_candidates(
    config: RunConfig, ranks: int, machine: MachineSpec, zero_levels: Collection[int] = (1, 2, 3)
) -> Iterator[tuple[LayoutSettings, TrainingLayout]]:
    """Yield (run.yaml settings, training layout) of all candidate layouts of a run, at these ZeRO levels.

    They divide the ranks, layers and batch evenly and keep tensor ranks on one node.
    """
    model, batch, length = config.model, config.batch.global_, config.data.seq_length
    base = make_training_layout(config.model_copy(update={"parallel": type(config.parallel)()}), 1)
    experts = model.moe.num_experts if model.moe else 1
    dispatches = config.parallel.dispatch in ("alltoall", "deepep")  # asynchronously
    degrees = [
        n for n in _divisors(ranks) if n <= max(model.num_layers, machine.ranks_per_node, length // MIN_CONTEXT_TOKENS)
    ]
    for tp, pp, cp in product(degrees, repeat=3):
        fits = (
            model.num_attention_heads % tp == 0
            and length % (2 * cp * tp) == 0
            and (cp == 1 or length // cp >= MIN_CONTEXT_TOKENS)
        )
        if tp > machine.ranks_per_node or pp > model.num_layers or ranks % (tp * pp * cp) or not fits:
            continue
        dp = ranks // (tp * pp * cp)
        kinds: list[Literal["ring", "alltoall"]] = ["ring", "alltoall"] if cp > 1 else ["ring"]
        micros = [n for n in sorted({1, 2, 4, 8, config.batch.micro}) if batch % (n * dp) == 0]
        eps = _divisors(math.gcd(experts, dp * cp * tp))
        choices = product(
            micros,
            eps,
            list_pipeline_schedules(model.num_layers, pp),
            [choice for choice in ZERO_CHOICES if choice[0] in zero_levels],
            RECOMPUTE,
            kinds,
            (False, True),
        )
        for micro, ep, (schedule, virtual), (zero, gather), recompute, kind, overlap in choices:
            count = batch // (micro * dp)
            hides = ep > 1 and zero < 3 and schedule in PAIRED and count >= 2 * pp and dispatches
            if (overlap and not hides) or (not overlap and schedule == "dualpipev"):  # which is for hiding exchanges
                continue
            run = replace(
                base, micro_batch=micro, microbatches=count, tp=tp, sp=tp > 1, pp=pp, virtual_stages=virtual,
                schedule=schedule, pipeline_layout=None, cp=cp, cp_kind=kind, ep=ep, dp=dp, zero=zero, zero3_gather=gather,
                recompute=recompute,
                recompute_layers=None, offload=0, overlap_expert_exchange=overlap, expert_tp=1, modules=("norm", "activation"),
            )  # fmt: skip
            yield list_layout_settings(run), run


def list_layout_settings(run: TrainingLayout) -> LayoutSettings:
    """Return the run.yaml settings, {dotted path: value}, that produce the training layout `run`."""
    return {
        "parallel.tp": run.tp, "parallel.sp": run.sp, "parallel.pp": run.pp, "parallel.virtual_stages": run.virtual_stages,
        "parallel.schedule": run.schedule, "parallel.pipeline_layout": None, "parallel.cp": run.cp, "parallel.cp_kind": run.cp_kind,
        "parallel.ep": run.ep, "parallel.expert_tp": run.expert_tp, "parallel.dp": run.dp, "parallel.zero": run.zero,
        "parallel.zero3_shard": None, "parallel.zero3_layers": None,
        HIDDEN_EXCHANGE: run.overlap_expert_exchange,
        "parallel.zero3_gather": run.zero3_gather if run.zero == 3 else None, "batch.micro": run.micro_batch,
        "recompute": {"kind": run.recompute}, "offload.activations": 0,
    }  # fmt: skip


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number."""
    return [n for n in range(1, number + 1) if number % n == 0]


def list_pipeline_schedules(layers: int, pp: int) -> list[tuple[str, int]]:
    """Return the (pipeline schedule, number of virtual stages) pairs that fit a number of layers.
    There are `layers` layers on `pp` pipeline ranks; pairs go down to one layer per stage (1f1b) or two virtual stages
    (V-shaped ones).
    """
    if pp == 1:
        return [("1f1b", 1)]
    most = layers // pp
    virtual = sorted({1, *(most // part for part in (1, 2, 3, 4, 8) if most // part > 1)})
    shaped = [(name, 2) for name in V_SHAPED] if most >= 2 else []
    return [*(("1f1b", stages) for stages in virtual), ("zb-h1", 1), *shaped]


@dataclass(frozen=True)
class RoughMemoryEstimate:
    """Rough estimate (no bound) of the first pipeline rank's memory, to drop layouts before the exact `predict_memory`.

    Attributes:
        model: configuration of the model.
        count: parameters of the model.
        split, whole: sums over all layers of these fields of `LayerParameterCounts`.
        stack: largest number of expert parameters of a layer.
        wide: feed-forward width of the widest layer.
    """

    model: ModelConfig
    count: ParameterCounts
    split: int
    whole: int
    stack: int
    wide: int

    @classmethod
    def from_parameters(cls, model: ModelConfig, count: ParameterCounts) -> RoughMemoryEstimate:
        """Return the estimate of a model with given parameter counts, for any of its layouts."""
        layers = count.layers
        split, whole = (sum(getattr(layer, name) for layer in layers) for name in ("split", "whole"))
        return cls(model, count, split, whole, max(layer.experts for layer in layers), max_active_ffn_width(model))

    def estimate_bytes(self, run: TrainingLayout) -> float:
        """Return the estimated peak bytes of the first pipeline rank in the layout `run`."""
        model, count, block, alone = self.model, self.count, run.ep * run.expert_tp, run.pp == 1
        dense = (self.split / run.tp + self.whole) / run.pp + (count.embedding + count.head * alone) / run.tp
        experts = count.routed_experts / block / run.pp
        optimizer = 0.0 if run.offload_optimizer else 12.0
        shared = dense / run.zero3_shard_ranks + experts / max(1, run.dp * run.cp * run.tp // block)
        sums = {2: 4 / run.zero3_shard_ranks, 3: 0.0}.get(run.zero, 4.0)
        states = optimizer * shared + (6 * shared if run.zero == 3 else (2 + sums) * (dense + experts))
        states += 2 * (dense + experts) * (run.zero == 3 and run.zero3_gather == "step")
        # backward of a layer, which holds the rows of experts three times, and the gradients of one stack of experts
        rows = expert_input_width(model) * (model.moe.top_k if model.moe else 0) / run.tp
        kept = every = saved_activation_elements(model, run, self.wide)
        if run.recompute == "full":
            every = saved_activation_elements(model, replace(run, recompute="none"), self.wide)
        work = 2 * self.wide / run.tp + 3 * rows + (every if run.recompute == "full" else 0.0)
        loss = 6 * model.vocab_size / run.tp * alone
        flight = run.pp + (run.virtual_stages - 1) * run.pp / run.virtual_stages if run.pp > 1 else 1
        if run.overlap_expert_exchange and run.virtual_stages == 1:  # a pair passes its results on late
            flight *= 2
        held = 2 * kept * model.num_layers / run.pp * min(flight, run.microbatches)
        tokens = run.micro_batch * run.seq_length / run.cp
        return states + 4 / 3 * self.stack / block + tokens * (held + max(loss, 2 * work))
