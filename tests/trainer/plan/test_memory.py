from __future__ import annotations

from dataclasses import replace

import pytest

from mega_common.model_config import ModelConfig
from mega_common.presets import preset
from mega_trainer.plan.flops import RecomputeKind, count_parameters
from mega_trainer.plan.memory import RunShape, activation_bytes, memory, put_off_bytes, unit_layers

GPT3 = ModelConfig.parse({**preset("gpt3-175b"), "attention_dropout": 0.1, "residual_dropout": 0.1})
LLAMA = ModelConfig.parse(preset("llama3-8b"))
LATENT = ModelConfig.parse(
    {
        "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": 100,
        "mla": {
            "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
        },
    }
)  # fmt: skip
AHEAD = LATENT.model_copy(update={"mtp_layers": 2})
MIXTRAL = ModelConfig.parse(preset("mixtral-8x7b"))
S, B, D, H = 2048, 1, 12_288, 96


@pytest.mark.parametrize(
    ("tp", "sp", "recompute", "expected"),
    [
        # table 2 of arXiv:2205.05198, in bytes per layer
        (1, False, "none", S * B * D * (34 + 5 * H * S / D)),
        (8, False, "none", S * B * D * (10 + 24 / 8 + 5 * H * S / (D * 8))),
        (8, True, "none", S * B * D * (34 / 8 + 5 * H * S / (D * 8))),
        (8, False, "selective", S * B * D * (10 + 24 / 8)),
        (8, True, "selective", S * B * D * 34 / 8),
    ],
)
def test_activations_of_a_layer_are_those_of_the_paper(tp: int, sp: bool, recompute: RecomputeKind, expected) -> None:
    run = RunShape(S, micro_batch=B, tp=tp, sp=sp, recompute=recompute, modules=("attention",), fused_attention=False)
    assert activation_bytes(GPT3, run) == pytest.approx(expected)


def test_states_of_one_rank_are_eighteen_bytes_a_parameter() -> None:
    """2 of weight, 4 of gradient, 12 of optimizer under bf16; 16 under fp32, which needs no second copy."""
    (table,) = memory(LLAMA, RunShape(1024))
    states = table["weights"] + table["gradients"] + table["optimizer"]
    assert states == 18 * count_parameters(LLAMA).total
    (table,) = memory(LLAMA, RunShape(1024, precision="fp32"))
    assert table["weights"] + table["gradients"] + table["optimizer"] == 16 * count_parameters(LLAMA).total


@pytest.mark.parametrize("model", [LLAMA, GPT3, MIXTRAL, LATENT, AHEAD])
def test_pipeline_ranks_hold_the_model_between_them(model) -> None:
    tied = model.vocab_size * model.hidden_size if model.tie_embeddings or model.mtp_layers else 0
    virtual = model.num_layers // 4 if model.num_layers < 8 else 2
    ranks = memory(model, RunShape(1024, pp=4, virtual_stages=virtual, microbatches=4))
    assert sum(rank["weights"] for rank in ranks) == 2 * (count_parameters(model).total + tied)


@pytest.mark.parametrize(("zero", "shared"), [(0, ""), (1, "o"), (2, "og")])
def test_zero_shares_among_data_and_context_ranks(zero, shared) -> None:
    (alone,) = memory(LLAMA, RunShape(1024))
    (table,) = memory(LLAMA, RunShape(1024, dp=4, cp=2, zero=zero))
    for kind in ("weights", "gradients", "optimizer"):
        assert table[kind] == alone[kind] / (8 if kind[0] in shared else 1)


def test_fp8_keeps_what_bf16_keeps() -> None:
    shape = RunShape(1024, dp=4, zero=1, recompute="selective")
    assert memory(LLAMA, replace(shape, precision="fp8")) == memory(LLAMA, shape)


@pytest.mark.parametrize(("precision", "element"), [("bf16", 2), ("fp32", 4)])
def test_zero3_shares_fp32_and_gathers_what_it_needs(precision, element) -> None:
    """Sixteen bytes a parameter are shared; the ends and two layers are whole, and so are some of their gradients."""
    count = count_parameters(LLAMA)
    (table,) = memory(LLAMA, RunShape(1024, dp=4, cp=2, zero=3, precision=precision))
    layer, ends = count.layers[0].total, count.embedding + count.head + count.final_norm
    assert table["optimizer"] == count.total
    assert table["weights"] == count.total / 2 + element * (ends + 2 * layer)
    assert table["gradients"] == count.total / 2 + element * (ends + layer) + 4 * ends


def test_units_of_zero3_have_more_layers_the_more_ranks_share_them() -> None:
    counts = [unit_layers(LLAMA, RunShape(8192, dp=dp, zero=3)) for dp in (8, 256, 1024)]
    assert counts == [1, 1, 2]
    assert unit_layers(LLAMA, RunShape(8192, dp=1024, zero=3, zero3_shard=8)) == 1
    assert unit_layers(LLAMA, RunShape(8192, dp=1024, zero=3, zero3_layers=3)) == 3
    (one,), (three,) = (memory(LLAMA, RunShape(1024, dp=8, zero=3, zero3_layers=layers)) for layers in (1, 3))
    assert three["weights"] - one["weights"] == 2 * 2 * 2 * count_parameters(LLAMA).layers[0].total


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_copies_are_shared_among_fewer_ranks(precision) -> None:
    """Two copies of the weights over eight ranks are as one over four: gradients and optimizer too."""
    (hybrid,) = memory(LLAMA, RunShape(1024, dp=4, cp=2, zero=3, zero3_shard=4, precision=precision))
    (one,) = memory(LLAMA, RunShape(1024, dp=2, cp=2, zero=3, precision=precision))
    assert hybrid == one


