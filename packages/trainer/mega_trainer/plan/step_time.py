"""Predicted duration of a training step on a machine, by parts.

The work of each stage (`layer_cost`) is simulated in the run's own pipeline schedule, operation by operation. Work outside of
the schedule is added: data-parallel communication that the backward does not hide, and the optimizer. Not included:
checkpoints, evaluations, imbalance of experts, and stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.parallel.zero_buffers import ZeroConfig
from mega_trainer.pipeline.schedules import V_SHAPED, PipelineOp, PipelineOpCosts, place_pipeline_stages
from mega_trainer.plan.flops import ParameterCounts, count_parameters_by_layer
from mega_trainer.plan.kernel_throughput import GpuThroughput
from mega_trainer.plan.layer_cost import (
    LayerCostModel,
    PassSeconds,
    PassWork,
    TrainerProfile,
    multiply_pass_work,
    sum_pass_work,
)
from mega_trainer.plan.machine import Interconnect, MachineEfficiency, MachineSpec
from mega_trainer.plan.memory_prediction import (
    split_layers_by_shares,
    split_layers_evenly,
    split_layers_into_stages,
)
from mega_trainer.plan.pipeline_fill import estimate_pipeline_makespan, make_planning_schedule
from mega_trainer.plan.trainable_parameters import TrainableParameters
from mega_trainer.plan.training_layout import TrainingLayout
from mega_trainer.plan.zero3_memory import count_zero3_unit_layers

UPDATE_BYTES = 51  # moved by AdamW and the gradient norm per parameter of a rank: benchmarks/results/traffic.json
HOST_BYTES = 28  # copied per parameter if optimizer states are in host memory: main weight, moments and gradient
GATHER_BYTES, REDUCE_BYTES = 4, 6  # copied per parameter by an all-gather and a reduce-scatter of ZeRO-3
HOST_WAIT = 1e-3  # seconds per step in which the host waits for results


@dataclass(frozen=True)
class PredictedStepTime:
    """Predicted seconds of a step, and of the parts of a step on the slowest pipeline rank; the parts sum to the total.

    Attributes:
        seconds: the total.
        parts: seconds by kind of work; of the expert exchange what is not hidden.
        hidden_exchange: seconds of expert exchange that the computation of another micro-batch hides.
    """

    seconds: float
    parts: dict[str, float]
    hidden_exchange: float = 0.0


@dataclass(frozen=True)
class StageCosts(PipelineOpCosts):
    """Seconds of the forward and backward operations of each pipeline stage, as costs for schedule simulation.

    Attributes:
        passes: seconds of each stage.
        exchanges: those of the expert exchange among them.
        hiding: share of each stage's computation next to which an exchange of another pass can be: all but the part before
            the first exchange of a forward, or after the last one of a backward.
        contention: as `GpuThroughput.contention`.
    """

    passes: tuple[PassSeconds, ...] = ()
    exchanges: tuple[PassSeconds, ...] = ()
    hiding: tuple[float, ...] = ()
    contention: float = 0.0

    def op_duration(self, op: PipelineOp) -> float:
        """Return the seconds of one forward or backward operation in its pipeline stage."""
        cost = self.passes[op.stage]
        return {"F": cost.forward, "B": cost.inputs + cost.weights, "I": cost.inputs, "W": cost.weights}[op.kind]

    def pair_duration(self, forward: PipelineOp, backward: PipelineOp) -> float:
        """Return the seconds of a forward and a backward, each of which hides the other's expert exchange."""
        return super().pair_duration(forward, backward) - self.hidden_seconds(forward, backward)

    def hidden_seconds(self, forward: PipelineOp, backward: PipelineOp) -> float:
        """Return the seconds of expert exchange that the computation of the other pass of a pair hides."""
        exchanged = (self.exchanges[forward.stage].forward, self.exchanges[backward.stage].inputs)
        computed = [self.op_duration(op) - each for op, each in zip((forward, backward), exchanged, strict=True)]
        beside = (computed[1] * self.hiding[backward.stage], computed[0] * self.hiding[forward.stage])
        return sum((1 - self.contention) * min(pair) for pair in zip(exchanged, beside, strict=True))


