"""Any layout of ranks computes what one process computes. `make parity` runs them all, `make parity N=60` in CI a covering sixty,
of which these are the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from deepep_twin import deepep_twin
from parity.cases import (
    COMPRESSED,
    MODELS,
    SHARED_BIAS,
    SHARED_KEYS,
    SHORTCUT,
    SINKHORN,
    VARIANTS,
    all_layouts,
    case,
    covering,
)
from ranks import run_ranks

from mega_trainer.verify.case_comparison import (
    CaseVerdict,
    RankFindings,
    compare_cases_with_one_process,
    merge_findings_by_case,
)
from mega_trainer.verify.layout_case import LayoutCase

# one case in so many of a table; `make test-long` runs all of it
ONE_IN_THREE = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


def results(cases: list[LayoutCase], ranks: int) -> list[CaseVerdict]:
    """Each case against one process."""
    return merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, ranks, cases, timeout=280))


def problems(cases: list[LayoutCase], ranks: int) -> list[str]:
    """What is wrong with any of them."""
    return [problem for one in results(cases, ranks) if (problem := one.describe_problem(1e-10))]


def test_a_covering_of_all_layouts() -> None:
    assert not problems(covering(all_layouts(), 6), 8)


def test_a_growing_batch_and_rates_of_embedding_and_output_and_by_name() -> None:
    more: dict[str, Any] = {"rampup": {"start": 4, "increment": 4, "samples": 8}, "batch": 12, "decoupled_lr": 3e-2}
    more["lr_factors"] = {"model.*": 0.5, "model.layers.1.*": 0.1, "model.projector.*": 3.0}
    shapes = [
        ("tied", {"tp": 2, "zero": 2}, 2), ("gqa", {"pp": 2, "virtual_stages": 2}, 1), ("long", {"cp": 2, "zero": 3}, 1),
        ("moe", {"tp": 2, "ep": 4}, 2), ("vision", {"tp": 2, "sp": True, "zero": 1}, 2),
    ]  # fmt: skip
    cases = [
        case(name, 4, layers=shape.get("pp", 1) * 2, parallel=shape, micro=micro, **more)
        for name, shape, micro in shapes
    ]
    assert not problems(cases, 4)


@ONE_IN_THREE
def test_latents_without_norms(every: int) -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (1, {}), (2, {"tp": 2}), (2, {"tp": 2, "sp": True}), (2, {"cp": 2}), (2, {"pp": 2}), (4, {"tp": 4, "sp": True}),
        (4, {"tp": 2, "sp": True, "cp": 2, "cp_kind": "alltoall"}), (4, {"tp": 2, "pp": 2, "zero": 1}),
        (4, {"cp": 2, "pp": 2}), (4, {"tp": 2, "zero": 3}),
    ]  # fmt: skip
    cases = [
        case(name, ranks, layers=shape.get("pp", 1) * 2, parallel=shape, micro=2, variant=VARIANTS["mla"][2])
        for ranks, shape in shapes
        for name in ("mla", "deepseek")
    ]
    assert not problems(cases[every // 2 :: every], 4)


def test_sparse_attention_and_the_loss_of_its_indexer() -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2}), (2, {"pp": 2, "schedule": "zb-h1"}), (4, {"tp": 4, "sp": True}),
        (4, {"tp": 2, "sp": True, "cp": 2}), (4, {"cp": 2, "pp": 2, "cp_kind": "alltoall"}), (4, {"tp": 2, "zero": 3}),
        (4, {"cp": 2, "zero": 1, "cp_kind": "allgather"}),
    ]  # fmt: skip
    cases = [
        case(
            "mla",
            ranks,
            layers=shape.get("pp", 1) * 2,
            parallel=shape,
            micro=2,
            variant=VARIANTS["mla"][5 + number % 2],
        )
        for number, (ranks, shape) in enumerate(shapes)
    ]
    experts = case("deepseek", 4, parallel={"tp": 2, "ep": 4}, micro=2, variant=VARIANTS["mla"][5])
    again = case("mla", 2, parallel={"tp": 2}, variant=VARIANTS["mla"][5], recompute={"kind": "full"})
    some = {"kind": "selective", "modules": ["attention"]}
    part = case("mla", 2, parallel={"cp": 2}, variant=VARIANTS["mla"][5], recompute=some)
    assert not problems([*cases, experts, again, part], 4)


@ONE_IN_THREE
def test_inputs_of_each_layer_shared_keys_and_experts_with_norms_of_their_own(every: int) -> None:
    shapes: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (2, {"tp": 2}, {}), (2, {"tp": 2, "sp": True}, {"recompute": {"kind": "full"}}), (2, {"pp": 2, "schedule": "zb-h1"}, {}),
        (2, {"cp": 2}, {"recompute": {"kind": "selective"}}), (2, {"zero": 3}, {}), (4, {"tp": 4, "sp": True}, {}),
        (4, {"tp": 2, "sp": True, "pp": 2, "zero": 1}, {"recompute": {"kind": "full"}}),
        (4, {"tp": 2, "sp": True, "cp": 2, "cp_kind": "alltoall"}, {}), (4, {"cp": 2, "pp": 2}, {}),
        (4, {"tp": 2, "zero": 3}, {"recompute": {"kind": "full"}}),
    ]  # fmt: skip
    cases = [
        case("gqa", ranks, layers=6, parallel=one, micro=2, variant=SHARED_KEYS, steps=1, **more)
        for ranks, one, more in shapes
    ]
    longer, stages = {**SHARED_KEYS, "full_attention_layers": [1, 3, 5, 7]}, {"pp": 2, "virtual_stages": 2, "zero": 2}
    cases.append(case("gqa", 4, layers=8, parallel=stages, micro=1, variant=longer, steps=1))
    # the sources of five layers are layers 1 and 2, in two units of FSDP
    shorter, units = {**SHARED_KEYS, "full_attention_layers": [1, 3]}, {"zero": 3, "zero3_layers": 1}
    cases.insert(0, case("gqa", 2, layers=5, parallel=units, micro=2, variant=shorter, steps=1))
    cases += [
        case("gqa", ranks, layers=one.get("pp", 1) * 2, parallel=one, micro=2, variant=VARIANTS["gqa"][4], **more)
        for ranks, one, more in shapes
    ]
    experts = [
        {"ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "ep": 2},
        {"tp": 4}, {"zero": 3, "ep": 2},
    ]  # fmt: skip
    cases += [
        case("moe", 4, layers=one.get("pp", 1) * 2, parallel=one, micro=2, variant=VARIANTS["moe"][5])
        for one in experts
    ]
    images = {"per_layer_input_size": 6, "vision": {**MODELS["vision"]["vision"], "layer_input_token": 3}}
    cases += [
        case("vision", ranks, parallel=one, micro=2, variant=images, steps=1)
        for ranks, one in ((2, {"zero": 3}), (4, {"tp": 2, "sp": True, "pp": 2}), (4, {"cp": 2, "tp": 2}))
    ]
    assert not problems(cases[::every], 4)


@ONE_IN_THREE
def test_streams_of_which_a_layer_computes_one_and_sparse_gates(every: int) -> None:
    shapes: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (4, {"tp": 2, "sp": True, "pp": 2, "zero": 1}, {"recompute": {"kind": "full"}}), (2, {"tp": 2}, {}), (4, {"tp": 4, "sp": True}, {}),
        (2, {"tp": 2, "sp": True}, {"recompute": {"kind": "selective", "modules": ["norm", "mlp"]}}), (4, {"cp": 2, "pp": 2}, {}),
        (4, {"tp": 2, "sp": True, "cp": 2, "cp_kind": "alltoall"}, {}), (2, {"zero": 3}, {}), (2, {"pp": 2, "schedule": "zb-h1"}, {}),
        (4, {"tp": 2, "zero": 3}, {"recompute": {"kind": "full"}}),
    ]  # fmt: skip
    cases = [
        case("gqa", ranks, layers=2 * one.get("pp", 1), parallel=one, micro=2, variant=VARIANTS["gqa"][5], **more)
        for ranks, one, more in shapes
    ]
    shared = {**SHARED_KEYS, **VARIANTS["gqa"][5]}
    cases.append(case("gqa", 4, layers=6, parallel={"tp": 2, "pp": 2}, micro=2, variant=shared, steps=1))
    assert not problems(cases[::every], 4)


@ONE_IN_THREE
def test_experts_added_after_the_next_layer_and_experts_that_return_their_input(every: int) -> None:
    shapes: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
        (2, 4, {"pp": 2, "pipeline_layout": [1, 3], "ep": 1}, {}), (4, 2, {"tp": 2, "sp": True, "ep": 2}, {"recompute": {"kind": "full"}}),
        (4, 4, {"pp": 2, "cp": 2, "zero": 1}, {}), (2, 2, {"tp": 2}, {"recompute": {"kind": "selective", "modules": ["norm", "moe"]}}),
        (4, 6, {"pp": 2, "virtual_stages": 2, "tp": 2, "pipeline_layout": [1, 2, 3, 0]}, {}), (2, 2, {"zero": 3, "ep": 2}, {}),
        (4, 2, {"tp": 2, "ep": 2, "expert_tp": 2}, {}), (2, 4, {"pp": 2, "schedule": "zb-h1"}, {}), (4, 2, {"cp": 2, "ep": 4}, {}),
    ]  # fmt: skip
    cases = [
        case("mla", ranks, layers=layers, parallel=one, micro=2, variant=SHORTCUT, **more)
        for ranks, layers, one, more in shapes
    ]
    assert not problems(cases[::every], 4)


@ONE_IN_THREE
def test_norms_before_output_projections_heads_of_decoders_and_other_routers(every: int) -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2}), (2, {"tp": 2, "sp": True}), (2, {"pp": 2}), (2, {"zero": 3}), (4, {"tp": 4, "sp": True}),
        (4, {"tp": 2, "pp": 2, "zero": 1}), (4, {"tp": 2, "sp": True, "cp": 2, "cp_kind": "alltoall"}), (4, {"cp": 2, "pp": 2}),
        (2, {"ep": 2}), (4, {"ep": 2, "expert_tp": 2}), (4, {"tp": 2, "sp": True, "ep": 2, "zero": 1}),
    ]  # fmt: skip
    cases = [
        case(name, ranks, layers=shape.get("pp", 1) * 2, parallel=shape, micro=2, variant=VARIANTS[name][number])
        for name, number in (("dense", 6), ("moe", 3), ("moe", 4))
        for ranks, shape in shapes
        if name == "moe" or not {"cp", "ep"} & shape.keys()
    ]
    assert not problems(cases[::every], 4)


def test_a_bias_table_that_all_layers_of_an_encoder_share() -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2, "sp": True}), (4, {"tp": 4}), (2, {"zero": 2}), (4, {"tp": 2, "sp": True, "cp": 2, "cp_kind": "alltoall"}),
    ]  # fmt: skip
    assert not problems(
        [case("encoder", ranks, parallel=one, micro=2, variant=SHARED_BIAS) for ranks, one in shapes], 4
    )


@ONE_IN_THREE
def test_narrow_embeddings_and_plain_output_layers_of_encoders(every: int) -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2}), (2, {"tp": 2, "sp": True}), (2, {"pp": 2}), (2, {"zero": 3}), (4, {"tp": 4, "sp": True}),
        (4, {"tp": 2, "pp": 2, "zero": 1}), (4, {"tp": 2, "sp": True, "cp": 2, "cp_kind": "alltoall"}), (4, {"cp": 2, "pp": 2}),
    ]  # fmt: skip
    cases = [
        case(
            "encoder",
            ranks,
            layers=shape.get("pp", 1) * 2,
            parallel=shape,
            micro=2,
            variant=VARIANTS["encoder"][number],
        )
        for number in (4, 5)
        for ranks, shape in shapes
    ]
    assert not problems(cases[::every], 4)


@ONE_IN_THREE
def test_linear_biases_scaled_queries_norms_after_rotation_a_head_bias_and_heads_that_differ_by_layer(
    every: int,
) -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2}), (2, {"tp": 2, "sp": True}), (2, {"pp": 2}), (2, {"zero": 3}), (4, {"tp": 4, "sp": True}),
        (4, {"tp": 2, "pp": 2, "zero": 1}), (4, {"tp": 2, "sp": True, "cp": 2, "cp_kind": "alltoall"}),
        (4, {"cp": 2, "pp": 2, "cp_kind": "alltoall"}),
    ]  # fmt: skip
    options = [("dense", 3), ("gqa", 2), ("gqa", 3), ("mla", 3)]
    cases = [
        case(name, ranks, layers=shape.get("pp", 1) * 2, parallel=shape, micro=2, variant=VARIANTS[name][number])
        for name, number in options
        for ranks, shape in shapes
    ]
    assert not problems(cases[::every], 4)


@ONE_IN_THREE
def test_recurrences_with_decays_per_channel_and_fixed_decays(every: int) -> None:
    """Attention and Mamba-2 side by side; Kimi Delta Attention next to latent attention without positions; lightning attention, whose residual is normalized;
    Mamba-1 with and without norms; delta nets with negative eigenvalues and pre-norms next to attention with post-norms."""
    shapes: list[tuple[int, dict[str, Any]]] = [
        (4, {"tp": 4, "sp": True}), (2, {"cp": 2}), (2, {"tp": 2}), (4, {"pp": 2, "cp": 2}), (4, {"ep": 4, "zero": 2}),
        (4, {"tp": 2, "sp": True, "cp": 2, "cp_kind": "alltoall"}), (4, {"tp": 2, "sp": True, "pp": 2, "zero": 1}),
        (4, {"tp": 2, "ep": 2, "zero": 3}), (4, {"cp": 4}),
    ]  # fmt: skip
    cases = [
        case("hybrid", ranks, layers=4, parallel=shape, micro=2, steps=1, variant=VARIANTS["hybrid"][number])
        for ranks, shape in shapes
        for number in (6, 7, 8, 9, 10, 11, 12)
    ]
    assert not problems(cases[every // 2 :: 1 + every // 3 * 6], 4)


@ONE_IN_THREE
def test_several_residual_streams(every: int) -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2}), (4, {"tp": 4, "sp": True}), (4, {"tp": 2, "sp": True, "pp": 2, "zero": 1}), (4, {"pp": 2, "virtual_stages": 2}),
        (4, {"zero": 3}), (4, {"pp": 4, "schedule": "zb-h1"}), (4, {"tp": 2, "zero": 2}), (2, {"tp": 2, "sp": True, "zero": 0}),
    ]  # fmt: skip
    cases = [
        case(
            "dense",
            ranks,
            layers=shape.get("pp", 1) * shape.get("virtual_stages", 2),
            parallel=shape,
            micro=2,
            variant=VARIANTS["dense"][7],
        )
        for ranks, shape in shapes
    ]
    of_moe = [
        case("moe", 4, parallel=shape, micro=2, variant={"hyper_connections": {"streams": 2}})
        for shape in ({"ep": 4}, {"cp": 2, "tp": 2, "sp": True}, {"cp": 4, "cp_kind": "alltoall"})
    ]
    again = [
        case("dense", 2, parallel={"tp": 2, "sp": True}, variant=VARIANTS["dense"][7], recompute=how)
        for how in ({"kind": "full"}, {"kind": "selective", "modules": ["norm", "attention", "mlp"]})
    ]
    assert not problems([*cases, *of_moe, *again][every // 2 :: every], 4)


@ONE_IN_THREE
def test_compressed_attention_and_experts_by_token_id(every: int) -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (4, {"tp": 2, "sp": True, "cp": 2}), (4, {"pp": 2, "ep": 2, "zero": 1}), (4, {"tp": 4, "sp": True}), (4, {"zero": 3, "ep": 2}),
        (4, {"cp": 4, "cp_kind": "alltoall"}), (4, {"tp": 2, "pp": 2, "schedule": "zb-h1"}), (2, {"tp": 2, "zero": 2}),
        (4, {"cp": 2, "pp": 2, "cp_kind": "allgather"}), (4, {"tp": 2, "ep": 4}),
    ]  # fmt: skip
    again = {"kind": "selective", "modules": ["norm", "attention", "moe"]}
    cases = [
        case(
            "moe", ranks, layers=4, parallel=shape, micro=2, steps=1, variant=COMPRESSED,
            **({"recompute": again} if number % 2 else {}),
        )
        for number, (ranks, shape) in enumerate(shapes)
    ]  # fmt: skip
    assert not problems(cases[every // 2 :: every + every // 3], 4)


@ONE_IN_THREE
def test_values_of_another_size_softplus_gates_and_heads_that_differ_by_layer(every: int) -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2}), (4, {"tp": 4, "sp": True}), (4, {"tp": 2, "sp": True, "cp": 2}), (4, {"pp": 2, "cp": 2, "cp_kind": "alltoall"}),
        (4, {"tp": 2, "ep": 2, "zero": 3}), (4, {"tp": 2, "sp": True, "pp": 2, "zero": 1}), (4, {"ep": 4, "zero": 2}),
        (4, {"cp": 4, "cp_kind": "allgather"}), (2, {"cp": 2}),
    ]  # fmt: skip
    cases = [
        case("moe", ranks, layers=shape.get("pp", 1) * 2, parallel=shape, micro=2, variant=VARIANTS["moe"][number])
        for number in (6, 7, 8)
        for ranks, shape in shapes
    ]
    again = {"kind": "selective", "modules": ["activation", "attention"]}
    cases.append(case("moe", 2, parallel={"tp": 2}, variant=VARIANTS["moe"][7], recompute=again))
    assert not problems(cases[::-every], 4)


def test_images_in_different_numbers_of_tiles() -> None:
    """The row behind lines of patches is on every rank, whether these share a sequence or have all of it."""
    shapes: list[dict[str, Any]] = [
        {"tp": 4}, {"tp": 2, "sp": True, "cp": 2}, {"tp": 2, "zero": 3},
    ]  # fmt: skip
    cases = [case("vision", 4, parallel=shape, micro=2, variant=VARIANTS["vision"][2]) for shape in shapes]
    assert not problems(cases, 4)


def test_images_of_different_shapes() -> None:
    """Dealt by their features, in windows or with features behind the first layers of the decoder, and turned by line and
    column in the decoder."""
    shapes: list[dict[str, Any]] = [
        {"tp": 4}, {"tp": 2, "sp": True, "cp": 2}, {"tp": 2, "zero": 3}, {"pp": 2, "cp": 2, "cp_kind": "alltoall"},
    ]  # fmt: skip
    piped = {"tp": 2, "sp": True, "pp": 2}
    cases = [
        *(
            case(
                "vision", 4, layers=shape.get("pp", 1) * 2, parallel=shape, micro=2, variant=VARIANTS["vision"][number]
            )
            for number in (4, 5)
            for shape in shapes
        ),
        *(
            case(
                "vision",
                4,
                layers=layers,
                parallel=piped | more,
                micro=2,
                variant=VARIANTS["vision"][5] | changes,
                recompute=recompute,
                freeze=freeze,
            )
            for layers, more, changes, recompute, freeze in (
                (4, {"schedule": "zb-h1"}, {}, {"kind": "selective"}, ["model.vision_tower.*"]),
                (
                    5,
                    {"pipeline_layout": [3, 2]},
                    {"moe": MODELS["moe"]["moe"] | {"layers": [1, 3]}},
                    {"kind": "full"},
                    [],
                ),
            )
        ),
    ]
    assert not problems(cases, 4)


@ONE_IN_THREE
def test_experts_with_a_capacity_with_losses_over_the_batch_and_with_a_balanced_choice(every: int) -> None:
    """The losses are of a micro-batch of all data ranks, so that of one process must be as large."""
    base = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "layers": [1], "z_loss": 0.01, "aux_loss": 0.1}
    shapes = [
        (2, {}, 4), (2, {"tp": 2, "sp": True, "ep": 2}, 8), (4, {"tp": 2, "ep": 4}, 4), (4, {"cp": 2, "ep": 2}, 4),
        (4, {"tp": 2, "cp": 2, "sp": True, "expert_tp": 2}, 8),
    ]  # fmt: skip
    cases = [
        case("moe", ranks, parallel=parallel, micro=micro, variant={"moe": {**base, **more}})
        for more in ({"aux_loss_scope": "batch"}, {"capacity_factor": 0.8, "score": "sigmoid"}, SINKHORN)
        for ranks, parallel, micro in shapes
    ]
    assert not problems(cases[every // 2 :: every], 4)


def test_a_fixed_number_of_tokens_to_each_rank() -> None:
    """A bound of ep has room for any choice; every rank then sends padding too."""
    shapes: list[dict[str, Any]] = [
        {"ep": 4, "dispatch_bound": 4.0}, {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2, "dispatch_bound": 2.0},
        {"pp": 2, "ep": 2, "schedule": "zb-h1", "dispatch_bound": 2.0}, {"cp": 2, "ep": 4, "zero": 3, "dispatch_bound": 4.0},
    ]  # fmt: skip
    cases = [case("moe", 4, layers=4, parallel=parallel, micro=2) for parallel in shapes]
    assert not problems(cases, 4)


def test_an_expert_exchange_beside_another_micro_batch() -> None:
    """Forwards and backwards in turn, with and without a pipeline, and with what a backward computes again."""
    shapes: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
        ("moe", 2, {"ep": 2}, {"kind": "selective", "modules": ["norm", "activation", "moe"]}),
        ("moe", 4, {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2, "zero": 2}, {}),
        ("moe", 4, {"pp": 2, "ep": 2, "dispatch_bound": 2.0}, {"kind": "full"}),
        ("deepseek", 4, {"pp": 2, "virtual_stages": 2, "ep": 2}, {}),
        ("deepseek", 4, {"pp": 2, "virtual_stages": 2, "ep": 2, "schedule": "dualpipev"}, {}),
    ]
    cases = [
        case(name, ranks, layers=4, parallel={**parallel, "overlap_expert_exchange": True}, micro=1, recompute=again)
        for name, ranks, parallel, again in shapes
    ]
    assert not problems(cases, 4)


def compare_with_deepep(cases: list[LayoutCase]) -> Iterator[RankFindings | None]:
    """Each case, whose exchange is that of DeepEP's stand-in, against one process; on this rank."""
    with deepep_twin():
        yield from compare_cases_with_one_process(cases)


