"""Pipeline schedules as data: for each rank, the list of operations it runs, in order. Pure Python, no torch.

The model is cut into `pp * virtual_stages` *stages* of consecutive layers; a rank owns `virtual_stages` of them, its
*chunks*. A microbatch goes forward through all stages and backward again. The same lists are executed
(`pipeline.executor`), timed (`simulate_pipeline_schedule`) and drawn (`pipeline.schedule_svg`).

How a list is made:

1. A rank's schedule is first a list of steps `(kind, chunk)`. Microbatches are numbered by counting: the n-th forward
   of a chunk is microbatch n, and the n-th backward too. So in every schedule each stage sums its gradients in the order
   of the microbatches, and all schedules give bitwise the same gradients.
2. `_simulate_times` simulates all ranks and returns when each operation ends, or reports a deadlock: which rank waits
   for which operation.
3. `_add_messages` merges the operations of all ranks into one sequence, sorted by end time, and walks it. A result that
   another rank needs is added to both lists at that point: a send in one, a receive in the other.

From 3 follows the matching rule: **the messages of all ranks are in one common order.** In the merged sequence every
operation comes after everything it needs, so no deadlock is possible, even if a send blocks until its receive is
reached, a receive blocks the rank, and all messages of a rank share one stream. Sorting by *end* rather than by start
puts a receive before the operation during which the message arrives: the transfer overlaps with that operation.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple

from mega_common.errors import ConfigError

V_SHAPED = frozenset({"zbv", "dualpipev"})  # schedules whose first and last stage are on one rank
SPLIT_BACKWARD = frozenset({"zb-h1", "zbv", "dualpipev"})  # schedules with `I` and `W` in place of `B`

PipelineOpKind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
# (kind, chunk); `F+` is a forward that forms a pair with the backward after it, if passes are paired
ScheduleStep = tuple[PipelineOpKind | Literal["F+"], int]


class PipelineOp(NamedTuple):
    """Forward, backward, half of a backward, or message of one stage and micro-batch, run by a pipeline rank.

    Attributes:
        kind: `F` forward; `B` whole backward; `I` and `W` its two halves, gradient of the input and of the weights;
            `SEND_F` sends the output of `stage` to the next stage, `RECV_F` receives the input of `stage` from the
            stage before; `SEND_B` sends the gradient of the input of `stage` to the stage before, `RECV_B` receives
            the gradient of the output of `stage` from the next stage.
        stage: the stage that computes, or whose input or output travels.
        microbatch: number of the microbatch within the step.
    """

    kind: PipelineOpKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} in stage {self.stage}"


@dataclass(frozen=True)
class PipelineSchedule:
    """Pipeline schedule: the operations of every pipeline rank in one training step, in order.

    Attributes:
        name: `gpipe`, `1f1b`, `zb-h1`, `zbv` or `dualpipev`.
        pp: number of pipeline ranks.
        virtual_stages: stages per rank.
        microbatches: microbatches per step.
        owners: the rank of each stage, in stage order.
        orders: the forwards and backwards of each rank, in the order in which it runs them.
        pairs: forwards that run together with the `B` or `I` after them, which is of another micro-batch.
        pairs_passes: the schedule has pairs if it has enough micro-batches.
    """

    name: str
    pp: int
    virtual_stages: int
    microbatches: int
    owners: tuple[int, ...]
    orders: tuple[tuple[PipelineOp, ...], ...]
    pairs: frozenset[PipelineOp] = frozenset()
    pairs_passes: bool = False

    @cached_property
    def ranks(self) -> tuple[tuple[PipelineOp, ...], ...]:
        """Operations of each pipeline rank in the order in which it runs them, with sends and receives."""
        return _add_messages(self.orders, self.owners, self.pairs)

    def stages_of_rank(self, rank: int) -> list[int]:
        """Return the numbers of the pipeline stages that `rank` has, in model order."""
        return [stage for stage, owner in enumerate(self.owners) if owner == rank]

    @property
    def splits_backward(self) -> bool:
        """True if each backward is split in two operations: gradient of the input (`I`) and of the weights (`W`)."""
        return self.name in SPLIT_BACKWARD

    def with_microbatches(self, microbatches: int) -> PipelineSchedule:
        """Return the pipeline schedule of this kind for another number of micro-batches."""
        return make_pipeline_schedule(
            self.name,
            pp=self.pp,
            microbatches=microbatches,
            virtual_stages=self.virtual_stages,
            pairs_passes=self.pairs_passes,
        )


def make_pipeline_schedule(
    name: str, *, pp: int, microbatches: int, virtual_stages: int = 1, pairs_passes: bool = False
) -> PipelineSchedule:
    """Return a pipeline schedule by name: `gpipe`, `1f1b`, `zb-h1`, `zbv` or `dualpipev`.
    It is for `pp` ranks with `virtual_stages` stages each and any number of micro-batches. With `pairs_passes`, forwards
    run together with backwards of other micro-batches (`1f1b` and `dualpipev`).

    Raises:
        ConfigError: for an unknown name, or virtual stages or pairs that the schedule does not support.
    """
    if name not in _SCHEDULES:
        near = difflib.get_close_matches(name, _SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_SCHEDULES)}"
        raise ConfigError(f"parallel.schedule = {name!r} is not a known schedule", hint=hint)
    steps_of, needed = _SCHEDULES[name]
    if needed not in (None, virtual_stages):
        raise ConfigError(
            f"parallel.virtual_stages = {virtual_stages} is not supported with parallel.schedule = {name}, which needs "
            f"{needed}",
            hint=f"set parallel.virtual_stages={needed}, or parallel.schedule=1f1b",
        )
    if pairs_passes and name not in PAIRED:
        raise ConfigError(
            f"parallel.overlap_expert_exchange is not supported with parallel.schedule = {name}",
            hint="set parallel.schedule=1f1b or dualpipev, or parallel.overlap_expert_exchange=false",
        )
    steps_of = PAIRED[name] if pairs_passes else steps_of
    owners = place_pipeline_stages(name, pp, virtual_stages)
    orders, pairs = [], set[PipelineOp]()
    for rank in range(pp):
        stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        steps = steps_of(rank, pp, virtual_stages, microbatches)
        orders.append(tuple(_number_microbatches(steps, stages, microbatches, pairs)))
    found = frozenset(pairs) if pairs_passes else frozenset[PipelineOp]()
    return PipelineSchedule(name, pp, virtual_stages, microbatches, owners, tuple(orders), found, pairs_passes)


def place_pipeline_stages(name: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage: round-robin, or down and up again for `zbv` and `dualpipev`."""
    if name in V_SHAPED:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(pp * virtual_stages))


