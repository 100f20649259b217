"""How many bytes each rank needs, told before any device is touched, and when it needs them.

What a layer keeps and makes is counted on the trainer's own modules (`plan.parts`); what a rank holds of them at a time
follows from the list of operations that it runs. Legend: P elements of a rank's parameters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_common.model_config import ModelConfig
from mega_trainer.pipeline.schedules import Op, Schedule
from mega_trainer.pipeline.stages import stage_layers
from mega_trainer.plan.flops import count_parameters, head_cost, layer_costs
from mega_trainer.plan.pipeline_fill import IN_FLIGHT, make_planning_schedule
from mega_trainer.plan.shape import RunShape

if TYPE_CHECKING:
    from mega_trainer.plan.parts import Part, Parts, Weights

UNIT_ELEMENTS = 350_000  # a gather among many ranks costs its latency: 1,024 take two layers of 8B, 8 take one


@dataclass(frozen=True)
class RankMemory:
    """Of a rank of one pipeline rank.

    Attributes:
        bytes: at its peak, by kind, as `memory` tells them.
        moment: when that is.
    """

    bytes: dict[str, int]
    moment: str

    @property
    def total(self) -> int:
        """All kinds."""
        return sum(self.bytes.values())


def layers_of_stages(model: ModelConfig, run: RunShape) -> list[range]:
    """The layers of each stage, as the trainer splits them.

    Raises:
        ConfigError: when the layers do not fit the stages.
    """
    return stage_layers(
        model.num_layers, run.pp, run.virtual_stages, run.pipeline_layout,
        head_cost=head_cost(model, run.seq_length, run.target_length),
        layer_costs=layer_costs(model, run.seq_length, run.target_length),
    )  # fmt: skip


def unit_layers(model: ModelConfig, run: RunShape) -> int:
    """Layers that level 3 gathers together, experts apart: so many that a rank's part of them is of `UNIT_ELEMENTS`."""
    layers = count_parameters(model).layers
    mean = sum(layer.split / run.tp + layer.whole for layer in layers) / len(layers)
    return run.zero3_layers or math.ceil(UNIT_ELEMENTS * run.sharers / mean)


def memory(model: ModelConfig, run: RunShape) -> list[dict[str, int]]:
    """Bytes of each kind on a rank of each pipeline rank, in pipeline order, when it holds most.

    Kinds: `weights`, `gradients`, `optimizer` (moments and, under a 16-bit precision, fp32 weights), `activations` (what is
    kept from forwards to backwards, micro-batches and messages of the pipeline), `work` (what the operation at hand makes, gathered weights and
    gradients on their way among them). Of fp8 the eight-bit factors of the product at hand are not counted.

    Raises:
        ConfigError: when the layers do not fit the stages, or the schedule is unknown.
    """
    return [rank.bytes for rank in peaks(model, run)]


def peaks(model: ModelConfig, run: RunShape) -> list[RankMemory]:
    """As `memory`, with the moment of each peak."""
    from mega_trainer.plan.parts import parts_of  # here: it needs torch

    parts, stages = parts_of(model, run), layers_of_stages(model, run)
    schedule = make_planning_schedule(
        run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages
    )
    chunks = [_Chunk.of(model, run, parts, stages, index) for index in range(len(stages))]
    return [_peak(model, run, parts, schedule, chunks, rank) for rank in range(run.pp)]


@dataclass(frozen=True)
class _Chunk:
    """What a stage holds of one micro-batch, in bytes.

    Attributes:
        kept: from forward to backward.
        forward, backward: when it holds most in each: what is kept then, and what the layer at hand makes besides.
        put_off: between the halves of a backward.
        weights: its parameters.
        largest: elements of the largest parameter of a layer.
    """

    kept: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    put_off: int
    weights: Weights
    largest: int
    layers: range

    @classmethod
    def of(cls, model: ModelConfig, run: RunShape, parts: Parts, stages: Sequence[range], stage: int) -> _Chunk:
        """The stage of that number."""
        from mega_trainer.plan.parts import Weights

        first, last = stage == 0, stage == len(stages) - 1
        layers = [_layer(run, parts, index, place) for place, index in enumerate(stages[stage])]
        held = [*([parts.embedding] if first else []), *layers, *([parts.head] if last else [])]
        away = [0 < place + (not first) <= run.offload for place in range(len(held))]
        kept = [part.small if gone else part.kept for part, gone in zip(held, away, strict=True)]
        back = [part.kept - part.small if gone else 0 for part, gone in zip(held, away, strict=True)]
        before = [sum(kept[:place]) for place in range(len(held))]
        arriving = [0, *back[:-1]]  # of the layer before, which is on its way there or back
        put_off = [part.put_off for part in held]
        more = _sharing(model, run, held, layers)
        forward = [(before[i] + p.kept, p.forward - p.kept + arriving[i] + more[i][0]) for i, p in enumerate(held)]
        backward = [
            (before[i] + p.kept + sum(put_off[i + 1 :]), p.backward - p.kept + arriving[i] + more[i][1])
            for i, p in enumerate(held)
        ]
        weights = sum((part.weights for part in held), Weights())
        largest = max((part.weights.largest for part in layers), default=0)
        return cls(
            sum(kept), max(forward, key=sum), max(backward, key=sum), sum(put_off), weights, largest, stages[stage]
        )