def test_expert_parallelism_splits_the_experts_alone() -> None:
    count = count_parameters(MIXTRAL)
    (table,) = memory(MIXTRAL, RunShape(1024, ep=4, dp=8, zero=1))
    experts = count.experts
    assert table["weights"] == 2 * (count.total - experts + experts // 4)
    assert table["optimizer"] == 12 * ((count.total - experts) / 8 + experts / 4 / 2)


def test_weights_kept_in_eight_bits_take_two_bytes_more_but_where_they_are_gathered() -> None:
    count = count_parameters(LLAMA)
    for zero, more in ((1, 2 * sum(count.layers[index].split for index in range(2, 10))), (3, 0)):
        shape = RunShape(1024, dp=4, zero=zero, precision="fp8")
        (plain,), (kept,) = memory(LLAMA, shape), memory(LLAMA, replace(shape, eight_bits=range(2, 10)))
        assert kept["weights"] - plain["weights"] == more


def test_tensor_ranks_split_heads_and_not_latents() -> None:
    (alone,), (split,) = (
        memory(LATENT, RunShape(64, precision="fp32")),
        memory(LATENT, RunShape(64, tp=2, precision="fp32")),
    )
    norms, latents = 64 + 64 + 20 + 12, 64 * (20 + 12 + 4)
    assert alone["weights"] - split["weights"] == (alone["weights"] - 4 * (4 * (norms + latents) + 64)) / 2


def test_layers_that_predict_further_tokens_lie_with_the_head() -> None:
    before, after = (memory(model, RunShape(64, pp=2)) for model in (LATENT, AHEAD))
    assert before[0] == after[0]
    assert after[1]["activations"] - before[1]["activations"] > 2 * activation_bytes(LATENT, RunShape(64))


def test_activations_follow_the_microbatches_in_flight() -> None:
    ranks = memory(GPT3, RunShape(S, pp=4, microbatches=8))
    layer = activation_bytes(GPT3, RunShape(S))
    assert [rank["activations"] for rank in ranks[:3]] == [round(n * 24 * layer) for n in (4, 3, 2)]
    assert ranks[3]["activations"] > 24 * layer
    (context,) = memory(GPT3, RunShape(S, cp=2))
    (whole,) = memory(GPT3, RunShape(S))
    assert context["activations"] < whole["activations"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_backward_cut_in_two_holds_inputs_and_gradients_of_products_until_its_second_half(recompute) -> None:
    run = RunShape(S, pp=4, microbatches=8, recompute=recompute)
    layer, put_off = activation_bytes(GPT3, run), put_off_bytes(GPT3, run)
    assert put_off == S * 2 * (4 * D + 4 * D + 2 * 4 * D)
    kept = 2 * S * D if recompute == "full" else layer
    whole, halves = memory(GPT3, run), memory(GPT3, replace(run, schedule="zb-h1"))
    extra = layer if recompute == "full" else 0.0
    # the third rank: F0 F1 I0 F2 I1 F3 I2 W0 F4 ...
    assert halves[2]["activations"] == round(24 * max(2 * kept + 2 * put_off, kept + 3 * put_off) + extra)
    assert halves[2]["activations"] > whole[2]["activations"]


def test_full_recompute_keeps_the_inputs_of_layers() -> None:
    first, _ = memory(GPT3, RunShape(S, pp=2, microbatches=4, recompute="full"))
    assert first["activations"] == 2 * 48 * 2 * S * D + activation_bytes(GPT3, RunShape(S))


def test_selective_recomputation_frees_norms_and_activations() -> None:
    """Nearly half of a layer of Llama-3-8B, without a product computed twice."""
    tokens, none = 8192, RunShape(8192)
    whole, selective = (activation_bytes(LLAMA, replace(none, recompute=kind)) for kind in ("none", "selective"))
    assert whole - selective == 2 * tokens * (2 * 4096 + 14_336)
    mlp = activation_bytes(LLAMA, replace(none, recompute="selective", modules=("mlp",)))
    assert whole - mlp == 2 * tokens * 3 * 14_336


def test_offloaded_layers_hold_two_at_a_time() -> None:
    layer = activation_bytes(LLAMA, RunShape(8192))
    whole, some, all_ = (memory(LLAMA, RunShape(8192, offload=n))[0]["activations"] for n in (0, 20, 32))
    assert whole - some == round(18 * layer)
    assert whole - all_ == round(30 * layer)
    (away,) = memory(LLAMA, RunShape(8192, offload_optimizer=True))
    assert away["optimizer"] == 0


def test_full_recomputation_of_some_layers() -> None:
    layer = activation_bytes(LLAMA, RunShape(8192))
    bounded, full = (
        memory(LLAMA, RunShape(8192, recompute="full", recompute_layers=n))[0]["activations"] for n in (12, None)
    )
    assert bounded - full == round(20 * (layer - 2 * 8192 * 4096))
