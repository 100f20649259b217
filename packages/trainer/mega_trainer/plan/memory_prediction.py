"""Predicted memory of each rank, and the moment of its peak, without using any device.

The memory of a layer is counted on the trainer's own modules (`part_memory`); the memory of a rank at each time follows from
its pipeline schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from mega_common.model_config import ModelConfig
from mega_trainer.pipeline.layer_partition import split_stage_layers
from mega_trainer.pipeline.schedules import PipelineOp, PipelineSchedule
from mega_trainer.plan.flops import count_parameters_by_layer, head_cost_in_layers, relative_layer_costs
from mega_trainer.plan.pipeline_fill import IN_FLIGHT, make_planning_schedule
from mega_trainer.plan.training_layout import TrainingLayout
from mega_trainer.plan.zero3_memory import Zero3StageMemory

if TYPE_CHECKING:
    from mega_trainer.plan.part_memory import ModelPartMemory, ModelPartMemoryBytes, WeightCounts


@dataclass(frozen=True)
class RankMemory:
    """Predicted peak memory of one rank at a pipeline position, by kind, and the operation at the peak.

    Attributes:
        bytes: bytes at the peak, by kind, as in `predict_memory`.
        moment: description of the operation at the peak.
    """

    bytes: dict[str, int]
    moment: str

    @property
    def total_bytes(self) -> int:
        """Peak bytes summed over all kinds of memory."""
        return sum(self.bytes.values())


def split_layers_into_stages(model: ModelConfig, run: TrainingLayout) -> list[range]:
    """Return the range of layer indices of each pipeline stage, split as mega trains them.

    Raises:
        ConfigError: when the layers do not fit the stages.
    """
    return split_stage_layers(
        model.num_layers, run.pp, run.virtual_stages, run.pipeline_layout,
        head_cost=head_cost_in_layers(model, run.seq_length, run.target_length),
        layer_costs=relative_layer_costs(model, run.seq_length, run.target_length),
        first_stage_layers=model.first_stage_layers, last_stage_layers=model.last_stage_layers,
    )  # fmt: skip


def split_layers_evenly(model: ModelConfig, run: TrainingLayout) -> list[range]:
    """Return the range of layer indices of each pipeline stage in Megatron-LM: equally many layers in each.

    Where the stages do not divide the layers, they are those of `split_layers_into_stages`, as an option of it can describe.
    """
    stages = run.pp * run.virtual_stages
    each = model.num_layers // stages
    if model.num_layers % stages or run.pipeline_layout:
        return split_layers_into_stages(model, run)
    return [range(stage * each, (stage + 1) * each) for stage in range(stages)]


def split_layers_by_shares(model: ModelConfig, run: TrainingLayout) -> list[range]:
    """Return the range of layer indices of each pipeline stage in nanotron, by shares of the FLOPs.
    A stage gets layers until the stages up to it reach their share of layers and head, so the first stages have more.
    """
    stages = run.pp * run.virtual_stages
    costs = [layer.split for layer in count_parameters_by_layer(model).layers[: model.num_layers]]
    share = (sum(costs) + model.vocab_size * model.hidden_size) / stages
    firsts, done = [0], 0
    for index, cost in enumerate(costs):
        done += cost
        if done >= len(firsts) * share and len(firsts) < stages:
            firsts.append(index + 1)
    firsts += [model.num_layers] * (stages - len(firsts))
    return [range(first, last) for first, last in pairwise([*firsts, model.num_layers])]


def predict_memory(model: ModelConfig, run: TrainingLayout) -> list[dict[str, int]]:
    """Return the predicted peak bytes by kind of one rank in each pipeline rank, in pipeline order.

    Kinds: `weights`, `gradients`, `optimizer` (moments and, under a 16-bit precision, fp32 weights), `activations`
    (saved tensors, micro-batches, pipeline messages), `work` (temporary tensors of the running operation, including
    gathered weights and gradients in flight). The quantised operands of the running FP8 GEMM are not counted.

    Raises:
        ConfigError: when the layers do not fit the stages, or the schedule is unknown.
    """
    return list(iterate_memory(model, run))


def iterate_memory(model: ModelConfig, run: TrainingLayout) -> Iterator[dict[str, int]]:
    """Yield the predicted peak bytes by kind of each pipeline rank in turn, as `predict_memory`, computed when needed."""
    return (rank.bytes for rank in _iterate_peak_memory(model, run))


def predict_peak_memory(model: ModelConfig, run: TrainingLayout) -> list[RankMemory]:
    """Return the predicted peak memory of one rank in each pipeline rank, and the operation at the peak."""
    return list(_iterate_peak_memory(model, run))


def _iterate_peak_memory(model: ModelConfig, run: TrainingLayout) -> Iterator[RankMemory]:
    """Yield `predict_peak_memory` of one pipeline rank after the other."""
    from mega_trainer.plan.part_memory import count_model_part_memory  # imports torch

    parts, stages = count_model_part_memory(model, run), split_layers_into_stages(model, run)
    schedule = make_planning_schedule(
        run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages,
        pairs_passes=run.overlap_expert_exchange,
    )  # fmt: skip
    chunks = [_StageMemory.from_stage(model, run, parts, stages, index) for index in range(len(stages))]
    quantised = _quantised_layer_bytes(model, run)
    for rank in range(run.pp):
        yield _rank_peak(model, run, parts, schedule, chunks, quantised, rank)


@dataclass(frozen=True)
class _StageMemory:
    """Bytes that a stage holds for one micro-batch.

    Attributes:
        kept: bytes held from forward to backward.
        forward, backward: bytes at the peak of each: saved tensors, and temporary tensors of the running layer.
        deferred_wgrad: bytes of deferred weight gradients between the halves of a backward.
        weight_half: bytes of ZeRO-3's gradients in the second half.
        gathered: bytes of weights that ZeRO-3 gathers once a step.
        weights: parameters of the stage.
        largest: elements of the largest parameter of a layer.
        layers: layers of the stage.
    """

    kept: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    deferred_wgrad: int
    weight_half: int
    gathered: int
    weights: WeightCounts
    largest: int
    layers: range

    @classmethod
    def from_stage(
        cls, model: ModelConfig, run: TrainingLayout, parts: ModelPartMemory, stages: Sequence[range], stage: int
    ) -> _StageMemory:
        """Return the memory of stage number `stage`."""
        from mega_trainer.plan.part_memory import WeightCounts

        first, last = stage == 0, stage == len(stages) - 1
        layers = [_layer_memory(run, parts, index, number) for number, index in enumerate(stages[stage])]
        held = [*([parts.embedding] if first else []), *layers, *([parts.head] if last else [])]
        offloaded = [0 < number + (not first) <= run.offload for number in range(len(held))]
        kept = [part.small if is_offloaded else part.kept for part, is_offloaded in zip(held, offloaded, strict=True)]
        copied = [
            part.kept - part.small if is_offloaded else 0 for part, is_offloaded in zip(held, offloaded, strict=True)
        ]
        received = 0 if first else _layer_input_bytes(model, run)  # with the hidden states, which the first layer keeps
        before = [received + sum(kept[:number]) for number in range(len(held))]
        in_flight = [0, *copied[:-1]]  # activations of the layer before, being copied to or from host memory
        deferred = [part.deferred_wgrad for part in held]
        zero3 = Zero3StageMemory.from_parts(
            model, run, layers, parts.embedding.weights if first else None, parts.head.weights if last else None
        )
        extra = zero3.count_part_bytes()
        forward = [(before[i] + p.kept, p.forward - p.kept + in_flight[i] + extra[i][0]) for i, p in enumerate(held)]
        backward = [
            (before[i] + p.kept + sum(deferred[i + 1 :]), p.backward - p.kept + in_flight[i] + extra[i][1])
            for i, p in enumerate(held)
        ]
        weights = sum((part.weights for part in held), WeightCounts())
        largest = max((part.weights.largest for part in layers), default=0)
        return cls(
            received + sum(kept), max(forward, key=sum), max(backward, key=sum), sum(deferred), zero3.weight_half_bytes,
            zero3.gathered_bytes, weights, largest, stages[stage],
        )  # fmt: skip


def _layer_memory(run: TrainingLayout, parts: ModelPartMemory, index: int, number: int) -> ModelPartMemoryBytes:
    """Return the memory of a layer, the given `number` in its stage, under the run's recompute setting."""
    bound = run.recompute_layers
    whole = run.recompute == "full" and (bound is None or number < bound)
    return (parts.whole if whole else parts.layers)[index]


