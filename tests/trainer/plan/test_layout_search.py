from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan.layout_candidates import generate_layout_candidates
from mega_trainer.plan.layout_changes import find_faster_layout_changes, find_fitting_layout_changes
from mega_trainer.plan.layout_search import (
    find_best_layouts,
    layout_to_yaml,
    make_planned_run,
)
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.memory_advice import apply_settings, make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.plan.other_trainers import OTHER_TRAINERS, SEARCH_MARGIN
from mega_trainer.plan.training_layout import TrainingLayout

H100 = load_machine("h100")


def run(model: dict[str, Any], batch: int, length: int, **sections: Any) -> RunConfig:
    raw = {"model": model, "data": {"train": ["x"], "seq_length": length}, "batch": {"global": batch, "micro": 1}}
    return RunConfig.parse({**raw, **sections})


@settings(max_examples=6, deadline=None)
@given(
    heads=st.sampled_from([(4, 2), (12, 12), (8, 1)]),
    layers=st.integers(1, 7),
    experts=st.sampled_from([None, 4, 6]),
    ranks=st.sampled_from([1, 2, 6, 8, 12]),
    batch=st.sampled_from([8, 12, 96]),
    length=st.sampled_from([48, 4096, 8192]),
    precision=st.sampled_from(["bf16", "fp8"]),
)
def test_what_is_proposed_is_legal(
    heads: tuple[int, int], layers: int, experts: int | None, ranks: int, batch: int, length: int, precision: str
) -> None:
    queries, keys = heads
    model: dict[str, Any] = {
        "num_layers": layers, "hidden_size": 32 * queries, "ffn_hidden_size": 384, "num_attention_heads": queries,
        "num_kv_heads": keys, "vocab_size": 512, "max_position": 8192,
    }  # fmt: skip
    if experts:
        model["moe"] = {"num_experts": experts, "top_k": 2, "ffn_hidden_size": 96}
    config = run(model, batch, length, precision=precision)
    try:
        found = find_best_layouts(config, ranks, H100, keep=3)
    except ConfigError as error:
        assert "no layout of this run fits" in str(error)  # noqa: PT017
        return
    for layout in found:
        proposed = yaml.safe_load(layout_to_yaml(layout))
        raw = config.model_dump(mode="json", by_alias=True, exclude_none=True)
        merged = RunConfig.parse({**raw, **proposed, "batch": {**raw["batch"], **proposed["batch"]}})
        merged.check_world_size(ranks)
        assert layout.memory <= H100.memory_gb * 1e9
        assert proposed["parallel"]["tp"] <= H100.ranks_per_node
    assert [layout.time.seconds for layout in found] == sorted(layout.time.seconds for layout in found)


def test_sharded_weights_in_a_pipeline_are_candidates() -> None:
    config = run(load_model_preset("llama3-8b"), 64, 8192)
    tried = [layout for _, layout in generate_layout_candidates(config, 16, H100) if layout.pp > 1 and layout.zero == 3]
    assert {layout.zero3_gather for layout in tried} == {"micro_batch", "step"}
    parallel = {"pp": 4, "zero": 3, "sp": False}
    times = {}
    for gather in ("micro_batch", "step"):
        piped = run(
            load_model_preset("llama3-8b"), 64, 8192, parallel={**parallel, "zero3_gather": gather}, precision="bf16"
        )
        planned = make_planned_run(piped, 16, H100)
        times[gather] = planned.predict_step_time().seconds
    assert times["step"] < times["micro_batch"]


def test_most_of_what_is_timed_is_legal() -> None:
    """So that few of the fastest are looked at in vain."""
    config = run(load_model_preset("llama3-8b"), 64, 8192)
    tried = list(generate_layout_candidates(config, 16, H100))[::29]
    legal = 0
    for chosen, _ in tried:
        try:
            apply_settings(config, chosen).check_world_size(16)
        except ConfigError:
            continue
        legal += 1
    assert legal >= 0.9 * len(tried) > 10


EXPERTS = {
    "num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 2048, "num_attention_heads": 8, "vocab_size": 32_000,
    "max_position": 4096, "moe": {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 1024},
}  # fmt: skip