def test_an_exchange_by_deepep_alone_and_beside_another_micro_batch() -> None:
    shapes: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
        ("moe", 2, {"ep": 2}, {"kind": "selective", "modules": ["norm", "activation", "moe"]}),
        ("moe", 4, {"tp": 2, "sp": True, "ep": 4, "zero": 2, "overlap_expert_exchange": True}, {}),
        ("deepseek", 4, {"pp": 2, "virtual_stages": 2, "ep": 2, "schedule": "dualpipev", "overlap_expert_exchange": True}, {}),
        ("moe", 4, {"pp": 2, "ep": 2, "dispatch_bound": 2.0, "overlap_expert_exchange": True}, {"kind": "full"}),
    ]  # fmt: skip
    cases = [
        case(name, ranks, layers=4, parallel={**parallel, "dispatch": "deepep"}, micro=1, recompute=again)
        for name, ranks, parallel, again in shapes
    ]
    verdicts = merge_findings_by_case(cases, run_ranks(compare_with_deepep, 4, cases, timeout=280))
    assert not [problem for one in verdicts if (problem := one.describe_problem(1e-10))]


@pytest.mark.long
def test_as_many_tokens_as_there_are_without_the_host_knowing_how_many() -> None:
    """The same room, and what has no room in one way of recomputation or schedule would have none in the other."""
    shapes: list[dict[str, Any]] = [
        {"ep": 4, "dispatch_bound": 4.0}, {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2, "dispatch_bound": 2.0},
        {"tp": 2, "pp": 2, "ep": 2, "schedule": "zb-h1", "dispatch_bound": 2.0},
        {"cp": 2, "ep": 4, "zero": 3, "dispatch_bound": 4.0},
    ]  # fmt: skip
    cases = [
        case(name, 4, layers=4, parallel={**parallel, "dispatch": "nvshmem"}, micro=2, recompute=again)
        for name, again in (("moe", {}), ("deepseek", {"kind": "selective"}))
        for parallel in shapes
    ]
    assert not problems(cases, 4)


