from __future__ import annotations

from dataclasses import replace

import pytest

from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.pipeline.schedules import PipelineOp, make_pipeline_schedule, simulate_pipeline_schedule
from mega_trainer.plan.flops import compute_model_flops_per_token
from mega_trainer.plan.kernel_throughput import GpuThroughput
from mega_trainer.plan.layer_cost import PassSeconds, TrainerProfile
from mega_trainer.plan.layer_flops import recurrence_bytes
from mega_trainer.plan.machine import load_default_efficiencies, load_machine
from mega_trainer.plan.step_time import PlannedRun, StageCosts, predict_step_time
from mega_trainer.plan.training_layout import TrainingLayout

H100, HOPPER = load_machine("h100"), load_default_efficiencies()["hopper"]
LLAMA = ModelConfig.parse(load_model_preset("llama3-8b"))
MIXTRAL = ModelConfig.parse(load_model_preset("mixtral-8x7b"))
RUN = TrainingLayout(8192, micro_batch=1, microbatches=8, dp=8, zero=1)


def seconds(run: TrainingLayout, model: ModelConfig = LLAMA, profile: TrainerProfile | None = None) -> float:
    return predict_step_time(model, run, H100, HOPPER, profile).seconds


def test_parts_add_up_and_products_alone_take_no_less_than_their_flops() -> None:
    told = predict_step_time(LLAMA, RUN, H100, HOPPER)
    assert sum(told.parts.values()) == pytest.approx(told.seconds)
    assert told.seconds > 8 * 8192 * compute_model_flops_per_token(LLAMA, 8192) / H100.get_peak_flops("bf16")


@pytest.mark.parametrize(
    ("model", "run", "measured"),
    [
        ("llama3-8b", TrainingLayout(8192, 1, 32, cp=2, dp=4, zero=1), 12.27),
        ("llama3-70b", TrainingLayout(8192, 1, 64, tp=4, sp=True, pp=4, virtual_stages=5, cp=2, dp=2, zero=1), 14.66),
    ],
)
def test_a_published_run_takes_as_long_as_was_measured(model: str, run: TrainingLayout, measured: float) -> None:
    """Batches of 128 samples on 8 and 64 H100s: dgxc-benchmarking v25.04.01."""
    peers = TrainerProfile(tp_waited=2, gradient_bytes=2)
    assert seconds(run, ModelConfig.parse(load_model_preset(model)), peers) == pytest.approx(measured, rel=0.15)


def test_packed_documents_attend_to_as_many_tokens_as_documents_of_their_own() -> None:
    packed = predict_step_time(LLAMA, replace(RUN, document_length=512), H100, HOPPER)
    alone = predict_step_time(LLAMA, replace(RUN, seq_length=512, micro_batch=16), H100, HOPPER)
    whole = predict_step_time(LLAMA, replace(RUN, document_length=1 << 20), H100, HOPPER)
    assert packed.parts["attention"] == pytest.approx(alone.parts["attention"])
    assert packed.parts["products"] == whole.parts["products"]
    assert whole == predict_step_time(LLAMA, RUN, H100, HOPPER)


def test_frozen_weights_need_no_inputs_again_and_hide_no_collectives_and_their_operands_are_quantised_once() -> None:
    """Of the ten collectives of a layer, four of six are waited for in mega; without weight gradients all eight that are left."""
    split = replace(RUN, tp=2, sp=True, dp=4)
    trained, frozen = (
        predict_step_time(LLAMA, replace(split, freeze=names), H100, HOPPER) for names in ((), ("model.layers.*",))
    )
    one = trained.parts["tensor"] / (6 + 4 * HOPPER.contention)  # four run beside GEMMs that are longer
    assert frozen.parts["tensor"] == pytest.approx(8 * one)
    model = PlannedRun.from_settings(LLAMA, replace(RUN, precision="fp8"), H100, HOPPER, TrainerProfile()).cost_model
    quantised = (3 * 4096 * 6144, 3 * 4096 * 8192, 4096 * (6144 + 8192))  # bytes: of frozen weights without the last
    shapes = ((4096, 8192, 6144), (4096, 6144, 8192), (8192, 6144, 4096))
    for found, moved, (rows, columns, inner), result in zip(
        model._gemm(4096, 8192, 6144), quantised, shapes, (2, 2, 8), strict=True
    ):
        moved += rows * inner + columns * inner + result * rows * columns
        product = model.rates.gemm_compute_seconds((rows, columns, inner), "fp8")
        assert found == pytest.approx(model.rates.kernel + product + moved / model.rates.memory)


