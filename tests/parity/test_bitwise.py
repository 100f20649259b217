"""What must be the same to the last bit: schedules, ZeRO levels, recomputation, buckets, a stop and a resume."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import pytest
from parity.bits import pairs, resumed, told
from parity.cases import VARIANTS, case
from ranks import run_ranks

from mega_trainer.pipeline.schedules import V_SHAPED
from mega_trainer.verify.case_comparison import merge_rank_findings
from mega_trainer.verify.layout_case import CONTEXT_KINDS, GATHERS, LARGE_BUCKET, STEPS, ZERO_LEVELS, LayoutCase
from mega_trainer.verify.restore_comparison import restore_in_other_layouts

# ZeRO-2 must sum over the ranks after each micro-batch; the others are made to, so that all add in one order.
ORDERED = {"ordered_reductions": True, "reduce_every_microbatch": True}

HALVED = {"grad_reduce_dtype": "bf16"}
AWAY = {"activations": 1, "min_bytes": 0}
FLAT = [zero for zero in ZERO_LEVELS if zero < 3]


def serial(other: LayoutCase) -> tuple[LayoutCase, LayoutCase]:
    """A pipeline and one process with the same micro-batches."""
    return replace(other, ranks=1, parallel={}), other


def pipelines(precision: str) -> list[LayoutCase]:
    shapes = [
        {"pp": 2},
        {"pp": 2, "virtual_stages": 2},
        {"pp": 4, "pipeline_layout": [0, 2, 1, 1]},
        {"pp": 2, "virtual_stages": 2, "pipeline_layout": [1, 1, 2, 0]},
        {"pp": 2, "schedule": "zb-h1"},
        {"pp": 4, "schedule": "zb-h1", "pipeline_layout": [0, 2, 1, 1]},
        {"pp": 2, "schedule": "zbv", "virtual_stages": 2},
        {"pp": 2, "schedule": "dualpipev", "virtual_stages": 2},
        {"pp": 4, "schedule": "zbv", "virtual_stages": 2, "pipeline_layout": [0, 1, 1, 1, 1, 1, 1, 0]},
    ]
    return [
        case(
            model, shape["pp"], layers=sum(shape.get("pipeline_layout", [4])), parallel=shape, micro=micro,
            precision=precision,
        )
        for shape in shapes
        for model, micro in [("gqa", 1), ("dense", 4), ("tied", 2), ("mla", 2), ("moe", 2)]
        # which has both uses of an embedding on one rank
        if model not in ("tied", "mla", "moe") or shape.get("schedule") in V_SHAPED
    ]  # fmt: skip


GROWING = {"start": 4, "increment": 2, "samples": 8}  # steps of 4, 6 and 8 samples


def growing() -> list[LayoutCase]:
    """A batch that is another one in each step, also a number of micro-batches that the pipeline ranks do not divide."""
    shapes = [
        ("dense", {"pp": 2}), ("gqa", {"pp": 4, "virtual_stages": 2}), ("tied", {"pp": 2, "schedule": "zbv", "virtual_stages": 2}),
    ]  # fmt: skip
    return [
        case(model, shape["pp"], layers=shape["pp"] * shape.get("virtual_stages", 1), parallel=shape, micro=2, rampup=GROWING, precision="bf16")
        for model, shape in shapes
    ]  # fmt: skip


def bits(cases: list[tuple[LayoutCase, LayoutCase]], steps: int = STEPS) -> list[list[str] | None]:
    return pairs(cases, norms=True, steps=steps)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_any_schedule_computes_what_serial_microbatches_compute(precision: str) -> None:
    cases = [serial(other) for other in [*pipelines(precision), *(growing() if precision == "bf16" else [])]]
    assert not told([b for _, b in cases], run_ranks(bits, 4, cases, timeout=240))


def test_a_tied_embedding_is_summed_over_two_stages_in_another_order() -> None:
    """In one process the head's and the embedding's gradient are added in each micro-batch, in a pipeline at the end."""
    cases = [serial(case("tied", 2, parallel={"pp": 2}, micro=2, clip=0.0, precision="fp32"))]
    differs = {"gradients/model.embed_tokens.weight"}
    found = told([b for _, b in cases], run_ranks(bits, 2, cases))
    assert {name for names in found.values() for name in names if name.startswith("gradients/")} <= differs


def zero_levels() -> list[tuple[LayoutCase, LayoutCase]]:
    shapes = [
        ("dense", 4, {}, LARGE_BUCKET, "adamw", "bf16"),
        ("tied", 3, {}, 1000, "muon", "fp64"),
        ("gqa", 4, {"tp": 2, "sp": True}, LARGE_BUCKET, "adamw", "fp64"),
        ("gqa", 4, {"tp": 2}, 700, "muon", "bf16"),
        ("tied", 4, {"pp": 2}, 1000, "adamw", "fp32"),
        ("tied", 3, {}, 1000, "adamw", "bf16"),
        ("gqa", 4, {"pp": 2, "schedule": "zb-h1"}, LARGE_BUCKET, "adamw", "bf16"),
        ("mla", 4, {"tp": 2, "sp": True}, 1000, "muon", "bf16"),
        ("mla", 4, {"pp": 2}, LARGE_BUCKET, "adamw", "fp64"),
        ("tied", 4, {"pp": 2, "schedule": "zbv", "virtual_stages": 2}, 1000, "muon", "fp64"),
        ("long", 4, {"cp": 2}, 1000, "adamw", "bf16"),
        ("moe", 4, {"ep": 2}, 1000, "adamw", "bf16"),
        ("moe", 4, {"tp": 2, "sp": True}, LARGE_BUCKET, "muon", "fp64"),
        ("dense", 4, HALVED, 1000, "adamw", "bf16"),
    ]
    plain = [
        case(
            model, ranks, layers=4 if "virtual_stages" in shape else 2, parallel={**shape, "zero": 0}, micro=1, batch=12,
            bucket=bucket, precision=precision,
            optimizer=rule, debug=ORDERED,
        )
        for model, ranks, shape, bucket, rule, precision in shapes
    ]  # fmt: skip
    return [(one, replace(one, parallel={**one.parallel, "zero": z})) for one in plain for z in FLAT[1:]]


@pytest.mark.long
def test_zero_levels_compute_the_same() -> None:
    cases = zero_levels()
    assert not told([b for _, b in cases], run_ranks(bits, 4, cases))


def fully_sharded() -> list[tuple[LayoutCase, LayoutCase]]:
    """Shards end anywhere: those of norms and biases, and on three ranks those of matrices, in the middle of a vector."""
    shapes = [
        ("dense", 4, {}, 0.1, "adamw"), ("tied", 3, {}, 0.1, "muon"), ("gqa", 3, {}, 0.0, "adamw"),
        ("gqa", 4, {"tp": 2}, 0.0, "muon"), ("tied", 4, {"tp": 2, "sp": True}, 0.1, "adamw"),
        ("long", 4, {"cp": 2}, 0.1, "adamw"), ("moe", 4, {"ep": 2}, 0.1, "muon"),
        ("moe", 4, {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2}, 0.1, "adamw"),
        ("moe", 2, {"ep": 2, **HALVED}, 0.1, "adamw"),
        ("dense", 4, {"pp": 2}, 0.1, "adamw"), ("mla", 4, {"pp": 2, "virtual_stages": 2}, 0.1, "muon"),
        ("moe", 4, {"pp": 2, "ep": 2, "schedule": "zb-h1"}, 0.1, "adamw"),
        ("tied", 4, {"pp": 2, "schedule": "zbv", "virtual_stages": 2}, 0.1, "muon"),
        ("tied", 3, {}, 0.1, "adamw"), ("gqa", 4, {"tp": 2}, 0.0, "adamw"), ("moe", 4, {"ep": 2}, 0.1, "adamw"),
    ]  # fmt: skip
    plain = [
        case(
            model, ranks, layers=4 if "pp" in shape else 2, parallel={**shape, "zero": 0}, micro=1, batch=12, clip=clip,
            precision=precision, optimizer=rule, debug=ORDERED,
        )
        for precision in ("fp64", "fp32", "bf16")
        for model, ranks, shape, clip, rule in shapes
    ]  # fmt: skip
    ways = cycle(product((1, 2), GATHERS))
    return [
        (one, replace(one, parallel={**one.parallel, "zero": 3, "zero3_layers": layers, "zero3_gather": gather}))
        for one, (layers, gather) in zip(plain, ways, strict=False)
    ]


@pytest.mark.long
def test_zero_3_computes_the_same() -> None:
    cases = fully_sharded()
    assert not told([b for _, b in cases], run_ranks(bits, 4, cases, timeout=280))


def test_layers_that_are_gathered_together_change_no_bit() -> None:
    """Whether a backward computes all of a unit's layers again, none, or what would be a part of it."""
    plain = [
        case("dense", 2, layers=5, parallel={"zero": 0}, micro=2, precision="fp32", debug=ORDERED),
        case("moe", 2, layers=5, parallel={"ep": 2, "zero": 0}, micro=2, precision="bf16", debug=ORDERED),
    ]
    ways: list[dict[str, Any]] = [{}, {"kind": "full"}, {"kind": "full", "layers": 3}]
    cases = [
        (one, replace(one, parallel={**one.parallel, "zero": 3, "zero3_layers": 2}, recompute=again))
        for one, again in product(plain, ways)
    ]
    assert not told([b for _, b in cases], run_ranks(bits, 2, cases))


