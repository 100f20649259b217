from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError
from mega_trainer.pipeline.schedules import (
    PipelineOp,
    PipelineOpCosts,
    PipelineSchedule,
    _add_messages,
    compute_closed_form_bubble,
    compute_peak_pipeline_memory,
    make_pipeline_schedule,
    peak_in_flight_microbatches,
    simulate_pipeline_schedule,
)

COMPUTE = {"F", "B", "I", "W"}  # kinds of operations that are no messages
paired = st.one_of(
    st.tuples(st.just("1f1b"), st.integers(1, 6), st.integers(1, 4), st.integers(1, 20)),
    st.tuples(st.just("dualpipev"), st.integers(1, 6), st.just(2), st.integers(1, 20)),
)
shapes = st.one_of(
    st.tuples(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 4), st.integers(1, 20)),
    st.tuples(st.just("zb-h1"), st.integers(1, 6), st.just(1), st.integers(1, 20)),
    st.tuples(st.sampled_from(["zbv", "dualpipev"]), st.integers(1, 6), st.just(2), st.integers(1, 20)),
)


def build_schedule(shape: tuple[str, int, int, int], *, pairs: bool = False) -> PipelineSchedule:
    name, pp, virtual_stages, microbatches = shape
    return make_pipeline_schedule(
        name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches, pairs_passes=pairs
    )


class HalfHidden(PipelineOpCosts):
    """Costs of which a pair saves half a unit."""

    def pair_duration(self, forward: PipelineOp, backward: PipelineOp) -> float:
        return super().pair_duration(forward, backward) - 0.5


def run_blocking(ranks: Sequence[Sequence[PipelineOp]], owners: Sequence[int], pick: random.Random) -> list[str]:
    """Run the lists with the strictest messages: a send and its receive happen together, and block both ranks.

    Returns what each rank stands before when no rank can go on: nothing where all came to their ends.
    """
    position = [0] * len(ranks)
    here: set[tuple[str, int, int]] = set()  # tensors that lie on the rank that needs them: input, output, gradient
    last = len(owners) - 1

    def head(rank: int) -> PipelineOp | None:
        return ranks[rank][position[rank]] if position[rank] < len(ranks[rank]) else None

    def step(rank: int) -> bool:
        op = head(rank)
        if op is None:
            return False
        if op.kind in COMPUTE:
            assert owners[op.stage] == rank
            compute(op)
            position[rank] += 1
            return True
        if not op.kind.startswith("SEND"):
            return False
        forward = op.kind == "SEND_F"
        towards = op.stage + (1 if forward else -1)
        peer = owners[towards]
        if head(peer) != PipelineOp("RECV_F" if forward else "RECV_B", towards, op.microbatch):
            return False
        assert ("output" if forward else "input gradient", op.stage, op.microbatch) in here
        here.add(("input" if forward else "output gradient", towards, op.microbatch))
        position[rank] += 1
        position[peer] += 1
        return True

    def compute(op: PipelineOp) -> None:
        stage, microbatch = op.stage, op.microbatch

        def take(tensor: str, neighbor: int, theirs: str) -> None:
            there = 0 <= neighbor <= last and owners[neighbor] == owners[stage]
            needed = (theirs, neighbor, microbatch) if there else (tensor, stage, microbatch)
            assert needed in here, f"{op} runs before it has its {tensor}"

        if op.kind == "F":
            if stage > 0:
                take("input", stage - 1, "output")
            here.add(("output", stage, microbatch))
        elif op.kind in ("B", "I"):
            assert ("output", stage, microbatch) in here
            if stage < last:
                take("output gradient", stage + 1, "input gradient")
            here.add(("input gradient", stage, microbatch))
        else:
            assert ("input gradient", stage, microbatch) in here

    while any(head(rank) for rank in range(len(ranks))):
        order = pick.sample(range(len(ranks)), len(ranks))
        if not any(step(rank) for rank in order):
            return [str(head(rank)) for rank in range(len(ranks))]
    return []


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(0, 9))
def test_every_schedule_runs_to_its_end_with_blocking_messages(shape, seed) -> None:
    schedule = build_schedule(shape)
    assert run_blocking(schedule.ranks, schedule.owners, random.Random(seed)) == []