def test_hidden_exchange_of_experts_is_a_choice_where_it_is_legal() -> None:
    """DualPipeV is tried for it alone; a dispatcher without asynchronous calls cannot hide its exchange."""
    config = run(EXPERTS, 64, 4096)
    tried = list(generate_layout_candidates(config, 16, H100))
    hiding = [(chosen, layout) for chosen, layout in tried if layout.overlap_expert_exchange and layout.cp == 1]
    assert {layout.schedule for _, layout in hiding} == {"1f1b", "dualpipev"}
    assert all(layout.overlap_expert_exchange for _, layout in tried if layout.schedule == "dualpipev")
    for chosen, _ in hiding[::97]:
        apply_settings(config, chosen).check_world_size(16)
    waiting = run(EXPERTS, 64, 4096, parallel={"ep": 2, "dispatch": "nvshmem", "dispatch_bound": 1.25})
    assert not any(layout.overlap_expert_exchange for _, layout in generate_layout_candidates(waiting, 16, H100))


def test_minimum_time_knows_the_busiest_rank_and_what_an_exchange_cannot_hide() -> None:
    """A head of many tokens is as much work as several layers, of which a rank cannot have less than one."""
    config = run({**EXPERTS, "vocab_size": 256_000}, 64, 4096)
    parallel = {"parallel.pp": 8, "parallel.ep": 2, "batch.micro": 1}
    for overlap in (False, True):
        planned = make_planned_run(
            apply_settings(config, {**parallel, "parallel.overlap_expert_exchange": overlap}), 16, H100
        )
        imbalance = planned.compute_rank_imbalance(planned.predict_part_seconds())
        least, known = planned.estimate_minimum_seconds(), planned.estimate_minimum_seconds(imbalance=imbalance)
        assert imbalance > 1.5
        assert 1.3 * least < known < planned.predict_step_time().seconds < 1.1 * known


def test_a_short_step_is_not_spent_on_a_pipeline() -> None:
    """Those come first in the rough order, for their waits are taken for shorter than they are; nanotron's sweep found tp alone."""
    config = run(load_model_preset("llama3-8b"), 256, 4096)
    best = find_best_layouts(config, 512, H100, keep=2)
    alone = {"parallel.tp": 4, "parallel.sp": True, "batch.micro": 2}
    assert best[0].time.seconds < make_planned_run(apply_settings(config, alone), 512, H100).predict_step_time().seconds


@pytest.mark.parametrize(
    ("name", "changes", "can"),
    [
        ("megatron", {"virtual_stages": 8}, True), ("megatron", {"virtual_stages": 5}, False), ("megatron", {"zero": 3}, False),
        ("megatron", {"zero": 3, "pp": 1}, True), ("megatron", {"schedule": "zb-h1"}, False), ("megatron", {"offload": 2}, False),
        ("megatron", {"recompute": "full"}, True), ("megatron", {"recompute": "selective"}, False),
        ("nanotron", {}, True), ("nanotron", {"zero": 0}, True), ("nanotron", {"recompute": "selective"}, False),
        ("fsdp2", {}, False), ("fsdp2", {"zero": 3, "schedule": "zbv", "virtual_stages": 2}, True),
        ("fsdp2", {"zero": 3, "cp": 2, "cp_kind": "alltoall"}, False),
    ],
)  # fmt: skip
def test_other_trainers_run_the_layouts_that_they_can(name: str, changes: dict[str, Any], can: bool) -> None:
    model = ModelConfig.parse(load_model_preset("llama3-8b"))
    shape = TrainingLayout(8192, 1, 8, pp=2, dp=4, zero=1)
    assert OTHER_TRAINERS[name].supports_layout(model, replace(shape, **changes)) is can
    if changes == {"recompute": "selective"}:  # of Megatron's modules to recompute, two are of layers with experts
        experts = ModelConfig.parse(load_model_preset("mixtral-8x7b"))
        assert OTHER_TRAINERS[name].supports_layout(experts, replace(shape, **changes)) is (name == "megatron")