def recomputed() -> list[tuple[LayoutCase, LayoutCase]]:
    plain = [
        case("tied", 1, micro=4),
        case("gqa", 2, parallel={"tp": 2}, micro=4),
        case("tied", 2, parallel={"tp": 2, "sp": True}, micro=8, precision="bf16"),
        case("tied", 2, parallel={"pp": 2}, layers=3, micro=2),
        case("tied", 2, parallel={"pp": 2, "schedule": "zb-h1"}, layers=3, micro=2, precision="bf16"),
        case("tied", 2, parallel={"pp": 2, "schedule": "zbv", "virtual_stages": 2}, layers=4, micro=1),
        *(case("long", 2, parallel={"cp": 2, "cp_kind": kind}, micro=4, precision="bf16") for kind in CONTEXT_KINDS),
        case("tied", 2, parallel={"cp": 2, "cp_kind": "alltoall"}, micro=4),
        case("moe", 2, parallel={"ep": 2}, micro=2, precision="bf16"),
        case("moe", 2, parallel={"tp": 2, "sp": True, "ep": 2}, micro=4),
        case("moe", 2, parallel={"pp": 2, "schedule": "zb-h1"}, layers=3, micro=2, precision="bf16"),
        case("deepseek", 2, parallel={"tp": 2, "sp": True, "expert_tp": 2}, micro=4, precision="bf16"),
        case("deepseek", 2, parallel={"cp": 2, "ep": 2, "zero": 3}, micro=4),
        case("moe", 2, parallel={"cp": 2}, micro=4, variant=VARIANTS["moe"][-1]),
    ]
    blocks = {"kind": "selective", "modules": ["norm", "attention", "mlp", "moe"]}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"kind": "selective"}, AWAY), (blocks, {}), ({"kind": "full"}, {}),
        ({"kind": "selective"}, {}), ({}, AWAY), ({"kind": "full", "layers": 1}, AWAY),
    ]  # fmt: skip
    turns = (ways[:3], ways[3:])
    return [
        (one, replace(one, recompute=again, offload=away))
        for i, one in enumerate(plain)
        for again, away in turns[i % 2]
    ]


