from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import ProcessGroupCache, build_parallel_groups
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.pipeline.schedules import make_pipeline_schedule
from mega_trainer.plan.flops import count_parameters_by_layer
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import (
    predict_memory,
    predict_peak_memory,
    split_layers_into_stages,
)
from mega_trainer.plan.part_memory import ModelPartMemoryBytes, count_model_part_memory
from mega_trainer.plan.training_layout import TrainingLayout
from mega_trainer.plan.zero3_memory import count_zero3_unit_layers
from mega_trainer.run.build_components import build_pipeline_stages

S, D, F, H = 256, 64, 192, 4
SMALL: dict[str, Any] = {
    "num_layers": 8, "hidden_size": D, "ffn_hidden_size": F, "num_attention_heads": H, "vocab_size": 512,
}  # fmt: skip
MLA = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
DENSE, LATENT, AHEAD, EXPERTS = (
    ModelConfig.parse({**SMALL, **fields})
    for fields in (
        {}, {"mla": MLA}, {"mla": MLA, "mtp_layers": 2},
        {"moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 96}},
    )
)  # fmt: skip
LLAMA = ModelConfig.parse(load_model_preset("llama3-8b"))
META = torch.device("meta")


class Nobody(ProcessGroupCache):
    def get_process_group(self, ranks: object) -> None:
        """No process group."""


def layer(model: ModelConfig | dict[str, Any] = DENSE, **run: Any) -> ModelPartMemoryBytes:
    """The first layer of a model, or of one that differs from `DENSE` by some fields."""
    model = model if isinstance(model, ModelConfig) else ModelConfig.parse({**SMALL, **model})
    return count_model_part_memory(model, TrainingLayout(S, **run)).layers[0]


def test_a_layer_keeps_what_its_backward_needs() -> None:
    """By hand, in bf16: the stream twice, what norms made of it, rows of q, k and v, attention's output, gate, up, and what is
    made of them; in fp32 two norms' factors and a logarithm for each head."""
    assert layer().kept == S * (2 * (4 * D + 3 * D + D + 3 * F) + 4 * (2 + H))


@pytest.mark.parametrize("fields", [{"attention_sinks": True}, {"attention_softcap": 3.0}, {"sliding_window": 16}])
def test_no_kind_of_scores_is_kept(fields: dict[str, Any]) -> None:
    """But where they are dropped out, for which there is no kernel."""
    assert layer(fields).kept == layer().kept
    assert layer({"attention_dropout": 0.1}).kept > layer().kept + 2 * H * S * S * 2


def test_norms_of_heads_keep_what_they_are_given() -> None:
    """The projection's output, of which they and the values are views; a factor a head; and q and k before they turn into others."""
    more = layer({"qk_norm": True}).kept - layer().kept
    assert more >= S * (2 * 2 * D + 4 * 2 * H)


def test_biases_of_experts_keep_nothing_more() -> None:
    """GPT-OSS's, whose gradients are products of groups: on the planner's device no rows are there to be counted."""
    biased = EXPERTS.model_copy(update={"mlp_bias": True})
    assert layer(biased).kept == layer(EXPERTS).kept


def test_tensor_ranks_split_what_they_can() -> None:
    whole, split, sequence = (layer(tp=tp, sp=sp).kept for tp, sp in ((1, False), (4, False), (4, True)))
    assert split == S * (2 * (4 * D + (4 * D + 3 * F) // 4) + 4 * (2 + H // 4))
    assert sequence == whole // 4


def test_states_of_one_rank_are_eighteen_bytes_a_parameter() -> None:
    """2 of weight, 4 of gradient, 12 of optimizer under bf16; 16 under fp32, which needs no second copy."""
    for precision, each in (("bf16", 18), ("fp32", 16)):
        (table,) = predict_memory(DENSE, TrainingLayout(S, precision=precision))
        assert states(table) == each * count_parameters_by_layer(DENSE).total


def states(table: dict[str, int]) -> int:
    return table["weights"] + table["gradients"] + table["optimizer"]


def test_muon_has_one_moment_of_hidden_matrices() -> None:
    count = count_parameters_by_layer(DENSE)
    matrices = count.total - count.embedding - count.head - (2 * 8 + 1) * D
    ((adamw,), (muon,)) = (predict_memory(DENSE, TrainingLayout(S, muon=muon)) for muon in (False, True))
    assert adamw["optimizer"] - muon["optimizer"] == 4 * matrices


@pytest.mark.parametrize("model", [DENSE, LATENT, AHEAD, EXPERTS])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 2), ("zbv", 2)])
def test_pipeline_ranks_hold_the_model_between_them(model: ModelConfig, schedule: str, virtual: int) -> None:
    """Where the ends do not meet on a rank, the last has a copy of an embedding that it needs."""
    copied = model.mtp_layers > 0 and schedule != "zbv"
    ranks = predict_memory(model, TrainingLayout(S, pp=4, virtual_stages=virtual, schedule=schedule, microbatches=4))
    whole = count_parameters_by_layer(model).total + copied * model.vocab_size * model.hidden_size
    assert sum(rank["weights"] for rank in ranks) == 2 * whole