def test_a_layer_of_each_kind_takes_time_of_its_own_and_a_recurrence_less_the_longer_the_sequence() -> None:
    delta = {"num_key_heads": 8, "num_value_heads": 16, "key_head_dim": 128, "value_head_dim": 128}
    sections = {"mamba": {"num_heads": 64, "head_dim": 64, "num_groups": 8}, "delta": delta}
    plain = load_model_preset("llama3-8b") | {"num_layers": 4}
    kinds = [
        ModelConfig.parse({**plain, **sections, "layers": [kind] * 4})
        for kind in ("attention", "mamba", "delta", "mlp")
    ]
    for model in kinds:
        assert seconds(RUN, model) > 8 * 8192 * compute_model_flops_per_token(model, 8192) / H100.get_peak_flops("bf16")
    far = replace(RUN, seq_length=1 << 20, cp=8, dp=1)
    attention, mamba, rule, _ = (seconds(far, model) for model in kinds)
    assert attention > 2 * max(mamba, rule)


def test_mamba1_scans_in_fp32_and_adds_gradients_of_all_channels() -> None:
    """100 channels of 16 states: x, d and y of 4 bytes copied and used by the kernel, less 2 bytes each that are counted with
    elementwise work; in the backward also d and y's gradients, and 16 sums of 4 bytes for B and for C.
    """
    sections = {"layers": ["mamba1"] * 4, "mamba1": {"inner_size": 100, "state_size": 16, "dt_rank": 4}}
    model = ModelConfig.parse({**load_model_preset("llama3-8b"), "num_layers": 4, **sections})
    copies, kernel, states = (2 + 4) + (4 + 4) + (4 + 4), 3 * 4, 2 * 16 * 4 / 2048
    back_copies, back_kernel, sums = (4 + 4) + (4 + 2) + (4 + 4), 5 * 4, 2 * 16 * 4
    expected = copies + kernel + states - 3 * 2, back_copies + back_kernel + states + sums - 5 * 2
    assert recurrence_bytes(model, "mamba1") == pytest.approx([100 * each for each in expected])
    planned = PlannedRun.from_settings(model, RUN, H100, HOPPER, TrainerProfile())
    slow = replace(
        planned.cost_model, rates=replace(planned.cost_model.rates, memory=planned.cost_model.rates.memory / 2)
    )
    before, after = (one.predict_layer_seconds(0)["recurrence"] for one in (planned.cost_model, slow))
    added = 8192 * 100 / planned.cost_model.rates.memory
    assert after.forward - before.forward == pytest.approx(added * expected[0])
    assert after.inputs - before.inputs == pytest.approx(added * expected[1])


def test_a_chunked_recurrence_moves_the_states_of_its_chunks() -> None:
    """Nemotron-3-Nano by hand: 4,096 channels of 128 states in chunks of 128 tokens, 8 groups; 90 and 247 kB of all, of which
    inputs and outputs are counted elsewhere.
    """
    model = ModelConfig.parse(load_model_preset("nemotron-3-nano"))
    x, states, matrices, products = 2 * 4096, 4 * 4096, 2 * 8 * 128, 4 * 8 * 128
    forward = 3 * x + 2 * states + 2 * states // 2 + 4 * matrices + 2 * products
    backward = 11 * x + 2 * states + 9 * states // 2 + 13 * matrices + 6 * products
    counted = 2 * x + 2 * matrices, 4 * x + 4 * matrices
    assert recurrence_bytes(model, "mamba") == (forward - counted[0], backward - counted[1])
    assert recurrence_bytes(model, "attention") == (0, 0)
    fast = replace(GpuThroughput.from_machine(H100, HOPPER, "fused"), scan=1e30)
    planned = PlannedRun.from_settings(model, RUN, H100, HOPPER, TrainerProfile())
    mamba = next(index for index, kind in enumerate(model.layer_kinds) if kind.mixer == "mamba")
    layer = replace(planned.cost_model, rates=fast).predict_layer_seconds(mamba)["recurrence"]
    assert layer.forward == pytest.approx(8192 * (forward - counted[0]) / fast.memory + 5 * fast.kernel)
    assert layer.inputs == pytest.approx(8192 * (backward - counted[1]) / fast.memory + 14 * fast.kernel)


