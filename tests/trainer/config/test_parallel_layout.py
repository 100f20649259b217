"""Where ranks stand; degrees that do not fit are told all at once, with a way out that works."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.config.run_config import RunConfig

degree = st.integers(1, 4)


@given(degree, degree, degree, degree)
def test_coordinates_and_ranks_are_each_others_inverse(tp: int, pp: int, cp: int, dp: int) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp)
    places = [layout.coordinates_of(rank) for rank in range(layout.world_size)]
    assert [layout.rank_at(**at) for at in places] == list(range(tp * pp * cp * dp))
    assert all(0 <= at[axis] < getattr(layout, axis) for at in places for axis in at)


def test_tensor_ranks_are_neighbors_and_pipeline_ranks_far_apart() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=3)
    assert [layout.rank_at(pp=0, dp=0, cp=0, tp=t) for t in range(2)] == [0, 1]
    assert [layout.rank_at(pp=0, dp=d, cp=0, tp=0) for d in range(3)] == [0, 2, 4]
    assert [layout.rank_at(pp=p, dp=0, cp=0, tp=0) for p in range(2)] == [0, 6]


def run(
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    micro: int = 1,
    batch: int = 8,
    length: int = 16,
) -> dict[str, Any]:
    sizes = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 8, "vocab_size": 64}
    return {
        "model": sizes | (model or {}),
        "data": {"train": ["none"], "seq_length": length},
        "parallel": parallel or {},
        "batch": {"micro": micro, "global": batch},
    }


def error_message(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        RunConfig.parse(raw)
    return str(error.value)


def test_all_that_does_not_fit_the_model_is_told_at_once() -> None:
    text = error_message(run(parallel={"tp": 3, "sp": True, "pp": 8}, length=16))
    assert "3 problems" in text
    for path in ("parallel.tp = 3", "data.seq_length = 16", "parallel.pp = 8"):
        assert path in text


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"tp": 16}, "one of [1, 2, 4, 8]"),
        ({"pp": 2, "virtual_stages": 4}, "virtual_stages=2"),
        ({"virtual_stages": 2}, "set parallel.virtual_stages=1"),
        ({"pp": 2, "pipeline_layout": [1, 2]}, "set parallel.pipeline_layout=[2, 2]"),
        ({"pp": 2, "schedule": "zbv"}, "virtual_stages=2"),
        ({"pp": 2, "schedule": "dualpipev"}, "virtual_stages=2"),
        ({"pp": 4, "schedule": "dualpipev", "virtual_stages": 2}, "set parallel.pp=2, parallel.virtual_stages=2"),
        ({"schedule": "dualpipev", "virtual_stages": 2}, "set parallel.schedule=1f1b"),
        ({"pp": 2, "schedule": "zb-h1", "virtual_stages": 2}, "virtual_stages=1"),
        ({"schedule": "zb-h1"}, "set parallel.schedule=1f1b"),
    ],
)
def test_degrees_that_do_not_fit_the_model(parallel: dict[str, Any], says: str) -> None:
    assert says in error_message(run(parallel=parallel))


MOE = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 12}


@pytest.mark.parametrize(
    ("moe", "parallel", "says"),
    [
        (None, {"ep": 2}, "parallel.ep = 2: requires a model with experts (model.moe) -> set parallel.ep=1"),
        (MOE, {"ep": 3}, "parallel.ep = 3: must divide the 8 experts -> set parallel.ep=2 (one of [1, 2, 4, 8])"),
        (
            MOE,
            {"ep": 2, "expert_tp": 2, "dispatch": "deepep"},
            "parallel.dispatch = 'deepep': requires precision = bf16 or fp8 and parallel.expert_tp = 1",
        ),
        (
            MOE,
            {"ep": 2, "expert_tp": 2, "dispatch": "te"},
            "parallel.dispatch = 'te': requires precision = bf16 or fp8 and parallel.expert_tp = 1",
        ),
        (
            MOE,
            {"ep": 2, "dispatch": "nvshmem"},
            "is required with parallel.dispatch = nvshmem -> set parallel.dispatch_bound=1.25",
        ),
        (
            MOE,
            {"ep": 2, "expert_tp": 3, "dispatch": "nvshmem", "dispatch_bound": 2.0},
            "ep x expert_tp = 6, model.hidden_size =",
        ),
        (
            MOE,
            {"expert_tp": 8},
            "must divide the experts' ffn_hidden_size 12 -> set parallel.expert_tp=6 (one of [1, 2, 3, 4, 6, 12])",
        ),
        ({**MOE, "shared_ffn_hidden_size": 6}, {"tp": 4}, "ffn_hidden_size 6, and divide"),
        ({**MOE, "shared_ffn_hidden_size": 6, "layers": [0]}, {"tp": 4}, "ffn_hidden_size 6 and 64, and divide"),
    ],
)
def test_degrees_that_do_not_fit_the_experts(moe: dict[str, Any] | None, parallel: dict[str, Any], says: str) -> None:
    assert says in error_message(run({"moe": moe}, parallel))


def test_experts_are_split_over_any_ranks_of_a_stage() -> None:
    config = RunConfig.parse(run({"moe": MOE}, {"tp": 2, "pp": 2, "ep": 4}))
    config.check_world_size(8)
    (problem,) = config.parallel_rules.find_world_size_problems(4)
    assert problem.rule == "must fit the 2 ranks of a stage: ep 4 x expert_tp 1 = 4 does not divide 2"
    assert problem.hint == "set parallel.ep=2"
    config = RunConfig.parse(run({"moe": MOE}, {"ep": 2, "expert_tp": 3}, batch=12))
    config.check_world_size(6)
    assert (
        next(iter(config.parallel_rules.find_world_size_problems(4))).hint == "set parallel.ep=2, parallel.expert_tp=1"
    )


def test_a_model_of_experts_alone_has_no_dense_width_to_split() -> None:
    assert RunConfig.parse(run({"moe": MOE, "ffn_hidden_size": 7}, {"tp": 4})).parallel.tp == 4
    assert "parallel.tp = 4" in error_message(run({"ffn_hidden_size": 7}, {"tp": 4}))


def test_a_stage_at_the_end_may_have_no_layers() -> None:
    assert RunConfig.parse(run(parallel={"pp": 2, "pipeline_layout": [4, 0]})).parallel.pipeline_layout == [4, 0]
    assert "only the first and the last may have none" in error_message(
        run(parallel={"pp": 4, "pipeline_layout": [2, 0, 1, 1]})
    )


def test_fewer_key_value_heads_than_tensor_ranks_must_divide_them() -> None:
    assert RunConfig.parse(run({"num_kv_heads": 2}, {"tp": 8})).parallel.tp == 8
    assert "parallel.tp = 4" in error_message(
        run({"num_attention_heads": 12, "head_dim": 4, "num_kv_heads": 6}, {"tp": 4})
    )


OVERLAP = {"ep": 2, "overlap_expert_exchange": True}


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"ep": 1}, "requires expert parallelism (parallel.ep or parallel.expert_tp > 1)"),
        ({"dispatch": "nvshmem", "dispatch_bound": 2.0}, "requires parallel.dispatch = alltoall or deepep"),
        ({"zero": 3}, "requires parallel.zero < 3"),
        ({"pp": 2, "schedule": "zb-h1"}, "requires parallel.schedule = 1f1b or dualpipev"),
    ],
)
def test_an_exchange_that_cannot_be_hidden(parallel: dict[str, Any], says: str) -> None:
    text = error_message(run(model={"moe": MOE}, parallel=OVERLAP | parallel))
    assert f"parallel.overlap_expert_exchange = true: {says}" in text
    for dispatch in ("alltoall", "deepep"):
        RunConfig.parse(run(model={"moe": MOE}, parallel=OVERLAP | {"dispatch": dispatch}))


def test_an_exchange_is_hidden_under_another_micro_batch() -> None:
    config = RunConfig.parse(run(model={"moe": MOE}, parallel={"pp": 2} | OVERLAP))
    config.check_world_size(4)
    with pytest.raises(ConfigError, match="= 4 micro-batches per step, found 2"):
        config.check_world_size(8)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from([2, 4, 6, 12]))
    model = {
        "num_layers": draw(st.integers(1, 8)),
        "num_attention_heads": heads,
        "head_dim": 4,
        "ffn_hidden_size": draw(st.sampled_from([24, 36, 64])),
        "num_kv_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
    }
    parallel = {
        "tp": draw(st.integers(1, 6)),
        "pp": draw(st.integers(1, 4)),
        "sp": draw(st.booleans()),
        "virtual_stages": draw(st.sampled_from([1, 1, 2])),
        "schedule": draw(st.sampled_from(["1f1b", "1f1b", "zb-h1", "zbv", "dualpipev"])),
        "dp": draw(st.sampled_from([None, None, 2])),
        "cp": draw(st.sampled_from([1, 1, 2, 3])),
        "cp_kind": draw(st.sampled_from(["ring", "allgather", "alltoall"])),
    }
    if draw(st.booleans()):
        model["moe"] = {"num_experts": draw(st.sampled_from([4, 6])), "top_k": 1, "ffn_hidden_size": 12}
        parallel |= {"ep": draw(st.sampled_from([1, 2, 3, 4])), "expert_tp": draw(st.sampled_from([1, 1, 2, 3]))}
    return run(model, parallel, micro=draw(st.integers(1, 3)), batch=draw(st.integers(1, 24)), length=48)


@given(runs(), st.integers(1, 16))
@settings(deadline=None, max_examples=150)
def test_following_the_suggestion_works(raw: dict[str, Any], world: int) -> None:
    try:
        config = RunConfig.parse(raw)
    except ConfigError:
        assume(False)
    for problem in config.parallel_rules.find_world_size_problems(world):
        if degrees := re.findall(r"parallel\.(\w+)=([\w-]+)", problem.hint):
            chosen = {name: int(value) if value.isdigit() else value for name, value in degrees}
            raw = raw | {"parallel": raw["parallel"] | chosen}
        elif problem.path == "batch.global":
            raw = raw | {"batch": raw["batch"] | {"global": int(problem.hint.removeprefix("set batch.global="))}}
        elif problem.path == "parallel.dp":
            raw = raw | {"parallel": raw["parallel"] | {"dp": None}}
        else:
            sizes = re.findall(r"\d+", problem.hint)
            assert problem.hint == (
                f"start {' or '.join(sizes)} ranks"
                if sizes
                else "change the number of ranks, and batch.global to fit it"
            )
            for size in sizes:
                RunConfig.parse(raw).check_world_size(int(size))
            return
    RunConfig.parse(raw).check_world_size(world)


@pytest.mark.parametrize(
    ("model", "parallel", "length", "says"),
    [
        ({}, {"cp": 4}, 20, "parallel.cp = 4: requires data.seq_length to be a multiple of 2 x parallel.cp 4 = 8, found 20 -> set parallel.cp=2, or set data.seq_length=16"),
        ({}, {"cp": 2, "tp": 4, "sp": True}, 8, "multiple of 2 x parallel.cp 2 x parallel.tp 4 (with sp) = 16, found 8 -> set parallel.cp=1, or set data.seq_length=16"),
        ({}, {"tp": 4, "sp": True}, 6, "multiple of parallel.tp 4 (with sp) = 4 -> set data.seq_length=4, or set parallel.sp=false"),
        ({"attention_dropout": 0.1}, {"cp": 2}, 16, "-> set parallel.cp_kind=alltoall, or set model.attention_dropout=0"),
        ({}, {"cp": 4, "tp": 4, "cp_kind": "alltoall"}, 16, "one of [1, 2]), or set parallel.cp_kind=ring"),
        ({"num_attention_heads": 6, "head_dim": 4, "num_kv_heads": 2}, {"cp": 3, "cp_kind": "alltoall"}, 24,
         "its 2 key/value heads, with parallel.cp_kind = alltoall -> set parallel.cp=2 (one of [1, 2, 6])"),
    ],
)  # fmt: skip
def test_a_split_of_the_sequence_that_does_not_fit(
    model: dict[str, Any], parallel: dict[str, Any], length: int, says: str
) -> None:
    assert says in error_message(run(model, parallel, length=length))


def test_a_sequence_may_be_split_further_than_there_are_heads_unless_they_are_exchanged() -> None:
    parallel = {"cp": 8, "tp": 4}
    RunConfig.parse(run({"num_kv_heads": 2}, {**parallel, "cp_kind": "ring"}))
    RunConfig.parse(run({"num_kv_heads": 2}, {"cp": 4, "tp": 2, "cp_kind": "alltoall"}))
    assert "parallel.cp_kind=ring" in error_message(run({"num_kv_heads": 2}, {**parallel, "cp_kind": "alltoall"}))


def test_a_suggestion_is_near_what_was_asked() -> None:
    config = RunConfig.parse(run(parallel={"tp": 4, "pp": 2}))
    with pytest.raises(
        ConfigError,
        match=r"tp 4 x pp 2 x cp 1 = 8 does not divide 4 -> set parallel.tp=4, parallel.pp=1, parallel.dp=1",
    ):
        config.check_world_size(4)


def test_a_suggestion_needs_no_more_memory_where_one_can_be_had() -> None:
    """Of those that are as near, and otherwise it says so, and how many ranks would do."""
    config = RunConfig.parse(run(parallel={"tp": 2, "pp": 2}, batch=24))
    (problem,) = config.parallel_rules.find_world_size_problems(6)
    assert problem.hint == "set parallel.tp=2, parallel.pp=3, parallel.dp=1"
    with_context = RunConfig.parse(run(parallel={"tp": 4, "pp": 2, "cp": 2}, length=48, batch=40))
    (problem,) = with_context.parallel_rules.find_world_size_problems(20)
    assert (
        problem.hint
        == "set parallel.tp=4, parallel.pp=1, parallel.cp=1, parallel.dp=5, which needs more memory on each rank; or start 16 or 32 ranks"
    )


def test_the_fewest_ranks_have_room_for_the_experts() -> None:
    moe = {"moe": {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 12}}
    for parallel, fewest in (({"ep": 4}, 4), ({"ep": 2, "expert_tp": 2, "pp": 2}, 8), ({"ep": 4, "tp": 2, "cp": 2}, 4), ({"ep": 4, "dp": 8}, 8)):  # fmt: skip
        config = RunConfig.parse(run(moe, parallel, batch=24))
        assert config.parallel_rules.minimum_ranks == fewest
        config.check_world_size(fewest)


def test_degrees_and_batch_are_told_together() -> None:
    config = RunConfig.parse(run(parallel={"tp": 2, "dp": 3}, batch=7))
    with pytest.raises(ConfigError) as error:
        config.check_world_size(4)
    assert "2 problems" in str(error.value)
    assert "parallel.dp = 3: must be 2 on 4 ranks -> remove parallel.dp, or start 6 ranks" in str(error.value)
    assert "batch.global = 7" in str(error.value)