def test_a_search_for_another_trainer_has_a_margin_of_memory() -> None:
    config, like = run(load_model_preset("llama3-8b"), 64, 4096), OTHER_TRAINERS["nanotron"]
    first = find_best_layouts(config, 8, H100, keep=3, like=like)[0]
    assert SEARCH_MARGIN * first.memory <= H100.usable_memory_bytes

    def finds_it(memory: float) -> bool:
        machine = H100.model_copy(update={"memory_gib": memory / 2**30})
        return first.settings in [one.settings for one in find_best_layouts(config, 8, machine, keep=3, like=like)]

    assert finds_it((SEARCH_MARGIN + 0.005) * first.memory)
    assert not finds_it((SEARCH_MARGIN - 0.005) * first.memory)


def test_a_change_that_gains_is_told_and_fits() -> None:
    slow = run(load_model_preset("llama3-8b"), 64, 8192, parallel={"tp": 8, "sp": True}, recompute={"kind": "full"})
    told = find_faster_layout_changes(slow, 8, H100)
    assert told
    assert told[0].settings == {"recompute": {"kind": "none"}}
    apply_settings(slow, told[0].settings).check_world_size(8)


def test_a_layout_that_does_not_fit_has_changes_that_fit() -> None:
    tight = run(load_model_preset("llama3-70b"), 128, 8192, parallel={"tp": 4, "sp": True, "pp": 4})
    found = find_fitting_layout_changes(tight, 32, H100)
    assert found
    assert all(layout.memory <= H100.usable_memory_bytes for layout in found)
    assert [layout.time.seconds for layout in found] == sorted(layout.time.seconds for layout in found)
    hopeless = run(load_model_preset("llama3-405b"), 8, 8192, parallel={"tp": 8, "sp": True})
    assert find_fitting_layout_changes(hopeless, 8, H100) == []


def test_a_layouts_quick_time_does_not_depend_on_the_layout_that_it_is_derived_from() -> None:
    config = run(load_model_preset("mixtral-8x7b"), 64, 4096)
    base = make_planned_run(config, 1, H100)
    for chosen, shape in list(generate_layout_candidates(config, 16, H100))[::397]:
        planned = make_planned_run(apply_settings(config, {**chosen, "parallel.dp": None}), 16, H100)
        quick = base.with_training_layout(shape).estimate_minimum_seconds()
        assert quick == pytest.approx(planned.estimate_minimum_seconds())


def test_what_never_fits_is_told_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="no layout of this run fits 8 GPUs of 80 GB"):
        find_best_layouts(run(load_model_preset("llama3-405b"), 8, 8192), 8, H100)


def test_what_fits_no_other_way_has_state_and_activations_in_host_memory() -> None:
    """70B on eight GPUs: 18 bytes a parameter are twice their memory."""
    given = ("batch.micro", "recompute")
    found = find_best_layouts(run(load_model_preset("llama3-70b"), 8, 8192), 8, H100, keep=1, fixed=given)[0]
    assert found.settings["optimizer.offload"]
    assert found.memory <= H100.usable_memory_bytes
    assert found.time.parts["optimizer"] > 28 * 70.5e9 / 8 / 64e9


def test_another_precision_is_found_only_where_it_is_asked_for() -> None:
    config = run({**load_model_preset("llama3-8b"), "num_layers": 2}, 4, 8192)
    assert "precision" not in find_best_layouts(config, 2, H100, keep=1)[0].settings
    best = find_best_layouts(config, 2, H100, keep=1, precisions=["bf16", "fp8"])[0]
    assert best.settings["precision"] == "fp8"
    assert "precision: fp8" in layout_to_yaml(best)


def test_four_bits_take_less_time_and_memory_than_eight_on_a_gpu_that_has_them() -> None:
    config = run({**load_model_preset("llama3-8b"), "num_layers": 4}, 4, 8192)
    eight, four = (
        apply_settings(config, {"precision": "fp8", "fp8.recipe": recipe, "parallel.zero": 1})
        for recipe in ("mxfp8", "nvfp4")
    )
    (slow, large), (fast, small) = (
        (
            make_planned_run(one, 4, load_machine("b200")).predict_step_time().seconds,
            predict_memory(one.model, make_training_layout(one, 4))[0]["weights"],
        )
        for one in (eight, four)
    )
    assert fast < 0.95 * slow
    assert small < large
    with pytest.raises(ConfigError, match="nvfp4 is not supported on H100"):
        make_planned_run(four, 4, H100)