def test_profiles_of_other_trainers_change_the_parts_that_they_are_about() -> None:
    run = TrainingLayout(8192, 1, 8, dp=8, zero=1)
    plain = TrainerProfile()
    base = predict_step_time(LLAMA, run, H100, HOPPER, plain).parts
    for change, part in (
        ({"overlaps_reduction": False}, "data"), ({"loss_bytes": 52.0}, "head"), ({"wgrad_bytes": 12}, "products"),
    ):  # fmt: skip
        changed = predict_step_time(LLAMA, run, H100, HOPPER, replace(plain, **change)).parts
        assert {name for name in base if changed[name] > base[name] * 1.001} >= {part}
        assert all(changed[name] == base[name] for name in base if name not in (part, "head"))
    sharded = replace(run, zero=3)
    copied, placed = (
        predict_step_time(LLAMA, sharded, H100, HOPPER, replace(plain, copies_shards=copies)).parts["optimizer"]
        for copies in (True, False)
    )
    assert copied > 2 * placed


@pytest.mark.parametrize(
    ("split", "layers"), [("balanced", [8, 9, 9, 6]), ("even", [8, 8, 8, 8]), ("shares", [9, 9, 8, 6])]
)
def test_other_trainers_split_layers_in_their_ways(split: str, layers: list[int]) -> None:
    run = TrainingLayout(8192, 1, 8, pp=4, dp=2, zero=1)
    planned = PlannedRun.from_settings(LLAMA, run, H100, HOPPER, TrainerProfile(split=split))
    assert [len(stage) for stage in planned.stage_layers] == layers


def test_a_pipeline_is_its_own_schedule_simulated_whatever_the_number_of_microbatches() -> None:
    run = replace(RUN, pp=4, virtual_stages=2, dp=2, microbatches=37)
    planned = PlannedRun.from_settings(LLAMA, run, H100, HOPPER, TrainerProfile())
    works = planned.predict_stage_seconds()
    passes = tuple(PassSeconds(*(sum(cost) for cost in zip(*work.values(), strict=True))) for work in works)
    message = planned.cost_model.interconnect.send_seconds(2 * 8192 * 4096, run.dp)
    schedule = make_pipeline_schedule("1f1b", pp=4, microbatches=37, virtual_stages=2)
    whole = simulate_pipeline_schedule(schedule, StageCosts(message=message, passes=passes)).makespan
    told = planned.predict_step_time()
    once = told.parts["data"] + told.parts["optimizer"]
    assert told.seconds - once == pytest.approx(whole, rel=1e-3)
    assert planned.predict_minimum_time().seconds <= told.seconds * 1.001


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"recompute": "full"}, {}),
        ({"recompute": "full"}, {"recompute": "selective"}),
        ({"tp": 2, "dp": 4}, {"tp": 2, "dp": 4, "sp": True}),
        ({"tp": 2, "dp": 4, "sp": True}, {"tp": 2, "dp": 4, "sp": True, "tp_comm_overlap": True}),
        ({"pp": 4, "dp": 2}, {"pp": 4, "dp": 2, "virtual_stages": 4}),
        ({"pp": 4, "dp": 2}, {"pp": 4, "dp": 2, "schedule": "zb-h1"}),
        ({}, {"precision": "fp8"}),
        ({"zero": 3, "microbatches": 8}, {"zero": 1, "microbatches": 8}),
        ({"offload": 32}, {}),
        ({"offload_optimizer": True}, {}),
        ({"tp": 16, "sp": True, "dp": 1}, {"tp": 8, "sp": True, "dp": 2, "microbatches": 4}),
    ],
)
def test_what_costs_more_takes_longer(slower: dict[str, object], faster: dict[str, object]) -> None:
    assert seconds(replace(RUN, **slower)) > 1.01 * seconds(replace(RUN, **faster))


def test_experts_on_other_nodes_cost_more_than_on_one_and_less_when_a_token_goes_once_to_a_node() -> None:
    one, far = (replace(RUN, seq_length=4096, dp=64, ep=ep) for ep in (8, 8))
    narrow = H100.model_copy(update={"ranks_per_node": 2})
    near = predict_step_time(MIXTRAL, one, H100, HOPPER).parts["expert"]
    apart = predict_step_time(MIXTRAL, far, narrow, HOPPER).parts["expert"]
    once = predict_step_time(MIXTRAL, far, narrow, HOPPER, TrainerProfile(dispatch="node")).parts["expert"]
    assert near < once < apart