@pytest.mark.long
def test_recomputation_and_offload_change_nothing() -> None:
    cases = recomputed()
    assert not told([b for _, b in cases], run_ranks(bits, 2, cases, 2))


def test_an_expert_exchange_beside_another_pass_changes_nothing() -> None:
    shapes: list[tuple[str, int, dict[str, Any], str]] = [
        ("moe", 2, {"ep": 2, "zero": 2}, "bf16"), ("moe", 4, {"pp": 2, "ep": 2, "virtual_stages": 2}, "bf16"),
        ("deepseek", 4, {"pp": 2, "ep": 2, "virtual_stages": 2, "schedule": "dualpipev"}, "fp64"),
    ]  # fmt: skip
    plain = [case(name, ranks, layers=4, parallel=p, micro=1, precision=dtype) for name, ranks, p, dtype in shapes]
    cases = [(one, replace(one, parallel={**one.parallel, "overlap_expert_exchange": True})) for one in plain]
    assert not told([b for _, b in cases], run_ranks(bits, 4, cases))


def test_buckets_change_nothing() -> None:
    plain = case("dense", 2, parallel={"zero": 0}, micro=2, precision="fp32", debug=ORDERED)
    cases = [(plain, replace(plain, bucket=size, parallel={"zero": zero})) for size in (1, 777) for zero in FLAT]
    assert not told([b for _, b in cases], run_ranks(bits, 2, cases))