def _layer(run: RunShape, parts: Parts, index: int, place: int) -> Part:
    bound = run.recompute_layers
    whole = run.recompute == "full" and (bound is None or place < bound)
    return (parts.whole if whole else parts.layers)[index]


@dataclass
class _Most:
    """The largest sum so far, and when that was."""

    kept: int = 0
    work: int = 0
    moment: str = ""

    def see(self, kept: int, work: int, moment: str) -> None:
        if kept + work > self.kept + self.work:
            self.kept, self.work, self.moment = kept, work, moment


@dataclass
class _Messages:
    """Tensors of the residual stream that a rank holds for others, or has from them."""

    size: int
    limit: int
    waiting: set[Op] = field(default_factory=set)
    leaving: deque[Op] = field(default_factory=deque)

    @property
    def held(self) -> int:
        return self.size * (len(self.waiting) + len(self.leaving))

    def leave(self, op: Op) -> None:
        """What was computed is on its way; it is let go when enough others are."""
        self.waiting.discard(op)
        self.leaving.append(op)
        if len(self.leaving) > self.limit:
            self.leaving.popleft()


def _peak(
    model: ModelConfig, run: RunShape, parts: Parts, schedule: Schedule, chunks: Sequence[_Chunk], rank: int
) -> RankMemory:
    mine = [chunks[stage] for stage in schedule.stages(rank)]
    states = _states(run, [chunk.weights for chunk in mine])
    states["weights"] += _eight_bits(model, run, mine)
    in_forward, in_backward = _summed_buckets(run, mine)
    fed = run.microbatches * (parts.context + _batch_bytes(model, run))
    most, held, last = _Most(), fed, len(chunks) - 1
    messages = _Messages(_residual_bytes(model, run), IN_FLIGHT * run.pp)
    for op in schedule.ranks[rank]:
        kind, stage, micro = op
        chunk, moment = chunks[stage], f"of micro-batch {micro}" + f" in stage {stage}" * (last > 0)
        match kind:
            case "RECV_F":
                messages.waiting.add(Op("F", stage - 1, micro))
            case "RECV_B":
                messages.waiting.add(Op("B", stage + 1, micro))
            case "SEND_F" | "SEND_B":
                messages.leave(op._replace(kind="F" if kind == "SEND_F" else "B"))
            case "F":
                messages.waiting.discard(Op("F", stage - 1, micro))
                kept, work = chunk.forward
                most.see(held + messages.held + kept, work + in_forward, f"forward {moment}")
                held += chunk.kept
                if stage < last:
                    messages.waiting.add(op)
            case "B" | "I":
                messages.waiting.discard(Op("B", stage + 1, micro))
                kept, work = chunk.backward
                most.see(held + messages.held - chunk.kept + kept, work + in_backward, f"backward {moment}")
                held += chunk.put_off * (kind == "I") - chunk.kept
                if stage > 0:
                    messages.waiting.add(Op("B", stage, micro))
            case "W":
                held -= chunk.put_off
    most.see(0, _update_work(run, [chunk.weights for chunk in mine]), "update")
    return RankMemory({**states, "activations": most.kept, "work": most.work}, most.moment)


def _parts_of_copies(run: RunShape) -> tuple[int, int]:
    """Among how many ranks ordinary weights are shared, and experts, where they are."""
    return run.sharers if run.zero == 3 else run.dp * run.cp, max(
        1, run.dp * run.cp * run.tp // (run.ep * run.expert_tp)
    )


def _states(run: RunShape, stages: Sequence[Weights]) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer of some stages' parameters."""
    dense, experts = sum(w.dense for w in stages), sum(w.experts for w in stages)
    shared = _parts_of_copies(run)

    def split(size: float, dense: float, experts: float, level: int) -> float:
        ranks = shared if run.zero >= level else (1, 1)
        return size * (dense / ranks[0] + experts / ranks[1])

    copy = 4 if run.element == 2 and not run.sharded else 0
    moved = sum(w.moved for w in stages), sum(w.moved_experts for w in stages)
    matrices = sum(w.dense_matrices for w in stages), sum(w.expert_matrices for w in stages)
    moments = split((2 + run.ema) * run.wide, *moved, 1) - run.muon * split(run.wide, *matrices, 1)
    gradients = split(run.wide, *moved, 2)
    if run.zero == 1:  # the sum of its slice, beside the whole, where there are several ranks
        gradients += sum(run.wide * n / ranks for n, ranks in zip(moved, shared, strict=True) if ranks > 1)
    return {
        "weights": round(split(run.wide if run.sharded else run.element, dense, experts, 3)) + sum(w.packed for w in stages),
        "gradients": round(gradients),
        "optimizer": 0 if run.offload_optimizer else round(moments + split(copy, *moved, 1)),
    }  # fmt: skip


