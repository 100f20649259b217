"""Predicted duration of a training step on a machine, by parts.

The work of each stage (`work`) goes through the run's own schedule, operation by operation; then come what a step does
once, sums over data ranks where the last backward does not hide them, and the update. Not counted: checkpoints, evaluations,
uneven experts, and ranks that are slower than others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.parallel.zero_buffers import ZeroConfig
from mega_trainer.pipeline.schedules import PipelineOp, PipelineOpCosts, place_stages
from mega_trainer.plan.flops import ParameterCounts, count_parameters_by_layer
from mega_trainer.plan.layer_cost import (
    GpuThroughput,
    LayerCostModel,
    PassSeconds,
    PassWork,
    TrainerProfile,
    combine_work,
    repeat_work,
)
from mega_trainer.plan.machine import Interconnect, MachineEfficiency, MachineSpec
from mega_trainer.plan.memory_prediction import split_layers_into_stages, zero3_unit_layers
from mega_trainer.plan.pipeline_fill import estimate_makespan
from mega_trainer.plan.run_shape import RunShape
from mega_trainer.plan.trainable_parameters import TrainableParameters

UPDATE_BYTES = 51  # of AdamW and the norm, for each parameter of a rank's share: benchmarks/results/traffic.json
HOST_BYTES = 28  # the same in host memory, which is about as fast as the way there: main weight, moments and gradient
GATHERED_BYTES = 14  # copied for each parameter that ZeRO-3 gathers and whose gradient it scatters, each micro-batch
HOST_WAIT = 1e-3  # of a step, for the numbers that the host waits for


@dataclass(frozen=True)
class PredictedStepTime:
    """Seconds of a step, and of its parts on the slowest pipeline rank; they add up."""

    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class StageCosts(PipelineOpCosts):
    """Seconds of the operations of each stage."""

    passes: tuple[PassSeconds, ...] = ()

    def op_duration(self, op: PipelineOp) -> float:
        """Return the seconds of one operation."""
        cost = self.passes[op.stage]
        return {"F": cost.forward, "B": cost.inputs + cost.weights, "I": cost.inputs, "W": cost.weights}[op.kind]


@dataclass(frozen=True)
class PlannedRun:
    """Run on a machine, for prediction of its step time.

    Attributes:
        model: what is trained.
        run: how it is split and fed.
        bench: what work takes there.
        count: the model's parameters.
        trained: those of them that are trained, and adapters.
        unit: layers that ZeRO-3 gathers at once.
    """

    model: ModelConfig
    run: RunShape
    bench: LayerCostModel
    count: ParameterCounts
    trained: TrainableParameters
    unit: int

    @classmethod
    def from_settings(
        cls,
        model: ModelConfig,
        run: RunShape,
        machine: MachineSpec,
        efficiency: MachineEfficiency,
        habits: TrainerProfile,
        count: ParameterCounts | None = None,
    ) -> PlannedRun:
        """Return the planned run for a model, run shape, machine and trainer profile; `count` is the model's
        parameters, if known.

        Raises:
            ConfigError: for a model with an encoder.
        """
        if model.has_encoder:
            raise ConfigError("the time of a step is not predicted for models with encoders", hint="leave out machine")
        wires, rates = (
            Interconnect.from_machine(machine, efficiency),
            GpuThroughput.from_machine(machine, efficiency, habits),
        )
        unit = zero3_unit_layers(model, run) if run.zero == 3 else 1
        count = count or count_parameters_by_layer(model)
        trained = TrainableParameters.from_run_shape(model, run, count)
        return cls(model, run, LayerCostModel(model, run, wires, rates, habits, trained), count, trained, unit)

    @cached_property
    def stage_layers(self) -> list[range]:
        """Layers of each stage.

        Raises:
            ConfigError: when the layers do not fit the stages.
        """
        return split_layers_into_stages(self.model, self.run)

    def _make_layer_summer(self) -> Callable[[range], PassWork]:
        """Return a function that sums the work of some layers; layers of one kind are computed once."""
        model, trained, kinds = self.model, self.trained, dict[object, PassWork]()

        def sum_layer_work(indices: range) -> PassWork:
            alike: dict[object, list[int]] = {}
            for index in indices:
                own = trained.shares[index], trained.adapters.get(index, ())
                alike.setdefault((model.get_layer_kind(index), model.get_attention_window(index), own), []).append(
                    index
                )
            for kind, (first, *_) in alike.items():
                if kind not in kinds:
                    kinds[kind] = self.bench.compute_layer_work(first)
            return combine_work([repeat_work(kinds[kind], len(some)) for kind, some in alike.items()])

        return sum_layer_work

    def compute_stage_work(self) -> list[PassWork]:
        """Return the work of a micro-batch in each stage."""
        model, bench, several = self.model, self.bench, self._make_layer_summer()
        works = [several(part) for part in self.stage_layers]
        behind = range(model.num_layers, model.num_layers + model.mtp_layers)
        works[0] = combine_work([works[0], bench.compute_embedding_work()])
        works[-1] = combine_work([works[-1], several(behind), repeat_work(bench.compute_head_work(), 1 + len(behind))])
        away = [min(len(part), self.run.offload) for part in self.stage_layers]
        return [
            combine_work([work, bench.compute_offload_wait(layers, work)])
            for work, layers in zip(works, away, strict=True)
        ]

    def list_rank_stages(self) -> list[list[int]]:
        """Return the stages of each pipeline rank."""
        owners = place_stages(self.run.schedule, self.run.pp, self.run.virtual_stages)
        return [[stage for stage, owner in enumerate(owners) if owner == rank] for rank in range(self.run.pp)]

    def predict_step_time(self) -> PredictedStepTime:
        """Predict the time of a step by simulating its schedule."""
        works = self.compute_stage_work()
        return self._make_step_time(works, self._simulate_makespan(works))

    def predict_minimum_time(self) -> PredictedStepTime:
        """Predict the minimum time of a step without a simulation, as for a pipeline of equal stages."""
        works = self.compute_stage_work()
        return self._make_step_time(works, self._minimum_makespan(combine_work(works)))

    def estimate_minimum_seconds(self) -> float:
        """Estimate the minimum seconds of a step for equal stages and equal ranks, fast enough for a search over
        thousands of layouts.
        """
        model, bench, run = self.model, self.bench, self.run
        layers = range(model.num_layers + model.mtp_layers)
        work = combine_work(
            [
                self._make_layer_summer()(layers),
                bench.compute_embedding_work(),
                repeat_work(bench.compute_head_work(), 1 + model.mtp_layers),
            ]
        )
        once = self._per_step_seconds(0, repeat_work(work, 1 / run.pp))
        return self._minimum_makespan(work) + sum(once.values())

    def _make_step_time(self, works: Sequence[PassWork], makespan: float) -> PredictedStepTime:
        """Return the step time and its parts for a makespan."""
        run = self.run
        mine = [combine_work([works[stage] for stage in stages]) for stages in self.list_rank_stages()]
        totals = [sum(cost.total for cost in work.values()) for work in mine]
        slowest = totals.index(max(totals))
        parts = {kind: cost.total * run.microbatches for kind, cost in mine[slowest].items()}
        waiting = max(0.0, makespan - totals[slowest] * run.microbatches) if run.pp > 1 else 0.0
        parts |= {"pipeline bubble": waiting, **self._per_step_seconds(slowest, mine[slowest])}
        return PredictedStepTime(sum(parts.values()), {kind: seconds for kind, seconds in parts.items() if seconds})

    def _minimum_makespan(self, work: PassWork) -> float:
        """Return the minimum makespan of all micro-batches if the ranks share the `work` of each evenly."""
        run = self.run
        through = sum(cost.forward + cost.inputs for cost in work.values())  # no micro-batch ends sooner
        total = sum(cost.total for cost in work.values())
        full = run.microbatches >= 1.5 * run.pp  # of a pipeline that is: ZBV's ends wait half as long
        share = {"zb-h1": 1 / 3, "zbv": 1 / 6 if full else 1 / 3}.get(run.schedule, 1 / run.virtual_stages)
        return max(through, (run.microbatches + (run.pp - 1) * share) * total / run.pp)

    def make_stage_costs(self, works: Sequence[PassWork]) -> StageCosts:
        """Return the costs of a schedule's operations, whose stages do these `works` for each micro-batch."""
        passes = tuple(
            PassSeconds(*(sum(costs) for costs in zip(*work.values(), strict=True))) if work else PassSeconds()
            for work in works
        )
        stride = self.run.tp * self.run.cp * self.run.dp
        message = self.bench.wires.send_seconds(self.message_bytes, stride) if self.run.pp > 1 else 0.0
        return StageCosts(message=message, passes=passes)

    @property
    def message_bytes(self) -> float:
        """Bytes of a micro-batch's hidden states on a rank, which a stage sends to the next one."""
        share = self.run.tp if self.run.sp else 1
        return self.bench.micro_batch_tokens * self.model.hidden_size * self.bench.activation_bytes / share

    def _simulate_makespan(self, works: Sequence[PassWork]) -> float:
        """Return the makespan of all micro-batches; of many, only enough to fill the pipeline are simulated."""
        run, costs = self.run, self.make_stage_costs(works)
        if run.pp == 1:
            return run.microbatches * sum(cost.total for cost in costs.passes)
        return estimate_makespan(
            run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages, costs=costs
        )

    def _per_step_seconds(self, rank: int, work: PassWork) -> dict[str, float]:
        """Return the seconds of work outside the schedule on a pipeline rank: data-parallel communication and the
        optimizer.
        """
        run, bench = self.run, self.bench
        backward = sum(cost.inputs + cost.weights for cost in work.values())
        forward = sum(cost.forward for cost in work.values())
        talk, moved, away = 0.0, 0.0, 0.0
        moving = self._held_parameters(rank, self.trained.count)
        for (held, ranks, stride), (trains, *_) in zip(self._held_parameters(rank, self.count), moving, strict=True):
            group = bench.wires.make_rank_group(ranks, stride)
            share = trains / ranks if run.zero else trains
            moved += 0 if run.offload_optimizer else UPDATE_BYTES * share
            away += HOST_BYTES * share if run.offload_optimizer else 0
            if ranks == 1 or not (trains or run.zero == 3):
                continue
            if run.zero == 3:
                talk += run.microbatches * self._zero3_seconds(held, trains, stride, forward, backward)
                moved += GATHERED_BYTES * held * run.microbatches
                continue
            buckets = math.ceil(trains / ZeroConfig(shard_grads=True).min_bucket_elements(ranks))
            latency = bench.wires.hop * ranks * (buckets - 1)
            sums = bench.wires.all_gather_seconds(bench.habits.gradient_bytes * trains, group) + latency
            often = run.microbatches if run.zero == 2 else 1
            talk += often * bench.rates.exposed_seconds(sums if run.zero else 2 * sums, backward)
            if run.zero:
                talk += bench.rates.exposed_seconds(
                    bench.wires.all_gather_seconds(bench.activation_bytes * trains, group) + latency, forward
                )
        return {"data": talk, "optimizer": moved / bench.rates.memory + away / bench.wires.host + HOST_WAIT}

    def _zero3_seconds(self, held: float, trains: float, stride: int, forward: float, backward: float) -> float:
        """Return the exposed seconds of ZeRO-3's all-gathers and reduce-scatters for one micro-batch."""
        run, bench = self.run, self.bench
        group = bench.wires.make_rank_group(run.zero3_shard_ranks, stride)
        units = self.model.num_layers / self.unit
        latency = bench.wires.hop * run.zero3_shard_ranks * max(0.0, units - 1)
        weights = bench.wires.all_gather_seconds(bench.activation_bytes * held, group) + latency
        sums = bench.wires.all_gather_seconds(bench.habits.gradient_bytes * trains, group) + latency
        return bench.rates.exposed_seconds(weights, forward) + bench.rates.exposed_seconds(weights + sums, backward)

    def _held_parameters(self, rank: int, count: ParameterCounts) -> list[tuple[float, int, int]]:
        """Return (parameters, ranks that share them, rank stride) of dense weights and of experts on a pipeline rank."""
        run = self.run
        stages = self.list_rank_stages()[rank]
        layers = [count.layers[index] for stage in stages for index in self.stage_layers[stage]]
        ends = count.embedding / run.tp if 0 in stages else 0.0
        if len(self.stage_layers) - 1 in stages:
            layers += count.layers[self.model.num_layers :]
            ends += max(count.head, 0 if 0 in stages else count.embedding) / run.tp
        block = run.ep * run.expert_tp
        dense = sum(layer.split / run.tp + layer.whole for layer in layers) + ends
        experts = sum(layer.experts for layer in layers) / block
        found = [(dense, run.dp * run.cp, run.tp)]
        mixed = self.count.routed_experts > 0
        return [*found, (experts, max(1, run.dp * run.cp * run.tp // block), block)] if mixed else found


def predict_step_time(
    model: ModelConfig,
    run: RunShape,
    machine: MachineSpec,
    efficiency: MachineEfficiency,
    habits: TrainerProfile | None = None,
) -> PredictedStepTime:
    """Predict the time of a training step of `model`, split as in `run`, on `machine`.

    Raises:
        ConfigError: when the layers do not fit the stages, or the machine has no rate for the precision.
    """
    return PlannedRun.from_settings(model, run, machine, efficiency, habits or TrainerProfile()).predict_step_time()