@dataclass
class _PeakTracker:
    """Largest sum so far and its moment."""

    kept: int = 0
    work: int = 0
    moment: str = ""

    def record_if_larger(self, kept: int, work: int, moment: str) -> None:
        """Record the sum if it is the largest so far."""
        if kept + work > self.kept + self.work:
            self.kept, self.work, self.moment = kept, work, moment


@dataclass
class _MessageBuffer:
    """Hidden states that a rank has received or still has to send."""

    size: int
    limit: int
    waiting: set[PipelineOp] = field(default_factory=set)
    leaving: deque[PipelineOp] = field(default_factory=deque)

    @property
    def held_bytes(self) -> int:
        """Bytes of all held messages."""
        return self.size * (len(self.waiting) + len(self.leaving))

    def send_message(self, op: PipelineOp) -> None:
        """Mark a message as being sent; the oldest one is freed when more than `limit` are in flight."""
        self.waiting.discard(op)
        self.leaving.append(op)
        if len(self.leaving) > self.limit:
            self.leaving.popleft()


def _rank_peak(
    model: ModelConfig,
    run: TrainingLayout,
    parts: ModelPartMemory,
    schedule: PipelineSchedule,
    chunks: Sequence[_StageMemory],
    quantised: Mapping[int, float],
    rank: int,
) -> RankMemory:
    """Return the peak memory of a pipeline rank over its schedule."""
    mine = [chunks[stage] for stage in schedule.stages_of_rank(rank)]
    states = _state_bytes(run, [chunk.weights for chunk in mine])
    states["weights"] += round(sum(quantised.get(index, 0.0) for chunk in mine for index in chunk.layers))
    gathered = sum(chunk.gathered for chunk in mine)
    in_forward, in_backward = (gathered + size for size in _bucket_bytes(run, mine))
    fed = run.microbatches * (parts.context + _batch_bytes(model, run))
    most, held, last = _PeakTracker(), fed, len(chunks) - 1
    beside: _StageMemory | None = None  # the stage of a forward that runs in turn with the next backward
    messages = _MessageBuffer(_residual_bytes(model, run), IN_FLIGHT * run.pp)
    for op in schedule.ranks[rank]:
        kind, stage, micro = op
        chunk, moment = chunks[stage], f"of micro-batch {micro}" + f" in stage {stage}" * (last > 0)
        match kind:
            case "RECV_F":
                messages.waiting.add(PipelineOp("F", stage - 1, micro))
            case "RECV_B":
                messages.waiting.add(PipelineOp("B", stage + 1, micro))
            case "SEND_F" | "SEND_B":
                messages.send_message(op._replace(kind="F" if kind == "SEND_F" else "B"))
            case "F":
                messages.waiting.discard(PipelineOp("F", stage - 1, micro))
                kept, work = chunk.forward
                beside = chunk if op in schedule.pairs else None
                if beside is None:
                    most.record_if_larger(held + messages.held_bytes + kept, work + in_forward, f"forward {moment}")
                held += chunk.kept
                if stage < last:
                    messages.waiting.add(op)
            case "B" | "I":
                messages.waiting.discard(PipelineOp("B", stage + 1, micro))
                kept, work = chunk.backward
                if beside is not None:
                    kept, work = _pair_kept_bytes(model, beside, chunk) - beside.kept, work + beside.forward[1]
                most.record_if_larger(
                    held + messages.held_bytes - chunk.kept + kept, work + in_backward, f"backward {moment}"
                )
                held += chunk.deferred_wgrad * (kind == "I") - chunk.kept
                if stage > 0:
                    messages.waiting.add(PipelineOp("B", stage, micro))
            case "W":
                work = gathered + chunk.weight_half
                most.record_if_larger(held + messages.held_bytes, work, f"weight gradients {moment}")
                held -= chunk.deferred_wgrad
    most.record_if_larger(0, _update_bytes(run, [chunk.weights for chunk in mine]), "update")
    return RankMemory({**states, "activations": most.kept, "work": most.work}, most.moment)