@pytest.mark.long
def test_experts_and_ranks_that_get_no_token() -> None:
    """A step has 32 tokens for 64 experts, so that half of these get none; a micro-batch of 4, for 8 ranks."""
    shapes = [
        {"tp": 8, "ep": 8}, {"tp": 8, "ep": 4, "expert_tp": 2}, {"tp": 4, "pp": 2, "ep": 4, "schedule": "zb-h1"},
        {"tp": 2, "cp": 2, "ep": 8}, {"cp": 2, "cp_kind": "alltoall", "ep": 8, "zero": 3}, {"ep": 8, "zero": 2},
    ]  # fmt: skip
    experts = {"layers": [1], "num_experts": 64, "top_k": 1}
    cases = [
        case(name, 8, parallel=shape, micro=1, length=4, steps=1, variant={"moe": {**MODELS[name]["moe"], **experts}})
        for name, shape in product(("moe", "deepseek"), shapes)
    ]
    assert not problems(cases, 8)


def test_in_bf16() -> None:
    """A layout of each kind of model whose weights, activations and gradients change dtypes the most often: ZeRO-3 keeps fp32
    weights and gathers bf16. To bf16's rounding: a dtype that is not expected, or a tensor not cast, is what this looks for."""
    variants = [(name, {}) for name in MODELS] + [("vision", variant) for variant in VARIANTS["vision"][1:]]
    cases = [
        case(name, 2, parallel={"zero": 3}, micro=2, batch=4, steps=1, variant=variant, precision="bf16")
        for name, variant in variants
    ]
    for one in results(cases, 2):
        assert not one.missing
        assert one.errors["loss"] < 0.02, one
        assert one.errors["norm"] < 0.2, one


def test_in_fp32() -> None:
    """Not with a key bias and no rotation, which no softmax sees, so that its gradient is zero but for rounding; and what was divided
    by the root of a small moment, or went through Muon's iteration, has its rounding multiplied: so of one step. One process
    is itself up to 5e-6 from what it computes in fp64, of a hybrid up to 4e-5."""
    seen = [
        one for one in all_layouts() if one.model.get("position", "rope") == "rope" or not one.model.get("qkv_bias")
    ]
    small = [one for one in seen if one.ranks <= 4]
    for one in results([replace(it, precision="fp32", steps=1) for it in covering(small, 5)], 4):
        first = {kind: one.errors[kind] for kind in ("loss", "norm", "gradients")}
        amplified = one.case.name == "hybrid"  # delta nets multiply the rounding of what goes into them
        assert not replace(one, errors=first).describe_problem(1e-4 if amplified else 3e-5)
        assert not one.describe_problem(1e-4)