def _number_microbatches(
    steps: Sequence[ScheduleStep], stages: Sequence[int], microbatches: int, pairs: set[PipelineOp]
) -> list[PipelineOp]:
    """Return operations from steps, numbering the micro-batches of each kind and chunk; add those in a pair to `pairs`.

    Steps may be those of more micro-batches, where a schedule needs a minimum for its shape; the surplus is left out,
    which is always legal: no operation needs one of another micro-batch.
    """
    counts: Counter[ScheduleStep] = Counter()
    order: list[PipelineOp] = []
    first: PipelineOp | None = None  # forward of a pair that waits for its backward
    for step, chunk in steps:
        kind: PipelineOpKind = "F" if step == "F+" else step
        microbatch = counts[kind, chunk]
        counts[kind, chunk] += 1
        if microbatch < microbatches:
            order.append(PipelineOp(kind, stages[chunk], microbatch))
            pairs.update([first] if first else [])
        first = order[-1] if step == "F+" and microbatch < microbatches else None
    return order


def _gpipe_steps(rank: int, pp: int, virtual_stages: int, microbatches: int) -> list[ScheduleStep]:
    """Return all forwards, then all backwards (arXiv:1811.06965).

    Holds the activations of every micro-batch.
    """
    forward: list[ScheduleStep] = [("F", chunk) for chunk in range(virtual_stages) for _ in range(microbatches)]
    backward: list[ScheduleStep] = [
        ("B", chunk) for chunk in reversed(range(virtual_stages)) for _ in range(microbatches)
    ]
    return forward + backward