@pytest.mark.long
def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    shapes = [
        ("gqa", 1, {}, "bf16", "adamw"),
        ("tied", 2, {"tp": 2, "sp": True}, "fp32", "muon"),
        ("gqa", 4, {"tp": 4}, "bf16", "muon"),
        ("moe", 4, {"tp": 2, "ep": 4, "zero": 1}, "bf16", "adamw"),
        ("moe", 4, {"ep": 2, "expert_tp": 2, "zero": 3}, "fp32", "adamw"),
        ("tied", 4, {"pp": 2, "virtual_stages": 2, "schedule": "zbv", "zero": 3}, "bf16", "muon"),
        ("dense", 2, {"zero": 1}, "fp32", "adamw"),
        ("tied", 4, {"tp": 2, "zero": 1}, "bf16", "muon"),
        ("tied", 4, {"pp": 2, "virtual_stages": 2, "zero": 1}, "fp32", "adamw"),
        ("long", 4, {"cp": 2, "zero": 1}, "bf16", "adamw"),
        ("long", 4, {"cp": 2, "cp_kind": "alltoall", "zero": 3}, "bf16", "adamw"),
        ("tied", 4, {"pp": 2, "virtual_stages": 2, "schedule": "zbv", "zero": 1}, "bf16", "adamw"),
        *(("dense", 4, {"zero": zero}, "bf16", "adamw") for zero in ZERO_LEVELS),
    ]
    cases = [
        case(model, ranks, layers=4, parallel=parallel, micro=2, precision=precision, optimizer=rule, debug=ORDERED)
        for model, ranks, parallel, precision, rule in shapes
    ]
    cases.append(case("gqa", 2, layers=4, parallel={"zero": 1}, micro=1, batch=8, rampup=GROWING, debug=ORDERED))
    assert not told(cases, run_ranks(resumed, 4, cases, tmp_path))


def test_sharded_weights_and_whole_ones_resume_each_other_in_a_pipeline(tmp_path: Path) -> None:
    """The bits of the run that did not stop: ZeRO-1 to ZeRO-3 and back, with either optimizer."""
    whole = [
        case("dense", 4, parallel={"pp": 2, "zero": 1}, micro=1, precision="bf16", optimizer=rule, debug=ORDERED)
        for rule in ("adamw", "muon")
    ]
    sharded = [
        replace(one, parallel={"pp": 2, "zero": 3, "zero3_gather": gather})
        for one, gather in zip(whole, GATHERS, strict=True)
    ]
    before, after = [*whole, *sharded], [*sharded, *whole]
    assert not told(before, run_ranks(resumed, 4, before, tmp_path, after))


