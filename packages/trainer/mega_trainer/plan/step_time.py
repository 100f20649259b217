"""How long a training step takes on a machine, and where the time goes: told before any device is touched.

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
from mega_trainer.parallel.grads import Sharing
from mega_trainer.pipeline.schedules import Costs, Op, placement
from mega_trainer.plan.collectives import Wires
from mega_trainer.plan.flops import Parameters, count_parameters
from mega_trainer.plan.machine import Efficiency, Machine
from mega_trainer.plan.memory import layers_of_stages, unit_layers
from mega_trainer.plan.pipeline_fill import estimate_makespan
from mega_trainer.plan.shape import RunShape
from mega_trainer.plan.trained import Trained
from mega_trainer.plan.work import Bench, Habits, Pass, Rates, Work, added, times

UPDATE_BYTES = 51  # of AdamW and the norm, for each parameter of a rank's share: benchmarks/results/traffic.json
HOST_BYTES = 28  # the same in host memory, which is about as fast as the way there: main weight, moments and gradient
GATHERED_BYTES = 14  # copied for each parameter that ZeRO-3 gathers and whose gradient it scatters, each micro-batch
HOST_WAIT = 1e-3  # of a step, for the numbers that the host waits for


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and of its parts on the pipeline rank that works most; they add up."""

    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class StageCosts(Costs):
    """Seconds of the operations of each stage."""

    passes: tuple[Pass, ...] = ()

    def of(self, op: Op) -> float:
        """Of one operation."""
        cost = self.passes[op.stage]
        return {"F": cost.forward, "B": cost.inputs + cost.weights, "I": cost.inputs, "W": cost.weights}[op.kind]