def _one_f_one_b_steps(
    rank: int, pp: int, virtual_stages: int, microbatches: int, *, paired: bool = False
) -> list[ScheduleStep]:
    """Return one forward, one backward in turn, plain or interleaved (arXiv:2104.04473, sections 2.2.1 and 2.2.2).

    Interleaved, a rank takes a group of microbatches through one chunk, then through its next. Groups of `pp` keep all
    ranks busy. If `pp` does not divide the microbatches, groups are slightly larger: a group of fewer than `pp` makes
    ranks wait, and can deadlock.

    If a forward and a backward run as one pair, neither passes its result on before the end of both. Each rank then needs
    as many forwards ahead as if interleaved, and one more, so that the two are of different micro-batches.
    """
    groups = max(1, microbatches // pp)
    sizes = [microbatches // groups + (group < microbatches % groups) for group in range(groups)]
    chunks = range(virtual_stages)
    forward: list[ScheduleStep] = [("F", chunk) for size in sizes for chunk in chunks for _ in range(size)]
    backward: list[ScheduleStep] = [("B", chunk) for size in sizes for chunk in reversed(chunks) for _ in range(size)]
    ahead = (
        (pp - 1 - rank) * (1 if virtual_stages == 1 and not paired else 2) + (virtual_stages - 1) * sizes[0] + paired
    )
    warm = min(len(forward), ahead)
    both: list[ScheduleStep] = [("F+", chunk) for _, chunk in forward[warm:]]
    steady = [step for pair in zip(both, backward, strict=False) for step in pair]
    return forward[:warm] + steady + backward[len(forward) - warm :]


def _zb_h1_steps(rank: int, pp: int, virtual_stages: int, microbatches: int) -> list[ScheduleStep]:
    """Return 1F1B with a split backward; rank r delays r weight halves to fill the end (arXiv:2401.10241, H1).

    Every rank holds as many activations as the first rank of 1F1B.
    """
    count = max(microbatches, pp)
    ahead = pp - 1 - rank
    steps: list[ScheduleStep] = [("F", 0)] * ahead
    for done in range(count):
        steps += [("F", 0)] if done + ahead < count else []
        steps += [("I", 0), ("W", 0)] if done >= rank else [("I", 0)]
    return steps + [("W", 0)] * rank


def _zbv_steps(rank: int, pp: int, virtual_stages: int, microbatches: int) -> list[ScheduleStep]:
    """Return two chunks per rank in a V, with a split backward (arXiv:2401.10241, ZB-V); no rank idles inside the step.

    The first rank holds the first and the last stage, so a micro-batch's backward starts where its forward ended.
    """
    count = max(microbatches, 2 * pp - 1)
    f0, i0, w0, f1, i1, w1 = ((kind, chunk) for chunk in (0, 1) for kind in _SPLIT)
    down = pp - rank
    steps: list[ScheduleStep] = [f0] * (2 * down - 1) + [f1, f0] * rank + [f1, i1, w1] * down
    left = count - (2 * down - 1 + rank)
    for _ in range(count - pp):
        steps += [f0] if left > 0 else []
        steps += [i0, w0, f1, i1, w1]
        left -= 1
    steps += [i0, i1] * rank + [i0, w0] * down
    return steps + [w1] * (count - steps.count(w1)) + [w0] * (count - steps.count(w0))


def _dualpipev_steps(rank: int, pp: int, virtual_stages: int, microbatches: int) -> list[ScheduleStep]:
    """Return DualPipeV: two chunks per rank in a V, a forward of one next to a backward of the other (arXiv:2412.19437).

    The bubble is that of `zbv`, and a rank holds the activations of one more micro-batch in one chunk. For this, almost each
    forward has a backward of another micro-batch next to it, under whose computation its communication can be hidden.
    """
    count, after = max(microbatches, 2 * pp), pp - 1 - rank
    f0, i0, w0, f1, i1, w1 = ((kind, chunk) for chunk in (0, 1) for kind in _SPLIT)
    steps: list[ScheduleStep] = [f0] * (2 * after) + [f0, f1] * (rank + 1) + [i1, w1, f1] * after
    beside0: ScheduleStep = ("F+", 0)
    beside1: ScheduleStep = ("F+", 1)
    pairs = [beside0, i1, w1, beside1, i0, w0] * (count - 2 * pp + rank + 1)
    if after == 0:
        pairs[0] = f0  # the gradient of the turn of the V is not kept waiting
    steps += [*pairs, *[i1, w1, beside1, i0, w0] * after]
    # the weight halves of the last backwards wait, and fill the time in which this rank waits for gradients
    last = ([i1, i0] * (rank + 1), [w1, w0] * (rank + 1))
    steps += [step for both in zip(*(halves[: rank + 1] for halves in last), strict=True) for step in both]
    waiting = [*last[1][rank + 1 :], *[w0] * after]
    steps += last[0][rank + 1 :]
    for weights in waiting[:after]:
        steps += [weights, i0]
    return steps + waiting[after:]


_SPLIT: tuple[Literal["F+"] | PipelineOpKind, ...] = ("F", "I", "W")
_SCHEDULES: dict[str, tuple[Callable[[int, int, int, int], list[ScheduleStep]], int | None]] = {
    # name: (steps of a rank, the number of virtual stages it requires; None: any)
    "gpipe": (_gpipe_steps, None),
    "1f1b": (_one_f_one_b_steps, None),
    "zb-h1": (_zb_h1_steps, 1),
    "zbv": (_zbv_steps, 2),
    "dualpipev": (_dualpipev_steps, 2),
}
PAIRED: dict[str, Callable[[int, int, int, int], list[ScheduleStep]]] = {
    "1f1b": partial(_one_f_one_b_steps, paired=True),
    "dualpipev": _dualpipev_steps,
}


@dataclass(frozen=True)
class PipelineOpCosts:
    """Time of each kind of operation of one stage, in any unit. A whole backward `B` takes `input_grad + weight_grad`.

    Attributes:
        forward: time of `F`.
        input_grad: time of `I`.
        weight_grad: time of `W`.
        message: time from the end of an operation to the moment another rank can use its result.
        stages: factor for each stage; empty: all 1.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    message: float = 0.0
    stages: tuple[float, ...] = ()

    def op_duration(self, op: PipelineOp) -> float:
        """Return the time of a forward or backward operation in its stage."""
        seconds = {
            "F": self.forward,
            "B": self.input_grad + self.weight_grad,
            "I": self.input_grad,
            "W": self.weight_grad,
        }[op.kind]
        return seconds * (self.stages[op.stage] if self.stages else 1.0)

    def pair_duration(self, forward: PipelineOp, backward: PipelineOp) -> float:
        """Return the time of a forward and a backward that run as one pair, the sum of both."""
        return self.op_duration(forward) + self.op_duration(backward)


@dataclass(frozen=True)
class PipelineTimeline:
    """Start and end time of each forward and backward of a pipeline schedule.

    Attributes:
        costs: simulated costs of the operations.
        spans: (start, end) of each operation, in the unit of the costs; the first starts at 0. The two operations of a
            pair have one span.
        makespan: end of the last operation.
        bubble: share of the makespan in which each rank is idle.
    """

    costs: PipelineOpCosts
    spans: dict[PipelineOp, tuple[float, float]]
    makespan: float
    bubble: tuple[float, ...]

    @property
    def mean_bubble_share(self) -> float:
        """Fraction of all ranks' time that is idle (the pipeline bubble)."""
        return sum(self.bubble) / len(self.bubble)


def simulate_pipeline_schedule(schedule: PipelineSchedule, costs: PipelineOpCosts | None = None) -> PipelineTimeline:
    """Return the start and end of each operation of a pipeline schedule, simulated with the given costs.
    By default a forward, an input gradient and a weight gradient take one unit each.

    Every rank computes one operation at a time; messages overlap with computation. The default costs, forward : input
    gradient : weight gradient = 1 : 1 : 1, are those of a GEMM.
    """
    costs = costs or PipelineOpCosts()
    spans = _simulate_times(schedule.orders, schedule.owners, costs, schedule.pairs)
    makespan = max(end for _, end in spans.values())
    seconds = [
        [0.0 if op in schedule.pairs else spans[op][1] - spans[op][0] for op in order] for order in schedule.orders
    ]
    busy = [sum(each) for each in seconds]
    return PipelineTimeline(costs, spans, makespan, tuple(1 - time / makespan for time in busy))


def compute_closed_form_bubble(schedule: PipelineSchedule, costs: PipelineOpCosts | None = None) -> float | None:
    """Return the idle fraction (bubble) of a pipeline schedule in closed form, or None if no form is known.
    The formula assumes equal stages and messages that take no time.

    `gpipe` and `1f1b`: (p-1) / (v m + p-1), from p microbatches on. `zb-h1`: (p-1)(F+I-W) / (m (F+I+W) + (p-1)(F+I-W))
    where F = I >= W. `zbv`, where F = I = W: (p-1) / (6 m + p-1), only because ranks start one after another.
    `dualpipev`: (p-1)(F+I-W) / (2 m (F+I+W) + (p-1)(F+I-W)) where F = I >= W. None is known with pairs.
    """
    costs = costs or PipelineOpCosts()
    p, v, m = schedule.pp, schedule.virtual_stages, schedule.microbatches
    forward, inputs, weights = costs.forward, costs.input_grad, costs.weight_grad
    if schedule.pairs_passes:
        return None
    if schedule.name in ("gpipe", "1f1b"):
        return (p - 1) / (v * m + p - 1) if m >= p or v == 1 else None
    if (schedule.name, m >= v * p) in (("zb-h1", True), ("dualpipev", True)) and forward == inputs >= weights:
        idle = (p - 1) * (forward + inputs - weights)
        return idle / (v * m * (forward + inputs + weights) + idle)
    if schedule.name == "zbv" and m >= 2 * p - 1 and forward == inputs == weights:
        return (p - 1) / (6 * m + p - 1)
    return None


def peak_in_flight_microbatches(schedule: PipelineSchedule) -> list[int]:
    """Return each pipeline rank's peak number of micro-batches with activations in memory, each counted once per stage.
    The activations of a micro-batch are freed after its whole backward, or the weight half of it.
    """
    one = [1.0] * len(schedule.owners)
    return [round(compute_peak_pipeline_memory(schedule, rank, one, one)) for rank in range(schedule.pp)]


def compute_peak_pipeline_memory(
    schedule: PipelineSchedule, rank: int, activations: Sequence[float], deferred: Sequence[float]
) -> float:
    """Return a pipeline rank's peak memory from each stage's memory per micro-batch: `activations` to B or I, `deferred` to W.
    It is in the unit of `activations` and `deferred`.

    Args:
        schedule: operations of all ranks.
        rank: pipeline rank.
        activations: memory of one micro-batch in each stage, from `F` to `B` or `I`.
        deferred: memory of one micro-batch in each stage, from `I` to `W`.
    """
    held = peak = 0.0
    for kind, stage, _ in schedule.orders[rank]:
        kept, left = activations[stage], deferred[stage]
        held += {"F": kept, "B": -kept, "I": left - kept, "W": -left}[kind]
        peak = max(peak, held)
    return peak


def _dependencies(op: PipelineOp, last_stage: int) -> Iterator[PipelineOp]:
    """Yield the operations that must have ended before `op` can start; `B` also stands for `I`, the input gradient."""
    if op.kind == "F" and op.stage > 0:
        yield PipelineOp("F", op.stage - 1, op.microbatch)
    if op.kind in ("B", "I"):
        yield PipelineOp("F", op.stage, op.microbatch)
        if op.stage < last_stage:
            yield PipelineOp("B", op.stage + 1, op.microbatch)
    if op.kind == "W":
        yield PipelineOp("B", op.stage, op.microbatch)


def _simulate_times(
    orders: Sequence[Sequence[PipelineOp]], owners: Sequence[int], costs: PipelineOpCosts, pairs: Set[PipelineOp]
) -> dict[PipelineOp, tuple[float, float]]:
    """Return start and end of every compute operation; those of a pair start and end together.

    Raises:
        ConfigError: on a deadlock.
    """
    last_stage = len(owners) - 1
    ready: dict[PipelineOp, float] = {}
    spans: dict[PipelineOp, tuple[float, float]] = {}
    position, clock = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                ops = _next_ops(order, position[rank], pairs)
                needs = [need for op in ops for need in _dependencies(op, last_stage)]
                if not all(need in ready for need in needs):
                    break
                arrivals = [ready[n] + (costs.message if owners[n.stage] != rank else 0.0) for n in needs]
                start = max([clock[rank], *arrivals])
                clock[rank] = start + (costs.pair_duration(*ops) if len(ops) == 2 else costs.op_duration(ops[0]))
                spans.update(dict.fromkeys(ops, (start, clock[rank])))
                ready.update({op._replace(kind="B") if op.kind == "I" else op: clock[rank] for op in ops})
                position[rank] += len(ops)
                moved = True
    stuck = {r: _next_ops(order, position[r], pairs) for r, order in enumerate(orders) if position[r] < len(order)}
    if stuck:
        raise ConfigError(f"the pipeline schedule deadlocks: {_explain_deadlock(stuck, ready, owners)}")
    return spans


def _next_ops(order: Sequence[PipelineOp], position: int, pairs: Set[PipelineOp]) -> Sequence[PipelineOp]:
    """Return the operation at a position of a rank's order, or both of a pair."""
    return order[position : position + (2 if order[position] in pairs else 1)]


def _explain_deadlock(
    stuck: dict[int, Sequence[PipelineOp]], ready: dict[PipelineOp, float], owners: Sequence[int]
) -> str:
    waits = []
    for rank, ops in stuck.items():
        last_stage = len(owners) - 1
        op, need = next((op, need) for op in ops for need in _dependencies(op, last_stage) if need not in ready)
        owner = owners[need.stage]
        waits.append(f"rank {rank}, at {op}, waits for {need}" + (f" from rank {owner}" if owner != rank else ""))
    return "; ".join(waits)


def _add_messages(
    orders: Sequence[Sequence[PipelineOp]], owners: Sequence[int], pairs: Set[PipelineOp] = frozenset()
) -> tuple[tuple[PipelineOp, ...], ...]:
    """Insert sends and receives between the compute operations; see the top of this file for the rule."""
    # With messages that take no time, many operations would end at once, and the order of their messages would delay
    # some of them. A small latency sorts them as on a real machine.
    spans = _simulate_times(orders, owners, PipelineOpCosts(message=0.1), pairs)
    sequence = sorted(spans, key=lambda op: (spans[op][1], owners[op.stage]))  # a pair stays together
    ranks: list[list[PipelineOp]] = [[] for _ in orders]
    for before, op in zip([None, *sequence], sequence, strict=False):
        ranks[owners[op.stage]].append(op)
        done = [] if op in pairs else [before, op] if before in pairs else [op]  # the messages of a pair follow both
        for finished in filter(None, done):
            _append_message(ranks, owners, finished)
    return tuple(tuple(ops) for ops in ranks)


def _append_message(ranks: Sequence[list[PipelineOp]], owners: Sequence[int], op: PipelineOp) -> None:
    """Append the message with the result of a finished operation to the lists of both its ranks, if it has one."""
    kind, stage, microbatch = op
    towards = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or not 0 <= towards < len(owners) or owners[towards] == owners[stage]:
        return
    ranks[owners[stage]].append(PipelineOp("SEND_F" if kind == "F" else "SEND_B", stage, microbatch))
    ranks[owners[towards]].append(PipelineOp("RECV_F" if kind == "F" else "RECV_B", towards, microbatch))