@settings(max_examples=150, deadline=None)
@given(paired, st.integers(0, 9))
def test_pairs_run_to_their_end_with_messages_before_and_after_both(shape, seed) -> None:
    schedule = build_schedule(shape, pairs=True)
    assert run_blocking(schedule.ranks, schedule.owners, random.Random(seed)) == []
    _, pp, _, microbatches = shape
    for ops in schedule.ranks:
        pairs = [both for both in pairwise(ops) if both[0] in schedule.pairs]
        assert all(first.kind == "F" and second.kind in ("B", "I") for first, second in pairs)
        assert all(first.microbatch != second.microbatch for first, second in pairs)
        assert pairs or microbatches < 2 * pp
    plain = build_schedule(shape)
    assert [sorted(order) for order in schedule.orders] == [sorted(order) for order in plain.orders]


@pytest.mark.parametrize("shape", [("1f1b", 1, 1, 4), ("1f1b", 4, 1, 8), ("1f1b", 4, 2, 8), ("dualpipev", 4, 2, 8)])
def test_pairs_do_not_enlarge_the_bubble_and_save_what_they_hide(shape) -> None:
    plain, pairs = build_schedule(shape), build_schedule(shape, pairs=True)
    alone, together = simulate_pipeline_schedule(plain), simulate_pipeline_schedule(pairs)
    assert together.makespan == pytest.approx(alone.makespan)
    assert together.bubble == pytest.approx(alone.bubble)
    hiding = simulate_pipeline_schedule(pairs, HalfHidden())
    each = [len([op for op in order if op in pairs.pairs]) for order in pairs.orders]
    assert hiding.makespan <= together.makespan - 0.5 * min(each)


def test_peak_activations_with_pairs_by_hand() -> None:
    peaks = [[8, 6, 4, 2], [12, 10, 8, 6], [9, 9, 9, 9]]
    for shape, peak in zip([("1f1b", 4, 1, 8), ("1f1b", 4, 2, 8), ("dualpipev", 4, 2, 8)], peaks, strict=True):
        assert peak_in_flight_microbatches(build_schedule(shape, pairs=True)) == peak


@settings(max_examples=100, deadline=None)
@given(shapes)
def test_every_microbatch_passes_every_stage_once_each_way_in_order(shape) -> None:
    schedule = build_schedule(shape)
    for rank in range(schedule.pp):
        seen: dict[tuple[str, int], list[int]] = {}
        for op in schedule.orders[rank]:
            seen.setdefault((op.kind, op.stage), []).append(op.microbatch)
        kinds = "FIW" if schedule.splits_backward else "FB"
        assert set(seen) == {(kind, stage) for kind in kinds for stage in schedule.stages_of_rank(rank)}
        assert all(numbers == list(range(schedule.microbatches)) for numbers in seen.values())


@settings(max_examples=100, deadline=None)
@given(shapes)
def test_both_ends_list_the_same_messages_in_the_same_order(shape) -> None:
    schedule = build_schedule(shape)

    def between(rank: int, peer: int) -> list[tuple[str, int, int]]:
        found = []
        for kind, stage, microbatch in schedule.ranks[rank]:
            if kind in COMPUTE:
                continue
            way, direction = kind.split("_")
            other = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
            if schedule.owners[other] == peer:
                found.append((direction, stage if way == "SEND" else other, microbatch))
        return found

    for a in range(schedule.pp):
        for b in range(a):
            assert between(a, b) == between(b, a)


def test_the_order_of_1f1b_is_the_known_one() -> None:
    schedule = make_pipeline_schedule("1f1b", pp=3, microbatches=4)
    told = ["".join(f"{op.kind}{op.microbatch}" for op in schedule.orders[rank]) for rank in range(3)]
    assert told == ["F0F1F2B0F3B1B2B3", "F0F1B0F2B1F3B2B3", "F0B0F1B1F2B2F3B3"]