def _pair_kept_bytes(model: ModelConfig, forward: _StageMemory, backward: _StageMemory) -> int:
    """Return the most bytes that a forward and a backward in turn hold: one saves activations while the other frees its own.
    Each runs from exchange to exchange, of which an expert layer has two; the forward is one such segment ahead.
    """
    ahead, behind = (1 + 2 * sum(map(model.is_moe_layer, chunk.layers)) for chunk in (forward, backward))
    saved = [forward.kept * done / ahead for done in range(1, ahead + 1)]
    left = [backward.kept * max(0.0, 1 - done / behind) for done in range(ahead)]
    return round(max(map(sum, zip(saved, left, strict=True))))


def _shard_counts(run: TrainingLayout) -> tuple[int, int]:
    """Return over how many ranks ordinary weights and experts are sharded."""
    return run.zero3_shard_ranks if run.zero == 3 else run.dp * run.cp, max(
        1, run.dp * run.cp * run.tp // (run.ep * run.expert_tp)
    )


def _state_bytes(run: TrainingLayout, stages: Sequence[WeightCounts]) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer states of some stages."""
    dense, experts = sum(w.dense for w in stages), sum(w.experts for w in stages)
    shared = _shard_counts(run)

    def sharded_bytes(size: float, dense: float, experts: float, level: int) -> float:
        ranks = shared if run.zero >= level else (1, 1)
        return size * (dense / ranks[0] + experts / ranks[1])

    copy = 4 if run.weight_bytes == 2 and not run.is_zero3_sharded else 0
    trainable = sum(w.trainable for w in stages), sum(w.trainable_experts for w in stages)
    matrices = sum(w.dense_matrices for w in stages), sum(w.expert_matrices for w in stages)
    absent = run.moments if run.soap_width is not None else int(run.muon)  # moments of matrices that no slot has
    moments = sharded_bytes((run.moments + run.ema) * run.gradient_bytes, *trainable, 1)
    moments -= sharded_bytes(absent * run.gradient_bytes, *matrices, 1)
    gradients = sharded_bytes(run.gradient_bytes, *trainable, 2)
    if run.zero == 1:  # the reduced shard, in addition to the full gradients
        gradients += sum(
            run.gradient_bytes * n / ranks for n, ranks in zip(trainable, shared, strict=True) if ranks > 1
        )
    return {
        "weights": round(sharded_bytes(run.gradient_bytes if run.is_zero3_sharded else run.weight_bytes, dense, experts, 3)) + sum(w.packed for w in stages),
        "gradients": round(gradients),
        "optimizer": _soap_bytes(run, stages) + (0 if run.offload_optimizer else round(moments + sharded_bytes(copy, *trainable, 1))),
    }  # fmt: skip


def _soap_bytes(run: TrainingLayout, stages: Sequence[WeightCounts]) -> int:
    """Return the bytes of SOAP's state of hidden matrices on the data rank that has most: each matrix is on one rank, whole.
    The ranks take turns, as for one bucket; which matrices they get differs with several. Offload does not move this state.
    """
    if (width := run.soap_width) is None:
        return 0
    total, ranks = 0, _shard_counts(run)
    for shapes, size in zip(zip(*((w.dense_shapes, w.expert_shapes) for w in stages), strict=True), ranks, strict=True):
        states = [
            count * 2 * (rows * columns + sum(side * side for side in (rows, columns) if side <= width))
            for count, rows, columns in chain(*shapes)
        ]
        total += max(sum(states[rank::size]) for rank in range(min(size, max(1, len(states)))))
    return total * run.gradient_bytes


def _quantised_layer_bytes(model: ModelConfig, run: TrainingLayout) -> dict[int, float]:
    """Return the bytes of each layer's linear weights that are kept quantised, in two forms, by layer index."""
    if run.is_zero3_sharded or not run.fp8_layers:
        return {}
    layers = count_parameters_by_layer(model).layers
    split, block = run.tp, run.ep * run.expert_tp
    both = 1.125 if run.precision == "nvfp4" else 2  # bytes of an element in both forms
    return {index: both * (layers[index].split / split + layers[index].experts / block) for index in run.fp8_layers}