@pytest.mark.parametrize(
    ("pp", "virtual", "schedule"), [(1, 1, "1f1b"), (4, 1, "1f1b"), (4, 2, "1f1b"), (4, 2, "dualpipev")]
)
def test_an_exchange_beside_another_micro_batch_is_hidden(pp: int, virtual: int, schedule: str) -> None:
    apart = replace(
        RUN, seq_length=4096, dp=8, ep=8, pp=pp, virtual_stages=virtual, schedule=schedule, microbatches=61, zero=0
    )
    together = replace(apart, overlap_expert_exchange=True)
    before, after = (predict_step_time(MIXTRAL, run, H100, HOPPER) for run in (apart, together))
    assert before.hidden_exchange == 0
    assert after.hidden_exchange > 0.5 * before.parts["expert"]
    assert after.hidden_exchange + after.parts["expert"] == pytest.approx(before.parts["expert"])
    assert sum(after.parts.values()) == pytest.approx(after.seconds)
    planned = PlannedRun.from_settings(MIXTRAL, together, H100, HOPPER, TrainerProfile())
    full = make_pipeline_schedule(schedule, pp=pp, microbatches=61, virtual_stages=virtual, pairs_passes=True)
    makespan = simulate_pipeline_schedule(full, planned.make_stage_costs(planned.predict_stage_seconds())).makespan
    once = after.parts["optimizer"] + after.parts.get("data", 0.0)
    assert after.seconds - once == pytest.approx(makespan, rel=5e-3)
    assert planned.predict_minimum_time().seconds <= after.seconds < before.seconds


def test_a_pair_hides_no_more_exchange_than_there_is_computation_beside_it() -> None:
    forward, backward = PipelineOp("F", 0, 1), PipelineOp("B", 0, 0)
    busy = StageCosts(passes=(PassSeconds(9, 12, 6),), exchanges=(PassSeconds(4, 4, 0),), hiding=(0.8,))
    assert busy.pair_duration(forward, backward) == pytest.approx(9 + 18 - 4 - 4)
    waiting = StageCosts(passes=(PassSeconds(9, 12, 6),), exchanges=(PassSeconds(8, 10, 0),), hiding=(0.5,))
    assert waiting.pair_duration(forward, backward) == pytest.approx(9 + 18 - 0.5 * (18 - 10) - 0.5 * (9 - 8))


def test_small_products_of_many_experts_reach_less_than_large_ones() -> None:
    """As many operations a token: eight experts of 4096 columns, or 128 of 256."""
    few, many = (
        MIXTRAL.model_copy(
            update={
                "moe": MIXTRAL.moe.model_copy(
                    update={"num_experts": experts, "top_k": experts // 4, "ffn_hidden_size": 32_768 // experts}
                )
            }
        )
        for experts in (8, 128)
        if MIXTRAL.moe
    )
    assert compute_model_flops_per_token(few, 4096) == pytest.approx(
        compute_model_flops_per_token(many, 4096), rel=0.01
    )
    run = replace(RUN, seq_length=4096)
    assert seconds(run, many) > 1.15 * seconds(run, few)


def test_a_host_that_waits_for_counts_is_what_small_layers_take() -> None:
    run = replace(RUN, seq_length=1024, ep=8)
    told = predict_step_time(MIXTRAL, run, H100, HOPPER, TrainerProfile(host=0.1))
    assert told.seconds == pytest.approx(run.microbatches * MIXTRAL.num_layers * 0.1, rel=0.05)
    large = replace(RUN, ep=8)
    assert seconds(large, MIXTRAL, TrainerProfile(host=1e-3)) == seconds(large, MIXTRAL)


def test_a_slower_network_is_felt_where_gradients_leave_a_node() -> None:
    ethernet = H100.model_copy(update={"networks_gb_s": {"ethernet": 1.25}})
    for run, differs in ((replace(RUN, dp=64), True), (RUN, False)):
        times = [predict_step_time(LLAMA, run, machine, HOPPER).seconds for machine in (H100, ethernet)]
        assert (times[1] > 1.05 * times[0]) is differs


def test_experts_between_latents_take_the_time_of_narrow_rows() -> None:
    """Nemotron-3-Super was predicted 5.6 times too slow: its experts read and send 1,024 of 4,096 elements."""
    wide = MIXTRAL.model_copy(update={"moe": MIXTRAL.moe.model_copy(update={"ffn_hidden_size": 14_336})})
    narrow = MIXTRAL.model_copy(update={"moe": MIXTRAL.moe.model_copy(update={"latent_size": 1024})})
    run = replace(RUN, seq_length=4096, ep=8)
    times = [predict_step_time(model, run, H100, HOPPER).parts for model in (wide, narrow)]
    assert times[1]["expert"] == pytest.approx(times[0]["expert"] / 4, rel=0.15)
    assert times[1]["products"] < 0.5 * times[0]["products"]