@pytest.mark.parametrize(
    ("model", "parallel"),
    [("qwen3-0.6b", {"pp": 4}), ("llama3-8b", {"pp": 4, "virtual_stages": 2}), ("tiny", {"pp": 2, "pipeline_layout": [3, 1]})],
)  # fmt: skip
def test_layers_are_split_as_the_trainer_splits_them(model: str, parallel: dict[str, Any]) -> None:
    raw = {
        "model": load_model_preset(model) | ({"num_layers": 4} if model == "tiny" else {}), "parallel": parallel,
        "data": {"train": "none", "seq_length": 1024},
    }  # fmt: skip
    config = RunConfig.parse(raw)
    pp, virtual = config.parallel.pp, config.parallel.virtual_stages
    schedule = make_pipeline_schedule("1f1b", pp=pp, microbatches=8, virtual_stages=virtual)
    stages = split_layers_into_stages(config.model, make_training_layout(config, pp))
    for rank in range(pp):
        groups = build_parallel_groups(
            ParallelLayout(pp=pp), rank, heads=config.model.shared_head_counts, maker=Nobody()
        )
        built = build_pipeline_stages(config, LayerBuilder(config.model, groups, device=META), schedule)
        assert {index: len(stage.layers) for index, stage in built.items()} == {n: len(stages[n]) for n in built}


@pytest.mark.parametrize(("zero", "shared"), [(0, ""), (1, "o"), (2, "og")])
def test_zero_shares_among_data_and_context_ranks(zero: int, shared: str) -> None:
    """Level 1 keeps its slice of the sums of gradients besides them."""
    (alone,) = predict_memory(DENSE, TrainingLayout(S))
    (table,) = predict_memory(DENSE, TrainingLayout(S, dp=4, cp=2, zero=zero))
    for kind in ("weights", "gradients", "optimizer"):
        share = alone[kind] / (8 if kind[0] in shared else 1)
        assert table[kind] == share + (alone[kind] / 8 if (kind, zero) == ("gradients", 1) else 0)


def test_fp8_keeps_what_bf16_keeps() -> None:
    shape = TrainingLayout(S, dp=4, zero=1, recompute="selective")
    assert predict_memory(DENSE, replace(shape, precision="fp8")) == predict_memory(DENSE, shape)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_zero3_shares_fp32_among_those_that_share_a_copy(precision: str) -> None:
    """Two copies of the weights over eight ranks are as one over four."""
    count = count_parameters_by_layer(DENSE)
    (table,) = predict_memory(DENSE, TrainingLayout(S, dp=4, cp=2, zero=3, precision=precision))
    assert [table[kind] for kind in ("weights", "gradients", "optimizer")] == [count.total / 2] * 2 + [count.total]
    hybrid = predict_memory(DENSE, TrainingLayout(S, dp=4, cp=2, zero=3, zero3_shard=4, precision=precision))
    assert hybrid == predict_memory(DENSE, TrainingLayout(S, dp=2, cp=2, zero=3, precision=precision))