def _bucket_bytes(run: TrainingLayout, mine: Sequence[_StageMemory]) -> tuple[int, int]:
    """Return the bytes of gradient buckets in flight, in a forward and in a backward, if gradients are reduced after
    each micro-batch.
    """
    if run.zero != 2 or run.dp * run.cp == 1:
        return 0, 0
    total = sum(chunk.weights.trainable + chunk.weights.trainable_experts for chunk in mine)
    # a bucket is closed after the parameter that exceeds its minimum size
    bucket = _bucket_elements(run) + max(chunk.largest for chunk in mine) // 2
    most = max(bucket, *(chunk.weights.largest for chunk in mine))
    each = run.gradient_bytes + run.gradient_bytes / (run.dp * run.cp)
    # two reductions in flight, one of them possibly of embedding or head, and a third bucket being sent while one is filled
    return round(min(total, most + bucket) * each), round(min(total, most + 3 * bucket) * each)


def _bucket_elements(run: TrainingLayout) -> int:
    """Return the elements of a gradient bucket."""
    from mega_trainer.parallel.zero_buffers import ZeroConfig

    return ZeroConfig(shard_grads=True, bucket_elements=run.bucket_elements).min_bucket_elements(run.dp * run.cp)


def _update_bytes(run: TrainingLayout, stages: Sequence[WeightCounts]) -> int:
    """Return the additional bytes of an update: the buffer of this rank's new weights for the all-gather."""
    if run.zero not in (1, 2):
        return 0
    elements = (sum(w.trainable for w in stages), sum(w.trainable_experts for w in stages))
    shared = zip(elements, _shard_counts(run), strict=True)
    return round(sum(run.weight_bytes * count / ranks for count, ranks in shared if ranks > 1))