def moves() -> list[tuple[LayoutCase, LayoutCase]]:
    """From each layout to the next, with the models in turn."""
    shapes = [
        (1, {}), (2, {"tp": 2}), (4, {"tp": 4, "sp": True}), (4, {"pp": 4}), (4, {"pp": 2, "virtual_stages": 2, "schedule": "zbv", "zero": 1}),
        (4, {"tp": 2, "pp": 2, "zero": 0}), (3, {"zero": 1}), (8, {"tp": 8}), (3, {"pp": 3, "pipeline_layout": [0, 3, 1]}),
        (4, {"tp": 2, "zero": 3}), (4, {"pp": 2, "zero": 3, "schedule": "zb-h1"}), (2, {"pp": 2, "schedule": "zb-h1"}), (8, {"tp": 2, "pp": 2, "zero": 1}), (1, {}),
        (4, {"cp": 4, "cp_kind": "alltoall", "zero": 1}), (4, {"cp": 2, "cp_kind": "alltoall", "pp": 2}), (2, {"tp": 2}),
    ]  # fmt: skip
    rules = cycle([("tied", "adamw"), ("gqa", "muon"), ("dense", "adamw")])
    return [
        tuple(
            case(model, ranks, layers=4, parallel=parallel, micro=4, batch=24, optimizer=rule)
            for ranks, parallel in pair
        )
        for pair, (model, rule) in zip(pairwise(shapes), rules, strict=False)
    ]


# one move in so many of a table; `make test-long` runs all of it
ONE_IN_TWO = pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


@ONE_IN_TWO
def test_experts_move(every: int, tmp_path: Path) -> None:
    """With them the biases of their choice."""
    shapes = [
        (1, {}), (4, {"ep": 4, "zero": 1}), (4, {"pp": 2, "tp": 2, "ep": 2}), (4, {"ep": 2, "expert_tp": 2, "zero": 3}),
        (4, {"cp": 2, "ep": 2, "zero": 2}), (2, {"expert_tp": 2, "tp": 2, "sp": True}),
    ]  # fmt: skip
    cases = [
        tuple(case("moe", ranks, layers=3, parallel=parallel, micro=2) for ranks, parallel in pair)
        for pair in list(pairwise(shapes))[::every]
    ]
    for (before, after), *found in zip(cases, *run_ranks(restore_in_other_layouts, 4, cases, tmp_path), strict=True):
        where, held = f"{before} -> {after}", [one for one in found if one is not None]
        assert not [name for one in held for name in one.differing], where
        assert not merge_rank_findings(after, [one.steps for one in held]).describe_problem(1e-10), where


@ONE_IN_TWO
def test_main_weights_and_moments_of_a_bf16_run_move_bit_for_bit(every: int, tmp_path: Path) -> None:
    shapes = [
        (1, {}),
        (4, {"tp": 2, "zero": 1}),
        (4, {"pp": 2, "zero": 0}),
        (3, {"zero": 3}),
        (2, {"tp": 2, "sp": True}),
    ]
    cases = [
        tuple(case("tied", ranks, parallel=p, micro=2, batch=24, precision="bf16") for ranks, p in pair)
        for pair in list(pairwise(shapes))[::every]
    ]
    for pair, *found in zip(cases, *run_ranks(restore_in_other_layouts, 4, cases, tmp_path), strict=True):
        held = [one for one in found if one is not None]
        assert held[0].steps.shapes.keys() >= {"optimizer/main/model.norm.weight"}
        assert not [name for one in held for name in one.differing], pair


@pytest.mark.long
def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path: Path) -> None:
    cases = moves()
    results = run_ranks(restore_in_other_layouts, 8, cases, tmp_path, timeout=280)
    for (before, after), found in zip(cases, zip(*results, strict=True), strict=True):
        where = f"{before} -> {after}"
        held = [one for one in found if one is not None]
        assert not [name for one in held for name in one.differing], where
        assert not merge_rank_findings(after, [one.steps for one in held]).describe_problem(1e-10), where