def test_units_of_zero3_have_more_layers_the_more_ranks_share_them() -> None:
    counts = [count_zero3_unit_layers(LLAMA, TrainingLayout(8192, dp=dp, zero=3)) for dp in (8, 256, 1024)]
    assert counts == [1, 1, 2]
    assert count_zero3_unit_layers(LLAMA, TrainingLayout(8192, dp=1024, zero=3, zero3_shard=8)) == 1
    assert count_zero3_unit_layers(LLAMA, TrainingLayout(8192, dp=1024, zero=3, zero3_layers=3)) == 3
    (one,), (three,) = (
        predict_memory(DENSE, TrainingLayout(S, dp=8, zero=3, zero3_layers=layers)) for layers in (1, 3)
    )
    assert three["work"] > one["work"]


def test_expert_parallelism_splits_the_experts_alone() -> None:
    count = count_parameters_by_layer(EXPERTS)
    (table,) = predict_memory(EXPERTS, TrainingLayout(S, ep=4, dp=8, zero=1))
    experts = count.routed_experts
    assert table["weights"] == 2 * (count.total - experts + experts // 4)
    assert table["optimizer"] == 12 * ((count.total - experts) / 8 + experts / 4 / 2)


def test_an_even_load_of_experts_needs_no_more_room_on_several_ranks() -> None:
    """A token goes once to a rank, however many experts it has there; and its rows are kept where those are."""
    alone, several = layer(EXPERTS).kept, layer(EXPERTS, ep=4, dp=4).kept
    row = 2 * (D + 3 * 96)
    assert abs(several - alone) < S * row


def test_weights_kept_in_eight_bits_take_two_bytes_more_but_where_they_are_gathered() -> None:
    count = count_parameters_by_layer(DENSE)
    for zero, more in ((1, 2 * sum(count.layers[index].split for index in range(2, 6))), (3, 0)):
        shape = TrainingLayout(S, dp=4, zero=zero, precision="fp8")
        (plain,), (kept,) = predict_memory(DENSE, shape), predict_memory(DENSE, replace(shape, fp8_layers=range(2, 6)))
        assert kept["weights"] - plain["weights"] == more


def test_tensor_ranks_split_heads_and_not_latents() -> None:
    (alone,), (split,) = (predict_memory(LATENT, TrainingLayout(S, tp=tp, precision="fp32")) for tp in (1, 2))
    whole = 8 * (2 * D + 20 + 12 + D * (20 + 12 + 4)) + D
    assert alone["weights"] - split["weights"] == (alone["weights"] - 4 * whole) / 2


def test_key_heads_fewer_than_tensor_ranks_lie_on_several() -> None:
    (table,) = predict_memory(ModelConfig.parse({**SMALL, "num_kv_heads": 2}), TrainingLayout(S, tp=4))
    each = 8 * (2 * D + (2 * D * D + 3 * D * F) // 4 + 2 * (D // H) * D) + D + 2 * 512 * D // 4
    assert table["weights"] == 2 * each


def test_activations_follow_the_microbatches_in_flight() -> None:
    ranks = predict_memory(DENSE, TrainingLayout(S, pp=4, microbatches=8, pipeline_layout=(2, 2, 2, 2)))
    held = [rank["activations"] / layer().kept for rank in ranks]
    assert held[1] - held[2] == pytest.approx(2, rel=0.1)  # layers of one micro-batch, and fewer messages of it
    assert held[0] > 8
    assert held[3] < held[2]


def test_a_peak_has_its_moment() -> None:
    found = predict_peak_memory(DENSE, TrainingLayout(S, pp=2, microbatches=4))
    first, last = (one.moment for one in found)
    assert [one.total_bytes for one in found] == [sum(one.bytes.values()) for one in found]
    assert first.startswith("backward of micro-batch")
    assert first.endswith("in stage 0")
    assert last.startswith("forward of micro-batch")
    (states_alone,) = predict_peak_memory(DENSE, TrainingLayout(1, dp=2, zero=1))
    assert states_alone.moment == "update"


def test_more_microbatches_than_a_pipeline_holds_change_what_they_are_fed_with_alone() -> None:
    few, many = (predict_peak_memory(DENSE, TrainingLayout(S, pp=2, microbatches=n)) for n in (64, 6400))
    fed = 6336 * (S * 28 + count_model_part_memory(DENSE, TrainingLayout(S, pp=2)).context)
    assert [b.total_bytes - a.total_bytes for a, b in zip(few, many, strict=True)] == [fed, fed]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_backward_cut_in_two_holds_inputs_and_gradients_of_products_until_its_second_half(recompute: Any) -> None:
    """In a layer: the inputs of its four products, the gradients of their outputs, and those of its norms."""
    run = TrainingLayout(S, pp=4, microbatches=8, recompute=recompute, schedule="zb-h1")
    part = count_model_part_memory(DENSE, run).layers[0]
    # input and gradient of qkv, of the output, of gate and up, of down; the stream's gradient is that of two
    assert S * 2 * (4 * D + 3 * D + 3 * F) <= part.deferred_wgrad <= S * 2 * (6 * D + 3 * D + 3 * F)
    whole, halves = predict_memory(DENSE, replace(run, schedule="1f1b")), predict_memory(DENSE, run)
    assert halves[2]["activations"] > whole[2]["activations"]


@pytest.mark.parametrize(("stages", "most"), [({}, 1.2), ({"pp": 2, "virtual_stages": 2}, 1.1), ({"pp": 2}, 2.0)])
def test_a_pair_of_passes_holds_little_more_than_one_of_them(stages: dict[str, int], most: float) -> None:
    run = TrainingLayout(S, microbatches=16, dp=2, ep=2, **stages)
    alone, pair = (
        predict_memory(EXPERTS, replace(run, overlap_expert_exchange=on))[0]["activations"] for on in (False, True)
    )
    assert alone < pair < most * alone


def test_full_recompute_keeps_the_inputs_of_layers() -> None:
    parts = count_model_part_memory(DENSE, TrainingLayout(S, recompute="full"))
    assert parts.whole[0].kept == 2 * S * D
    assert parts.whole[0].backward > parts.layers[0].kept
    most = [
        predict_memory(DENSE, TrainingLayout(S, recompute="full", recompute_layers=n))[0]["activations"]
        for n in (2, 5, None)
    ]
    assert most[0] - most[1] == 3 * (layer().kept - 2 * S * D)
    assert most[1] > most[2]


def test_selective_recomputation_frees_norms_and_activations() -> None:
    """Nearly half of a layer of Llama-3-8B, without a product computed twice."""
    tokens = 8192
    whole, selective, mlp = (
        count_model_part_memory(LLAMA, TrainingLayout(tokens, recompute=kind, modules=modules)).layers[0].kept
        for kind, modules in (("none", ("norm",)), ("selective", ("norm", "activation")), ("selective", ("mlp",)))
    )
    assert whole - selective == 2 * tokens * (2 * 4096 + 14_336)
    assert whole - mlp == 2 * tokens * 3 * 14_336


def test_offloaded_layers_leave_what_is_small() -> None:
    part = layer(offload_min_bytes=8192)
    whole, some = (predict_memory(DENSE, TrainingLayout(S, offload=n, offload_min_bytes=8192))[0] for n in (0, 5))
    assert part.small == S * 4 * (2 + H)
    assert whole["activations"] - some["activations"] == 5 * (part.kept - part.small)
    (away,) = predict_memory(DENSE, TrainingLayout(S, offload_optimizer=True))
    assert away["optimizer"] == 0