def test_the_order_of_interleaved_1f1b_is_the_known_one() -> None:
    schedule = make_pipeline_schedule("1f1b", pp=2, virtual_stages=2, microbatches=2)
    told = [" ".join(f"{op.kind}{op.stage}.{op.microbatch}" for op in schedule.orders[rank]) for rank in range(2)]
    assert told == ["F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1", "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"]


def test_the_order_of_dualpipev_is_the_known_one() -> None:
    """As in DeepSeek's DualPipe repository, where chunk 1 of a rank is here stage 3 or 2."""
    schedule = make_pipeline_schedule("dualpipev", pp=2, virtual_stages=2, microbatches=4)
    told = [" ".join(f"{op.kind}{op.stage}.{op.microbatch}" for op in schedule.orders[rank]) for rank in range(2)]
    assert told == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 I3.1 W3.1 F3.2 I0.0 W0.0 I3.2 W3.2 F3.3 I0.1 W0.1 "
        "I3.3 W3.3 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 F1.2 I2.0 W2.0 F2.2 I1.0 W1.0 F1.3 I2.1 W2.1 F2.3 I1.1 W1.1 I2.2 W2.2 I1.2 W1.2 I2.3 I1.3 W2.3 W1.3",
    ]


def test_placement_goes_round_or_like_a_v() -> None:
    assert build_schedule(("1f1b", 3, 2, 3)).owners == (0, 1, 2, 0, 1, 2)
    assert all(build_schedule((name, 3, 2, 3)).owners == (0, 1, 2, 2, 1, 0) for name in ("zbv", "dualpipev"))
    assert build_schedule(("zbv", 3, 2, 3)).stages_of_rank(1) == [1, 4]


@settings(max_examples=150, deadline=None)
@given(shapes, st.floats(0.2, 5))
def test_the_simulated_bubble_is_the_closed_formula(shape, unit: float) -> None:
    schedule = build_schedule(shape)
    costs = PipelineOpCosts(forward=unit, input_grad=unit, weight_grad=unit)
    formula = compute_closed_form_bubble(schedule, costs)
    if formula is not None:
        assert simulate_pipeline_schedule(schedule, costs).mean_bubble_share == pytest.approx(formula, abs=1e-9)


def test_zero_bubble_formula_with_cheap_and_with_dear_weight_gradients() -> None:
    schedule, costs = build_schedule(("zb-h1", 4, 1, 8)), PipelineOpCosts(forward=1, input_grad=1, weight_grad=0.5)
    assert compute_closed_form_bubble(schedule, PipelineOpCosts(forward=1, input_grad=1, weight_grad=1.5)) is None
    dual = build_schedule(("dualpipev", 4, 2, 8))
    for one, known in ((schedule, 4.5 / (20 + 4.5)), (dual, 4.5 / (40 + 4.5))):
        assert compute_closed_form_bubble(one, costs) == pytest.approx(known)
        assert simulate_pipeline_schedule(one, costs).mean_bubble_share == pytest.approx(known)


def test_no_formula_where_none_holds() -> None:
    assert compute_closed_form_bubble(build_schedule(("1f1b", 4, 2, 3))) is None
    assert compute_closed_form_bubble(build_schedule(("zb-h1", 4, 1, 3))) is None
    assert compute_closed_form_bubble(build_schedule(("zbv", 4, 2, 6))) is None
    assert compute_closed_form_bubble(build_schedule(("dualpipev", 4, 2, 7))) is None
    assert compute_closed_form_bubble(build_schedule(("1f1b", 4, 1, 3))) is not None


def test_simulate_by_hand() -> None:
    timeline = simulate_pipeline_schedule(
        make_pipeline_schedule("1f1b", pp=2, microbatches=1), PipelineOpCosts(1, 2, 3, message=0.5, stages=(1.0, 2.0))
    )
    assert timeline.spans == {
        PipelineOp("F", 0, 0): (0.0, 1.0),
        PipelineOp("F", 1, 0): (1.5, 3.5),
        PipelineOp("B", 1, 0): (3.5, 13.5),
        PipelineOp("B", 0, 0): (14.0, 19.0),
    }
    assert timeline.makespan == 19.0
    assert timeline.bubble == pytest.approx((13 / 19, 7 / 19))