def _batch_bytes(model: ModelConfig, run: TrainingLayout) -> int:
    """Return the bytes of a micro-batch: tokens, labels and positions, and loss weights."""
    each = 3 * 8 + 4 + (2 * 8 + 4) * model.mtp_layers + (model.moe is not None) + 8 * (model.token_types > 0)
    source = 2 * 8 * run.seq_length if run.target_length else 0
    each += 2 * 8 * model.retro.neighbors if model.retro else 0
    return run.micro_batch * ((run.target_length or run.seq_length) * each + source) // run.cp


def _layer_input_bytes(model: ModelConfig, run: TrainingLayout) -> int:
    """Return the bytes of the inputs of all layers for a micro-batch on a rank, which pipeline messages have."""
    tokens = run.micro_batch * run.sample_tokens // run.cp // (run.tp if run.sp else 1)
    return tokens * run.weight_bytes * model.num_layers * (model.per_layer_input_size or 0)


def _residual_bytes(model: ModelConfig, run: TrainingLayout) -> int:
    """Return the bytes of a micro-batch's hidden states on a rank."""
    tokens = run.micro_batch * run.sample_tokens // run.cp // (run.tp if run.sp else 1)
    tokens *= 1 + 2 * model.retro.neighbors if model.retro else 1
    return tokens * run.weight_bytes * model.stream_width + _layer_input_bytes(model, run)