def _eight_bits(model: ModelConfig, run: RunShape, mine: Sequence[_Chunk]) -> int:
    """Bytes of linear weights that are kept quantised, in two forms."""
    if run.sharded or not run.eight_bits:
        return 0
    count = count_parameters(model).layers
    layers = [count[index] for chunk in mine for index in chunk.layers if index in run.eight_bits]
    return round(2 * sum(layer.split / run.tp + layer.experts / (run.ep * run.expert_tp) for layer in layers))


def _sharing(model: ModelConfig, run: RunShape, held: Sequence[Part], layers: Sequence[Part]) -> list[tuple[int, int]]:
    """Bytes that ZeRO-3 takes besides, in the forward and the backward of each part of the model.

    FSDP2 holds a unit's gathered weights and, beside them, the buffer that they or the next one's came in; embedding and head
    stay from forward to backward. A backward holds the head's gradient to its end, those of the unit so far, and those of
    the unit before in the buffer that they are summed from.
    """
    if not run.sharded:
        return [(0, 0)] * len(held)
    count = min(len(layers), unit_layers(model, run))
    largest = max((part.weights.dense for part in layers), default=0)
    unit = count * largest + max((part.weights.experts for part in layers), default=0)
    ends = held[0].weights.dense + held[-1].weights.dense
    head = held[-1].weights.moved
    own = max((part.weights.moved for part in layers), default=0)
    moved = count * own + max((part.weights.moved_experts for part in layers), default=0)
    within = run.element * (ends + 2 * unit), run.element * (ends + 2 * unit + head + (count - 1) * own)
    sums = run.wide * moved * (len(layers) > count)
    out = [(within[0], within[1] + sums)] * len(held)
    out[0] = 2 * run.element * ends, run.element * (ends + head) + run.wide * max(held[0].weights.moved + head, moved)
    out[-1] = (run.element * (ends + unit),) * 2
    return out


def _summed_buckets(run: RunShape, mine: Sequence[_Chunk]) -> tuple[int, int]:
    """Bytes of buckets on their way, in a forward and in a backward, where gradients are summed after each micro-batch."""
    if run.zero != 2 or run.dp * run.cp == 1:
        return 0, 0
    total = sum(chunk.weights.moved + chunk.weights.moved_experts for chunk in mine)
    bucket = (
        _bucket_elements(run) + max(chunk.largest for chunk in mine) // 2
    )  # the last of its parameters passes the mark
    most = max(bucket, *(chunk.weights.largest for chunk in mine))
    each = run.wide + run.wide / (run.dp * run.cp)
    # two sums are under way, one of embedding or head perhaps, and one more bucket is filled while a third is sent
    return round(min(total, most + bucket) * each), round(min(total, most + 3 * bucket) * each)


def _bucket_elements(run: RunShape) -> int:
    from mega_trainer.parallel.grads import Sharing

    return Sharing(slices=True, bucket_elements=run.bucket_elements).enough(run.dp * run.cp)


def _update_work(run: RunShape, stages: Sequence[Weights]) -> int:
    """Bytes besides in an update: a copy of this rank's new weights, which others are sent."""
    if run.zero not in (1, 2):
        return 0
    elements = (sum(w.moved for w in stages), sum(w.moved_experts for w in stages))
    shared = zip(elements, _parts_of_copies(run), strict=True)
    return round(sum(run.element * count / ranks for count, ranks in shared if ranks > 1))


def _batch_bytes(model: ModelConfig, run: RunShape) -> int:
    """Of a micro-batch: tokens, labels and positions, and weights of the losses."""
    each = 3 * 8 + 4 + (2 * 8 + 4) * model.mtp_layers + (model.moe is not None) + 8 * (model.token_types > 0)
    source = 2 * 8 * run.seq_length if run.target_length else 0
    each += 2 * 8 * model.retro.neighbors if model.retro else 0
    return run.micro_batch * ((run.target_length or run.seq_length) * each + source) // run.cp


def _residual_bytes(model: ModelConfig, run: RunShape) -> int:
    tokens = run.micro_batch * run.tokens // run.cp // (run.tp if run.sp else 1)
    tokens *= 1 + 2 * model.retro.neighbors if model.retro else 1
    return tokens * run.element * model.hidden_size