@dataclass(frozen=True)
class Planned:
    """A run on a machine.

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
    bench: Bench
    count: Parameters
    trained: Trained
    unit: int

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        run: RunShape,
        machine: Machine,
        efficiency: Efficiency,
        habits: Habits,
        count: Parameters | None = None,
    ) -> Planned:
        """That run on that machine, by a trainer of those habits; `count` of the model, where it is known.

        Raises:
            ConfigError: for a model with an encoder.
        """
        if model.has_encoder:
            raise ConfigError("the time of a step is not predicted for models with encoders", hint="leave out machine")
        wires, rates = Wires.of(machine, efficiency), Rates.of(machine, efficiency, habits)
        unit = unit_layers(model, run) if run.zero == 3 else 1
        count = count or count_parameters(model)
        trained = Trained.of(model, run, count)
        return cls(model, run, Bench(model, run, wires, rates, habits, trained), count, trained, unit)

    @cached_property
    def layers(self) -> list[range]:
        """Those of each stage.

        Raises:
            ConfigError: when the layers do not fit the stages.
        """
        return layers_of_stages(self.model, self.run)

    def _layers(self) -> Callable[[range], Work]:
        """What some layers cost; layers of a kind are looked at once."""
        model, trained, kinds = self.model, self.trained, dict[object, Work]()

        def several(indices: range) -> Work:
            alike: dict[object, list[int]] = {}
            for index in indices:
                own = trained.shares[index], trained.adapters.get(index, ())
                alike.setdefault((model.kind(index), model.window(index), own), []).append(index)
            for kind, (first, *_) in alike.items():
                if kind not in kinds:
                    kinds[kind] = self.bench.layer(first)
            return added([times(kinds[kind], len(some)) for kind, some in alike.items()])

        return several

    def stages(self) -> list[Work]:
        """What a micro-batch costs each stage."""
        model, bench, several = self.model, self.bench, self._layers()
        works = [several(part) for part in self.layers]
        behind = range(model.num_layers, model.num_layers + model.mtp_layers)
        works[0] = added([works[0], bench.embedding()])
        works[-1] = added([works[-1], several(behind), times(bench.head(), 1 + len(behind))])
        away = [min(len(part), self.run.offload) for part in self.layers]
        return [added([work, bench.offloaded(layers, work)]) for work, layers in zip(works, away, strict=True)]

    def ranks(self) -> list[list[int]]:
        """The stages of each pipeline rank."""
        owners = placement(self.run.schedule, self.run.pp, self.run.virtual_stages)
        return [[stage for stage, owner in enumerate(owners) if owner == rank] for rank in range(self.run.pp)]

    def time(self) -> StepTime:
        """Of a step."""
        works = self.stages()
        return self._told(works, self._makespan(works))

    def time_at_least(self) -> StepTime:
        """Of a step, without a simulation: as a pipeline waits whose stages are alike."""
        works = self.stages()
        return self._told(works, self._shortest(added(works)))

    def least_seconds(self) -> float:
        """As `time_at_least`, of ranks that are alike too: all that a search wants to know of thousands of layouts."""
        model, bench, run = self.model, self.bench, self.run
        layers = range(model.num_layers + model.mtp_layers)
        work = added([self._layers()(layers), bench.embedding(), times(bench.head(), 1 + model.mtp_layers)])
        once = self._once(0, times(work, 1 / run.pp))
        return self._shortest(work) + sum(once.values())

    def _told(self, works: Sequence[Work], makespan: float) -> StepTime:
        run = self.run
        mine = [added([works[stage] for stage in stages]) for stages in self.ranks()]
        totals = [sum(cost.total for cost in work.values()) for work in mine]
        slowest = totals.index(max(totals))
        parts = {kind: cost.total * run.microbatches for kind, cost in mine[slowest].items()}
        waiting = max(0.0, makespan - totals[slowest] * run.microbatches) if run.pp > 1 else 0.0
        parts |= {"pipeline bubble": waiting, **self._once(slowest, mine[slowest])}
        return StepTime(sum(parts.values()), {kind: seconds for kind, seconds in parts.items() if seconds})

    def _shortest(self, work: Work) -> float:
        """Of all micro-batches, where the ranks share `work`, that of one, evenly."""
        run = self.run
        through = sum(cost.forward + cost.inputs for cost in work.values())  # no micro-batch ends sooner
        total = sum(cost.total for cost in work.values())
        full = run.microbatches >= 1.5 * run.pp  # of a pipeline that is: ZBV's ends wait half as long
        share = {"zb-h1": 1 / 3, "zbv": 1 / 6 if full else 1 / 3}.get(run.schedule, 1 / run.virtual_stages)
        return max(through, (run.microbatches + (run.pp - 1) * share) * total / run.pp)

    def costs(self, works: Sequence[Work]) -> StageCosts:
        """Of the operations of a schedule, whose stages do these `works` with each micro-batch."""
        passes = tuple(
            Pass(*(sum(costs) for costs in zip(*work.values(), strict=True))) if work else Pass() for work in works
        )
        stride = self.run.tp * self.run.cp * self.run.dp
        message = self.bench.wires.send(self.message_bytes, stride) if self.run.pp > 1 else 0.0
        return StageCosts(message=message, passes=passes)

    @property
    def message_bytes(self) -> float:
        """Of a micro-batch's residual stream on a rank, which a stage sends to the next one."""
        share = self.run.tp if self.run.sp else 1
        return self.bench.tokens * self.model.hidden_size * self.bench.element / share

    def _makespan(self, works: Sequence[Work]) -> float:
        """Of all micro-batches. A pipeline that is full goes on as it is, so that of many only some are simulated."""
        run, costs = self.run, self.costs(works)
        if run.pp == 1:
            return run.microbatches * sum(cost.total for cost in costs.passes)
        return estimate_makespan(
            run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages, costs=costs
        )

    def _once(self, rank: int, work: Work) -> dict[str, float]:
        """What a step does once, or ZeRO with each micro-batch, on a pipeline rank."""
        run, bench = self.run, self.bench
        backward = sum(cost.inputs + cost.weights for cost in work.values())
        forward = sum(cost.forward for cost in work.values())
        talk, moved, away = 0.0, 0.0, 0.0
        moving = self._held(rank, self.trained.count)
        for (held, ranks, stride), (trains, *_) in zip(self._held(rank, self.count), moving, strict=True):
            group = bench.wires.ranks(ranks, stride)
            share = trains / ranks if run.zero else trains
            moved += 0 if run.offload_optimizer else UPDATE_BYTES * share
            away += HOST_BYTES * share if run.offload_optimizer else 0
            if ranks == 1 or not (trains or run.zero == 3):
                continue
            if run.zero == 3:
                talk += run.microbatches * self._gathered(held, trains, stride, forward, backward)
                moved += GATHERED_BYTES * held * run.microbatches
                continue
            buckets = math.ceil(trains / Sharing(slices=True).enough(ranks))
            latency = bench.wires.hop * ranks * (buckets - 1)
            sums = bench.wires.gather(bench.habits.gradient_bytes * trains, group) + latency
            often = run.microbatches if run.zero == 2 else 1
            talk += often * bench.rates.hidden(sums if run.zero else 2 * sums, backward)
            if run.zero:
                talk += bench.rates.hidden(bench.wires.gather(bench.element * trains, group) + latency, forward)
        return {"data": talk, "optimizer": moved / bench.rates.memory + away / bench.wires.host + HOST_WAIT}

    def _gathered(self, held: float, trains: float, stride: int, forward: float, backward: float) -> float:
        """ZeRO-3's gathers before forward and backward, and its sums of what trains, of one micro-batch."""
        run, bench = self.run, self.bench
        group = bench.wires.ranks(run.sharers, stride)
        units = self.model.num_layers / self.unit
        latency = bench.wires.hop * run.sharers * max(0.0, units - 1)
        weights = bench.wires.gather(bench.element * held, group) + latency
        sums = bench.wires.gather(bench.habits.gradient_bytes * trains, group) + latency
        return bench.rates.hidden(weights, forward) + bench.rates.hidden(weights + sums, backward)

    def _held(self, rank: int, count: Parameters) -> list[tuple[float, int, int]]:
        """Parameters of those that a pipeline rank holds, data ranks that share them, and how far apart these are: dense, experts."""
        run = self.run
        stages = self.ranks()[rank]
        layers = [count.layers[index] for stage in stages for index in self.layers[stage]]
        ends = count.embedding / run.tp if 0 in stages else 0.0
        if len(self.layers) - 1 in stages:
            layers += count.layers[self.model.num_layers :]
            ends += max(count.head, 0 if 0 in stages else count.embedding) / run.tp
        block = run.ep * run.expert_tp
        dense = sum(layer.split / run.tp + layer.whole for layer in layers) + ends
        experts = sum(layer.experts for layer in layers) / block
        found = [(dense, run.dp * run.cp, run.tp)]
        mixed = self.count.experts > 0
        return [*found, (experts, max(1, run.dp * run.cp * run.tp // block), block)] if mixed else found


def step_time(
    model: ModelConfig, run: RunShape, machine: Machine, efficiency: Efficiency, habits: Habits | None = None
) -> StepTime:
    """Seconds of a training step of `model`, split and fed as `run` has it, on `machine`.

    Raises:
        ConfigError: when the layers do not fit the stages, or the machine has no rate for the precision.
    """
    return Planned.of(model, run, machine, efficiency, habits or Habits()).time()