@dataclass(frozen=True)
class PlannedRun:
    """Run of a model on a machine, described for the prediction of its step time.

    Attributes:
        model: configuration of the model.
        run: shape of the run.
        cost_model: cost model of a rank's work on the machine.
        count: parameters of the model.
        trained: trainable parameters, adapters included.
        unit: number of layers that ZeRO-3 gathers together.
        known: what was computed of this run for any layout, by what determines it.
    """

    model: ModelConfig
    run: TrainingLayout
    cost_model: LayerCostModel
    count: ParameterCounts
    trained: TrainableParameters
    unit: int
    known: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_settings(
        cls,
        model: ModelConfig,
        run: TrainingLayout,
        machine: MachineSpec,
        efficiency: MachineEfficiency,
        profile: TrainerProfile,
        count: ParameterCounts | None = None,
    ) -> PlannedRun:
        """Return the planned run for a model, training layout, machine, efficiency and trainer profile.
        `count` is the model's parameters, if already counted.

        Raises:
            ConfigError: for a model with an encoder.
        """
        if model.has_encoder:
            raise ConfigError("--machine is not supported for models with encoders", hint="leave out --machine")
        interconnect, rates = (
            Interconnect.from_machine(machine, efficiency),
            GpuThroughput.from_machine(machine, efficiency, profile.attention),
        )
        count = count or count_parameters_by_layer(model)
        unit = count_zero3_unit_layers(model, run, count) if run.zero == 3 else 1
        trained = TrainableParameters.from_training_layout(model, run, count)
        return cls(model, run, LayerCostModel(model, run, interconnect, rates, profile, trained), count, trained, unit)

    def with_training_layout(self, run: TrainingLayout) -> PlannedRun:
        """Return this planned run in another training layout.
        Model, machine and trainable parameters are unchanged.
        """
        unit = count_zero3_unit_layers(self.model, run, self.count) if run.zero == 3 else 1
        return replace(self, run=run, cost_model=replace(self.cost_model, run=run), unit=unit)

    @cached_property
    def stage_layers(self) -> list[range]:
        """Range of layer indices of each pipeline stage.

        Raises:
            ConfigError: when the layers do not fit the stages.
        """
        split = {"even": split_layers_evenly, "shares": split_layers_by_shares}
        how = split.get(self.cost_model.profile.split, split_layers_into_stages)
        run = self.run
        key = how, run.pp, run.virtual_stages, run.pipeline_layout, run.seq_length, run.target_length
        if key not in self.known:
            self.known[key] = how(self.model, self.run)
        found: list[range] = self.known[key]
        return found

    def _make_layer_summer(self) -> Callable[[range], PassWork]:
        """Return a function that sums the work of some layers; layers of one kind are computed once."""
        of_layer, kinds = self._list_layer_kinds(), dict[object, PassWork]()

        def sum_layer_work(indices: range) -> PassWork:
            by_kind: dict[object, list[int]] = {}
            for index in indices:
                by_kind.setdefault(of_layer[index], []).append(index)
            for kind, (first, *_) in by_kind.items():
                if kind not in kinds:
                    kinds[kind] = self.cost_model.predict_layer_seconds(first)
            return sum_pass_work([multiply_pass_work(kinds[kind], len(same)) for kind, same in by_kind.items()])

        return sum_layer_work

    def _list_layer_kinds(self) -> list[int]:
        """Return a number for each layer, MTP layers included, that is equal for layers with equal work."""
        if ("kinds",) not in self.known:
            numbers: dict[object, int] = {}
            kinds = []
            for index in range(self.model.num_layers + self.model.mtp_layers):
                own = self.trained.shares[index], self.trained.adapters.get(index, ())
                key = self.model.get_layer_kind(index), self.model.get_attention_window(index), own
                kinds.append(numbers.setdefault(key, len(numbers)))
            self.known["kinds",] = kinds
        found: list[int] = self.known["kinds",]
        return found

    def predict_stage_seconds(self) -> list[PassWork]:
        """Return the seconds by kind of work that one micro-batch takes in each pipeline stage."""
        model, cost_model, sum_layers = self.model, self.cost_model, self._make_layer_summer()
        works = [sum_layers(part) for part in self.stage_layers]
        mtp = range(model.num_layers, model.num_layers + model.mtp_layers)
        works[0] = sum_pass_work([works[0], cost_model.predict_embedding_seconds()])
        works[-1] = sum_pass_work(
            [works[-1], sum_layers(mtp), multiply_pass_work(cost_model.predict_head_seconds(), 1 + len(mtp))]
        )
        offloaded = [min(len(part), self.run.offload) for part in self.stage_layers]
        return [
            sum_pass_work([work, cost_model.compute_offload_wait(layers, work)])
            for work, layers in zip(works, offloaded, strict=True)
        ]

    def list_rank_stages(self) -> list[list[int]]:
        """Return the stage numbers of each pipeline rank."""
        owners = place_pipeline_stages(self.run.schedule, self.run.pp, self.run.virtual_stages)
        return [[stage for stage, owner in enumerate(owners) if owner == rank] for rank in range(self.run.pp)]

    def predict_step_time(self) -> PredictedStepTime:
        """Predict the time of a step by simulating its pipeline schedule."""
        works = self.predict_stage_seconds()
        return self._make_step_time(works, self._simulate_makespan(works))

    def predict_minimum_time(self) -> PredictedStepTime:
        """Predict the minimum time of a step without simulating the pipeline schedule, as if all stages were equal."""
        works = self.predict_stage_seconds()
        return self._make_step_time(works, self._minimum_makespan(sum_pass_work(works)))

    def predict_model_seconds(self) -> PassWork:
        """Return the seconds by kind of work that one micro-batch takes in all layers, embedding and head."""
        model, cost_model = self.model, self.cost_model
        layers = range(model.num_layers + model.mtp_layers)
        return sum_pass_work(
            [
                self._make_layer_summer()(layers),
                cost_model.predict_embedding_seconds(),
                multiply_pass_work(cost_model.predict_head_seconds(), 1 + model.mtp_layers),
            ]
        )

    def predict_part_seconds(self) -> list[float]:
        """Return the seconds that one micro-batch takes in the embedding, in each layer, and in head and MTP layers."""
        model, cost_model, kinds = self.model, self.cost_model, self._list_layer_kinds()
        seconds = {kind: _total_seconds(cost_model.predict_layer_seconds(kinds.index(kind))) for kind in {*kinds}}
        layers = [seconds[kind] for kind in kinds]
        last = (1 + model.mtp_layers) * _total_seconds(cost_model.predict_head_seconds())
        first = _total_seconds(cost_model.predict_embedding_seconds())
        return [first, *layers[: model.num_layers], last + sum(layers[model.num_layers :])]

    def compute_rank_imbalance(self, parts: Sequence[float]) -> float:
        """Return the work of the busiest pipeline rank / the mean, from the seconds of `predict_part_seconds`."""
        sums = [0.0, *accumulate(parts[1:-1])]
        stages = [sums[part.stop] - sums[part.start] if part else 0.0 for part in self.stage_layers]
        stages[0] += parts[0]
        stages[-1] += parts[-1]
        busiest = max(sum(stages[stage] for stage in mine) for mine in self.list_rank_stages())
        return busiest * self.run.pp / sum(parts)

    def estimate_minimum_seconds(self, work: PassWork | None = None, imbalance: float = 1.0) -> float:
        """Estimate the minimum seconds of a step as if all stages were equal but for the `imbalance` of ranks.
        The estimate is fast enough for a search over thousands of layouts; `work` is `predict_model_seconds`, if already
        computed for a layout with equal micro-batches.
        """
        work = work or self.predict_model_seconds()
        once = self._per_step_seconds(0, multiply_pass_work(work, 1 / self.run.pp))
        return self._minimum_makespan(work, imbalance) + sum(once.values())

    def _make_step_time(self, works: Sequence[PassWork], makespan: float) -> PredictedStepTime:
        """Return the step time and its parts for a makespan."""
        run = self.run
        mine = [sum_pass_work([works[stage] for stage in stages]) for stages in self.list_rank_stages()]
        totals = [sum(cost.total for cost in work.values()) for work in mine]
        slowest = totals.index(max(totals))
        parts = {kind: cost.total * run.microbatches for kind, cost in mine[slowest].items()}
        hidden = self._hidden_exchange_seconds(works, slowest)
        parts |= {"expert": parts["expert"] - hidden} if hidden else {}
        waiting = max(0.0, makespan - totals[slowest] * run.microbatches + hidden) if run.pp > 1 else 0.0
        parts |= {"pipeline bubble": waiting, **self._per_step_seconds(slowest, mine[slowest])}
        found = {kind: seconds for kind, seconds in parts.items() if seconds}
        return PredictedStepTime(sum(parts.values()), found, hidden)

    def _hidden_exchange_seconds(self, works: Sequence[PassWork], rank: int) -> float:
        """Return the seconds of a step's expert exchange on a pipeline rank that other micro-batches hide."""
        run = self.run
        if not run.overlap_expert_exchange:
            return 0.0
        schedule = make_planning_schedule(
            run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages, pairs_passes=True
        )
        costs = self.make_stage_costs(works)
        hidden = [costs.hidden_seconds(*pair) for pair in pairwise(schedule.orders[rank]) if pair[0] in schedule.pairs]
        further = (run.microbatches - schedule.microbatches) * run.virtual_stages  # each with such a pair
        return sum(hidden) * (1 + further / len(hidden)) if hidden else 0.0

    def _minimum_makespan(self, work: PassWork, imbalance: float = 1.0) -> float:
        """Return the minimum makespan of all micro-batches if the ranks share the `work` of each evenly, or the busiest has
        `imbalance` times the mean.
        """
        run = self.run
        through = sum(cost.forward + cost.inputs for cost in work.values())  # lower bound: latency of one micro-batch
        total = sum(cost.total for cost in work.values())
        if (
            run.overlap_expert_exchange and "expert" in work
        ):  # at best in pairs of a forward and a backward, of any layers
            total -= StageCosts(
                passes=(PassSeconds(*(sum(costs) for costs in zip(*work.values(), strict=True))),),
                exchanges=(work["expert"],), hiding=(1.0,), contention=self.cost_model.rates.contention,
            ).hidden_seconds(PipelineOp("F", 0, 0), PipelineOp("B", 0, 0))  # fmt: skip
        full = run.microbatches >= 1.5 * run.pp  # in a full pipeline, the bubble of a V is half as long
        share = {"zb-h1": 1 / 3, **dict.fromkeys(V_SHAPED, 1 / 6 if full else 1 / 3)}.get(
            run.schedule, 1 / run.virtual_stages
        )
        # the busiest rank works all the time but waits for a part of one micro-batch of the others
        return max(through, (run.microbatches * imbalance + (run.pp - imbalance) * share) * total / run.pp)

    def make_stage_costs(self, works: Sequence[PassWork]) -> StageCosts:
        """Return the costs of the pipeline operations of each stage.
        They come from `works`, the seconds by kind of work of each stage for one micro-batch.
        """
        passes = tuple(
            PassSeconds(*(sum(costs) for costs in zip(*work.values(), strict=True))) if work else PassSeconds()
            for work in works
        )
        stride = self.run.tp * self.run.cp * self.run.dp
        message = self.cost_model.interconnect.send_seconds(self.message_bytes, stride) if self.run.pp > 1 else 0.0
        exchanges = tuple(work.get("expert", PassSeconds()) for work in works)
        mtp = range(self.model.num_layers, self.model.num_layers + self.model.mtp_layers)
        layers = [*self.stage_layers[:-1], [*self.stage_layers[-1], *mtp]]
        experts = [sum(map(self.model.is_moe_layer, part)) for part in layers]
        hiding = tuple(2 * count / (2 * count + 1) for count in experts)
        return StageCosts(
            message=message,
            passes=passes,
            exchanges=exchanges,
            hiding=hiding,
            contention=self.cost_model.rates.contention,
        )

    @property
    def message_bytes(self) -> float:
        """Bytes of a micro-batch's hidden states on a rank, which a pipeline stage sends to the next one."""
        share = self.run.tp if self.run.sp else 1
        return (
            self.cost_model.micro_batch_tokens * self.model.stream_width * self.cost_model.bytes_per_activation / share
        )

    def _simulate_makespan(self, works: Sequence[PassWork]) -> float:
        """Return the makespan of all micro-batches, from a simulation of enough micro-batches to fill the pipeline."""
        run, costs = self.run, self.make_stage_costs(works)
        if run.pp == 1 and not run.overlap_expert_exchange:
            return run.microbatches * sum(cost.total for cost in costs.passes)
        return estimate_pipeline_makespan(
            run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages,
            pairs_passes=run.overlap_expert_exchange, costs=costs,
        )  # fmt: skip

    def _per_step_seconds(self, rank: int, work: PassWork) -> dict[str, float]:
        """Return the seconds of work outside the schedule on a pipeline rank: data-parallel communication and the
        optimizer.
        """
        run, cost_model = self.run, self.cost_model
        backward = sum(cost.inputs + cost.weights for cost in work.values())
        forward = sum(cost.forward for cost in work.values())
        exposed, gpu_bytes, host_bytes = 0.0, 0.0, 0.0
        all_trained = self._held_parameters(rank, self.trained.count)
        for (held, ranks, stride), (trained, *_) in zip(
            self._held_parameters(rank, self.count), all_trained, strict=True
        ):
            group = cost_model.interconnect.make_rank_group(ranks, stride)
            share = trained / ranks if run.zero else trained
            gpu_bytes += 0 if run.offload_optimizer else UPDATE_BYTES * share
            host_bytes += HOST_BYTES * share if run.offload_optimizer else 0
            if ranks == 1 or not (trained or run.zero == 3):
                continue
            if run.zero == 3:
                exposed += self._zero3_seconds(held, trained, stride, forward, backward)
                gathers = 1 if run.zero3_gather == "step" else 2 * run.microbatches
                copied = (GATHER_BYTES * gathers + REDUCE_BYTES * run.microbatches) * held
                gpu_bytes += copied if cost_model.profile.copies_shards else 0.0
                continue
            profile, own = cost_model.profile, ZeroConfig(shard_grads=True).min_bucket_elements(ranks)
            bucket = profile.bucket_bytes / profile.gradient_bytes if profile.bucket_bytes else own
            buckets = math.ceil(trained / bucket)
            interconnect, gradients = cost_model.interconnect, profile.gradient_bytes * trained
            weights = cost_model.bytes_per_activation * trained
            if not run.zero:
                reduce = interconnect.all_reduce_seconds(gradients, group, buckets)
                exposed += cost_model.rates.exposed_seconds(reduce, backward)
            elif not profile.overlaps_reduction:  # all weights are gathered by one call
                exposed += interconnect.all_reduce_seconds(gradients, group, buckets)
                exposed += interconnect.all_gather_seconds(weights, group)
            else:
                times = run.microbatches if run.zero == 2 else 1
                reduce = interconnect.all_gather_seconds(gradients, group, buckets)
                gather = interconnect.all_gather_seconds(weights, group, buckets)
                exposed += times * cost_model.rates.exposed_seconds(reduce, backward)
                exposed += cost_model.rates.exposed_seconds(gather, forward)
        seconds = gpu_bytes / cost_model.rates.memory + host_bytes / cost_model.interconnect.host + HOST_WAIT
        return {"data": exposed, "optimizer": seconds}

    def _zero3_seconds(self, held: float, trained: float, stride: int, forward: float, backward: float) -> float:
        """Return the exposed seconds of ZeRO-3's all-gathers and reduce-scatters for one step."""
        run, cost_model = self.run, self.cost_model
        group = cost_model.interconnect.make_rank_group(run.zero3_shard_ranks, stride)
        units = max(1.0, self.model.num_layers / run.pp / self.unit)
        interconnect, gradients = cost_model.interconnect, cost_model.profile.gradient_bytes * trained
        weights = interconnect.all_gather_seconds(cost_model.bytes_per_activation * held, group, units)
        reduce = interconnect.all_gather_seconds(gradients, group, units)
        exposed_seconds = cost_model.rates.exposed_seconds
        gather = exposed_seconds(weights, forward)
        if run.zero3_gather == "step":
            return gather + run.microbatches * exposed_seconds(reduce, backward)
        return run.microbatches * (gather + exposed_seconds(weights + reduce, backward))

    def _held_parameters(self, rank: int, count: ParameterCounts) -> list[tuple[float, int, int]]:
        """Return (parameters, data ranks, rank stride) of the dense weights and of the experts on a pipeline rank."""
        run, block = self.run, self.run.ep * self.run.expert_tp
        split, whole, experts = self._sum_held_parameters(rank, count)
        found = [(split / run.tp + whole, run.dp * run.cp, run.tp)]
        mixed = self.count.routed_experts > 0
        return [*found, (experts / block, max(1, run.dp * run.cp * run.tp // block), block)] if mixed else found

    def _sum_held_parameters(self, rank: int, count: ParameterCounts) -> tuple[int, int, int]:
        """Return the parameters of a pipeline rank that tensor ranks split, that they hold whole, and of all its experts."""
        run = self.run
        key = rank, count is self.count, run.schedule, run.pp, run.virtual_stages, run.pipeline_layout
        if key not in self.known:
            stages = self.list_rank_stages()[rank]
            layers = [count.layers[index] for stage in stages for index in self.stage_layers[stage]]
            ends = count.embedding if 0 in stages else 0
            if len(self.stage_layers) - 1 in stages:
                layers += count.layers[self.model.num_layers :]
                ends += max(count.head, 0 if 0 in stages else count.embedding)
            split, whole, experts = (
                sum(getattr(each, name) for each in layers) for name in ("split", "whole", "experts")
            )
            self.known[key] = split + ends, whole, experts
        found: tuple[int, int, int] = self.known[key]
        return found


def _total_seconds(work: PassWork) -> float:
    """Return the seconds of all kinds of work."""
    return sum(cost.total for cost in work.values())


def predict_step_time(
    model: ModelConfig,
    run: TrainingLayout,
    machine: MachineSpec,
    efficiency: MachineEfficiency,
    profile: TrainerProfile | None = None,
) -> PredictedStepTime:
    """Predict the time of a training step of `model`, split as in `run`, on `machine`.

    Raises:
        ConfigError: when the layers do not fit the stages, or the machine has no rate for the precision.
    """
    return PlannedRun.from_settings(model, run, machine, efficiency, profile or TrainerProfile()).predict_step_time()