def test_peak_activations_by_hand() -> None:
    assert peak_in_flight_microbatches(build_schedule(("gpipe", 4, 1, 8))) == [8, 8, 8, 8]
    assert peak_in_flight_microbatches(build_schedule(("1f1b", 4, 1, 8))) == [4, 3, 2, 1]
    assert peak_in_flight_microbatches(build_schedule(("1f1b", 4, 2, 8))) == [11, 9, 7, 5]
    assert peak_in_flight_microbatches(build_schedule(("zb-h1", 4, 1, 8))) == [4, 4, 4, 4]
    assert peak_in_flight_microbatches(build_schedule(("zbv", 4, 2, 8))) == [8, 8, 8, 8]
    assert peak_in_flight_microbatches(build_schedule(("dualpipev", 4, 2, 8))) == [9, 9, 9, 9]


def test_what_is_put_off_is_held_until_the_weight_half() -> None:
    schedule = build_schedule(("zb-h1", 4, 1, 8))
    stages = [1.0] * 4
    assert [compute_peak_pipeline_memory(schedule, rank, stages, [0.0] * 4) for rank in range(4)] == [4, 3, 2, 1]
    # the last rank has the most put off: it goes on with input gradients alone, three times
    assert [compute_peak_pipeline_memory(schedule, rank, stages, [2.0] * 4) for rank in range(4)] == [5, 6, 7, 8]


@pytest.mark.parametrize("microbatches", [8, 16, 32])
def test_zbv_at_least_halves_the_bubble_of_1f1b(microbatches: int) -> None:
    plain, zbv = (
        simulate_pipeline_schedule(build_schedule((name, 4, v, microbatches))) for name, v in [("1f1b", 1), ("zbv", 2)]
    )
    # the stages of zbv are half as long: compare shares, not times
    assert zbv.mean_bubble_share <= plain.mean_bubble_share / 2


def test_receives_are_listed_before_the_operation_that_hides_them() -> None:
    """In the steady state, at least one other operation stands between a receive and what uses it."""
    ops = make_pipeline_schedule("1f1b", pp=4, virtual_stages=2, microbatches=32).ranks[1]
    users: dict[str, str] = {"RECV_F": "F", "RECV_B": "B"}
    between: Counter[int] = Counter()
    for index, op in enumerate(ops):
        if op.kind in users:
            use = ops.index(PipelineOp(users[op.kind], op.stage, op.microbatch))  # type: ignore[arg-type]
            between[sum(other.kind in COMPUTE for other in ops[index:use])] += 1
    assert between[0] < 0.1 * between.total()


def test_a_deadlock_is_explained() -> None:
    first = [PipelineOp("F", 0, 0), PipelineOp("B", 0, 0), PipelineOp("F", 0, 1), PipelineOp("B", 0, 1)]
    second = [PipelineOp("F", 1, 0), PipelineOp("F", 1, 1), PipelineOp("B", 1, 0), PipelineOp("B", 1, 1)]
    with pytest.raises(ConfigError) as error:
        _add_messages([first, second], (0, 1))
    assert str(error.value) == (
        "the pipeline schedule deadlocks: "
        "rank 0, at B of microbatch 0 in stage 0, waits for B of microbatch 0 in stage 1 from rank 1; "
        "rank 1, at F of microbatch 1 in stage 1, waits for F of microbatch 1 in stage 0 from rank 0"
    )


@pytest.mark.parametrize(
    ("name", "virtual_stages", "told"),
    [
        ("1f1", 1, "did you mean '1f1b'"),
        ("wave", 1, "known: gpipe, 1f1b, zb-h1, zbv, dualpipev"),
        ("zbv", 1, "set parallel.virtual_stages=2"),
        ("dualpipev", 1, "set parallel.virtual_stages=2"),
        ("zb-h1", 2, "set parallel.virtual_stages=1"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(name, virtual_stages, told) -> None:
    with pytest.raises(ConfigError, match="overlap_expert_exchange is not supported"):
        build_schedule(("zbv", 4, 2, 8), pairs=True)
    with pytest.raises(ConfigError, match=told):
        make_pipeline_schedule(name, pp=4, microbatches=8, virtual_stages=virtual_stages)
