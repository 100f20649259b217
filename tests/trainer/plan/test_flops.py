from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_decoders import published
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import variant
from torch.utils.flop_counter import FlopCounterMode

from mega_ckpt.canonical_tensors import count_model_parameters
from mega_ckpt.source import open_weight_source
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.data.micro_batch import DocumentBounds, MicroBatch, build_neighbor_batch
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import select_model_class
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.pipeline.layer_partition import split_stage_layers
from mega_trainer.plan.flops import (
    compute_flops_by_convention,
    compute_forward_flops_per_token,
    compute_hardware_flops_per_token,
    compute_model_flops_per_token,
    compute_palm_flops_per_token,
    count_parameters_by_layer,
    find_peak_flops,
    head_cost_in_layers,
    relative_layer_costs,
)
from mega_trainer.plan.layer_flops import mean_visible_keys


def model(name: str, **fields: object) -> ModelConfig:
    return ModelConfig.parse({**load_model_preset(name), **fields})


@pytest.mark.parametrize(
    "name",
    ["tiny", "llama3-8b", "qwen3-0.6b", "qwen3-32b", "gpt3-125m", "gpt3-175b", "bert-large", "t5-base", "retro-8b"],
)
def test_parameters_are_those_of_the_model_that_is_built(name) -> None:
    built = select_model_class(model(name))(LayerBuilder(model(name), device=torch.device("meta")))
    assert count_parameters_by_layer(model(name)).total == sum(p.numel() for p in built.parameters())


def test_parameters_of_norms_after_the_blocks_and_over_all_heads() -> None:
    olmo = model("qwen3-0.6b", norm_position="post", qk_norm_span="all")
    built = Decoder(LayerBuilder(olmo, device=torch.device("meta")))
    assert count_parameters_by_layer(olmo).total == sum(p.numel() for p in built.parameters())


MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 10, "shared_ffn_hidden_size": 14}
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}


@pytest.mark.parametrize(
    "fields",
    [
        {"mla": {**MLA, "latent_norm": False, "q_lora_rank": 20}}, {"mla": MLA},
        {"mla": {**MLA, "q_lora_rank": 20}, "qkv_bias": True, "attention_out_bias": True},
        {"norm_position": "both", "attention_sinks": True, "norm": "layernorm", "tie_embeddings": True},
        {"moe": {**MOE, "layers": [1], "shared_gate": True}, "mlp_bias": True}, {"moe": {**MOE, "selection_bias": True}},
        {"moe": {**MOE, "layers": [2, 3], "router_bias": True}, "mtp_layers": 1, "activation": "gelu"},
        {"mla": MLA, "mtp_layers": 2, "norm": "layernorm"}, {"mtp_layers": 1, "num_kv_heads": 2, "qk_norm": True},
    ],
)  # fmt: skip
def test_parameters_of_latents_and_of_layers_that_predict_further_tokens(fields) -> None:
    small = ModelConfig.parse(
        {
            "num_layers": 3,
            "hidden_size": 24,
            "ffn_hidden_size": 40,
            "num_attention_heads": 4,
            "vocab_size": 61,
            **fields,
        }
    )
    assert count_parameters_by_layer(small).total == count_model_parameters(small)


def test_latent_attention_by_hand() -> None:
    """At 100 tokens, 4 heads of 6 + 4 and values of 10, latents of 20 and 12, worked out on paper."""
    small = ModelConfig.parse(
        {
            "num_layers": 3, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "vocab_size": 61,
            "mla": {**MLA, "q_lora_rank": 20}, "mtp_layers": 1,
        }
    )  # fmt: skip
    parts = compute_forward_flops_per_token(small, 100, causal=False)
    # into latents 24 x 20 and 24 x 16, queries 20 x 40, keys and values 12 x 64, out 40 x 24; the fourth layer alike
    assert parts["attention projections"] == 4 * 2 * (480 + 384 + 800 + 768 + 960)
    assert parts["attention scores"] == 4 * 2 * 100 * (40 + 40)
    assert parts["further tokens"] == 2 * 48 * 24
    assert parts["head"] == 2 * 2 * 24 * 61
    layer = 2 * (3392 + 3 * 24 * 40) + 4 * 50.5 * 40
    assert head_cost_in_layers(small, 100) == pytest.approx(1 + (2304 + 5856) / layer)


def test_published_parameter_counts() -> None:
    assert count_parameters_by_layer(model("llama3-8b")).total == 8_030_261_248
    assert count_parameters_by_layer(model("llama3-70b")).total == 70_553_706_496
    assert count_parameters_by_layer(model("mixtral-8x7b")).total == 46_702_792_704
    assert count_parameters_by_layer(model("mixtral-8x7b")).active_parameters == 12_879_925_248
    assert count_parameters_by_layer(model("bert-large")).total == 336_226_108  # BertForPreTraining
    assert count_parameters_by_layer(model("roberta-base")).total == 124_697_433
    assert count_parameters_by_layer(model("modernbert-base")).total == 149_655_232


def test_an_encoder_sees_to_both_sides_and_has_a_head_of_its_own() -> None:
    """Of 5 tokens with a window of 3 the first sees 3 keys, the second 4, the third 5."""
    fields = {"num_attention_heads": 4, "head_dim": 6, "num_kv_heads": 4}
    full, local = (
        model("modernbert-base", sliding_window=3, full_attention_layers=layers, **fields)
        for layers in (list(range(22)), [])
    )
    assert compute_forward_flops_per_token(full, 5)["attention scores"] == 22 * 4 * 5 * 24
    assert compute_forward_flops_per_token(local, 5)["attention scores"] == pytest.approx(
        22 * 4 * (3 + 4 + 5 + 4 + 3) / 5 * 24
    )
    assert compute_forward_flops_per_token(full, 5)["head"] == 2 * 768 * (768 + 50_368)


def test_narrow_embeddings_have_two_projections_and_a_plain_output_layer_none() -> None:
    fields = {
        "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "vocab_size": 61, "causal": False, "masked_lm": {},
    }  # fmt: skip
    narrow, plain = (
        ModelConfig.parse(fields | more) for more in ({"embedding_size": 14}, {"masked_lm": {"dense": False}})
    )
    assert compute_forward_flops_per_token(narrow, 5)["head"] == 2 * 14 * (61 + 24 + 24)
    assert compute_forward_flops_per_token(plain, 5)["head"] == 2 * 24 * 61


def test_llama3_8b_by_hand() -> None:
    """At 8192 tokens; multiplications and additions of each product, per token and layer, worked out on paper."""
    parts = compute_forward_flops_per_token(model("llama3-8b"), 8192, causal=False)
    assert parts["attention projections"] == 32 * 83_886_080  # 2 x 4096 x (4096 + 1024 + 1024 + 4096)
    assert parts["attention scores"] == 32 * 134_217_728  # 2 x 8192 x 4096, twice
    assert parts["feed-forward"] == 32 * 352_321_536  # 2 x 3 x 4096 x 14336
    assert parts["head"] == 1_050_673_152  # 2 x 4096 x 128256
    assert compute_model_flops_per_token(model("llama3-8b"), 8192, causal=False) == 57_912_852_480
    causal = compute_forward_flops_per_token(model("llama3-8b"), 8192)["attention scores"]
    assert causal == 32 * 4 * 4096 * 4096.5


def test_the_rule_is_the_exact_count_and_the_norms() -> None:
    """6 N counts norm weights, of which llama3-8b has 65 x 4096, as if they were matrices."""
    llama = model("llama3-8b")
    assert (
        compute_palm_flops_per_token(llama, 8192) - compute_model_flops_per_token(llama, 8192, causal=False)
        == 6 * 65 * 4096
    )


def test_the_rule_counts_a_tied_table_once_and_only_the_active_experts() -> None:
    tied = model("qwen3-0.6b")
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    assert (
        compute_palm_flops_per_token(tied, 1024) - compute_model_flops_per_token(tied, 1024, causal=False) == 6 * norms
    )
    mixtral = model("mixtral-8x7b")
    assert (
        compute_palm_flops_per_token(mixtral, 1024) - compute_model_flops_per_token(mixtral, 1024, causal=False)
        == 6 * 65 * 4096
    )


@given(st.integers(1, 60), st.one_of(st.none(), st.integers(1, 80)))
def test_visible_keys_are_counted_one_by_one(seq_length, window) -> None:
    seen = [sum(0 <= query - key < (window or seq_length) for key in range(seq_length)) for query in range(seq_length)]
    assert mean_visible_keys(window, seq_length) == pytest.approx(sum(seen) / seq_length)
    assert mean_visible_keys(window, seq_length, causal=False) == max(seen)


def test_windows_in_some_layers_are_counted_layer_by_layer() -> None:
    mixed = model("tiny", num_layers=5, sliding_window=16, full_attention_layers=[1, 4])
    for causal in (True, False):
        scores = compute_forward_flops_per_token(mixed, 100, causal=causal)["attention scores"]
        far, near = (mean_visible_keys(window, 100, causal=causal) for window in (None, 16))
        assert scores == pytest.approx(4 * 64 * (2 * far + 3 * near))


def test_experts_in_some_layers_are_counted_layer_by_layer() -> None:
    moe = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 10, "shared_ffn_hidden_size": 7, "shared_gate": True}
    mixed = model("tiny", num_layers=3, moe={**moe, "layers": [1]})
    one = 3 * 64 * 10
    assert count_parameters_by_layer(mixed).active_parameters == count_parameters_by_layer(mixed).total - 6 * one
    assert [layer.experts for layer in count_parameters_by_layer(mixed).layers] == [0, 8 * one, 0]
    sparse, dense = 2 * 64 * (3 * (2 * 10 + 7) + 8 + 1), 2 * 64 * 3 * 192
    assert compute_forward_flops_per_token(mixed, 100)["feed-forward"] == 2 * dense + sparse


def test_conventions_of_published_figures() -> None:
    """DeepSeek-V3 with its further token, at 4096: Megatron-Bridge 26.08 tells 1,276 TFLOP/s at 4,912 tokens a second."""
    deepseek = model(
        "deepseek-v3", mtp_layers=1, moe={**load_model_preset("deepseek-v3")["moe"], "layers": list(range(3, 62))}
    )
    assert compute_flops_by_convention(deepseek, 4096, "megatron") == pytest.approx(1276e12 / 4912, rel=0.002)
    llama = model("llama3-8b")
    assert compute_flops_by_convention(llama, 8192, "full") == pytest.approx(
        800e12 / 13812, rel=0.002
    )  # Megatron-LM, examples/llama
    assert compute_flops_by_convention(llama, 8192, "palm") == compute_palm_flops_per_token(llama, 8192)
    learned = model("gpt3-125m", max_position=65_536)
    assert (
        compute_flops_by_convention(learned, 512, "mosaic") - compute_palm_flops_per_token(learned, 512)
        == 6 * 65_536 * 768
    )


@pytest.mark.parametrize(("seq_length", "less"), [(4096, 0.20), (8192, 0.12)])
def test_megatron_counts_gpt_oss_without_its_gates_and_windows(seq_length: int, less: float) -> None:
    """Its gate is no `--swiglu`, and windows are not looked at: what is published of it is so much less than it computes."""
    moe = {**load_model_preset("gpt-oss-20b")["moe"], "num_experts": 128}
    oss = model("gpt-oss-20b", num_layers=36, full_attention_layers=list(range(1, 36, 2)), moe=moe)
    exact = compute_model_flops_per_token(oss, seq_length)
    assert exact / compute_flops_by_convention(oss, seq_length, "megatron") - 1 == pytest.approx(less, abs=0.01)
    plain = model("qwen3-30b-a3b")
    router = 3 * 2 * 48 * 2048 * 128
    assert compute_model_flops_per_token(plain, 4096) - compute_flops_by_convention(plain, 4096, "megatron") == router


def test_recompute_is_work_of_the_hardware_only() -> None:
    llama = model("llama3-8b")
    forward = compute_forward_flops_per_token(llama, 8192)
    base = compute_model_flops_per_token(llama, 8192)
    assert compute_hardware_flops_per_token(llama, 8192, recompute="none") == base
    assert compute_hardware_flops_per_token(llama, 8192, recompute="selective") == base
    layers = sum(forward.values()) - forward["head"]
    assert compute_hardware_flops_per_token(llama, 8192, recompute="full") == base + layers


def test_the_head_in_layers() -> None:
    llama = model("llama3-8b")
    layer = 83_886_080 + 352_321_536 + 4 * 4096 * 4096.5
    assert head_cost_in_layers(llama, 8192) == pytest.approx(1_050_673_152 / layer)


@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("Quadro 600", "bf16", None),
    ],
)
def test_devices_are_known_by_the_words_of_their_names(device, precision, tera) -> None:
    assert find_peak_flops(device, precision) == (None if tera is None else tera * 1e12)


HYBRID = {
    "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 61,
    "mamba": {"num_heads": 4, "head_dim": 6, "state_size": 10, "num_groups": 2, "chunk_size": 8},
    "mamba1": {"inner_size": 28, "state_size": 5, "dt_rank": 3, "norms": "weight", "chunk_size": 8},
    "delta": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 10, "chunk_size": 8},
    "kda": {"num_heads": 4, "head_dim": 6, "chunk_size": 8}, "lightning": {"num_heads": 4, "head_dim": 10, "chunk_size": 8},
    "conv": {"kernel": 3}, "moe": {**MOE}, "attention_gate": True, "layers": ["mamba", "delta", "attention", "mlp", "moe"],
}  # fmt: skip


LING = {
    "kda": {**HYBRID["kda"], "low_rank_gates": False, "gate_floor": -5.0}, "num_kv_heads": None,
    "mla": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
}  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        *(
            (layers, {})
            for layers in (["mamba"], ["mamba1"], ["delta"], ["kda"], ["lightning"], ["conv"], ["attention", "mlp"])
        ),
        (HYBRID["layers"], {}),
        (["kda", "attention"], LING),
        (["hybrid+mlp"], {"hybrid": {"keys": 0.5, "mamba_projections": [2, 1, 1, 1, 1]}, "mlp_multipliers": [0.5, 2]}),
    ],
)
def test_each_kind_of_layer_is_counted_as_it_multiplies(layers: list[str], changes: dict[str, Any]) -> None:
    """Torch counts the products of 16 tokens in a real forward, but attention's scores and a delta rule's triangular solve."""
    small = ModelConfig.parse(
        {**HYBRID, **changes, "layers": layers, "moe": HYBRID["moe"] if "moe" in layers else None}
    )
    built, tokens = Decoder(LayerBuilder(small)), 16
    assert count_parameters_by_layer(small).total == sum(p.numel() for p in built.parameters())
    counted = FlopCounterMode(display=False)
    with counted, torch.no_grad():
        context = built.make_forward_context(torch.arange(tokens)[None], sequence_bounds=DocumentBounds([tokens]))
        built(torch.zeros(1, tokens, 24), context)
    exact = compute_forward_flops_per_token(small, tokens, causal=False)
    # of 4 heads: a chunk's map of the state, and the map's product, stand for what the solve is not counted for
    delta = 4 * layers.count("delta") * (2 * 6 * 6 + 2 * 6 * 6 * 10 / 8 - 2 * 8 * (6 + 10))
    delta += 4 * layers.count("kda") * (2 * 6 * 6 + 2 * 6 * 6 * 6 / 8 - 2 * 8 * (6 + 6))
    uncounted = exact["head"] + exact["attention scores"]
    assert counted.get_total_flops() == tokens * (sum(exact.values()) - uncounted + delta)


@pytest.mark.parametrize("heads", [
    {"full_attention": {"head_dim": 8, "num_kv_heads": 1, "keys_are_values": True}},
    {"value_head_dim": 6, "value_scale": 0.5, "full_attention": {"head_dim": 4, "num_kv_heads": 1}},
    {"softplus_gate": "head", "full_attention": {"head_dim": 4, "num_kv_heads": 2, "num_attention_heads": 6}},
    {"softplus_gate": "channel", "value_head_dim": 3},
])  # fmt: skip
def test_heads_that_differ_by_layer_are_counted_as_they_multiply(heads: dict[str, Any]) -> None:
    fields = {
        "num_layers": 3, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 61,
        "head_dim": 4, "sliding_window": 5, "full_attention_layers": [2], **heads,
    }  # fmt: skip
    config, tokens = ModelConfig.parse(fields), 16
    built = Decoder(LayerBuilder(config))
    assert count_parameters_by_layer(config).total == sum(p.numel() for p in built.parameters())
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        context = built.make_forward_context(torch.arange(tokens)[None], sequence_bounds=DocumentBounds([tokens]))
        built(torch.zeros(1, tokens, 24), context)
    exact = compute_forward_flops_per_token(config, tokens, causal=False)
    # values of another size have no fused kernel on a CPU: their scores are GEMMs, over all keys
    dense = config.model_copy(update={"sliding_window": None, "full_attention_layers": None})
    scores = (
        compute_forward_flops_per_token(dense, tokens, causal=False)["attention scores"] if config.value_head_dim else 0
    )
    uncounted = exact["head"] + exact["attention scores"]
    assert counted.get_total_flops() == tokens * (sum(exact.values()) - uncounted + scores)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-inputs", "gemma4-experts"])
def test_inputs_of_layers_shared_keys_and_separate_experts_are_counted_as_they_multiply(name: str) -> None:
    config, tokens = variant(name), 16
    built, ids = select_model_class(config)(LayerBuilder(config)), torch.arange(tokens)[None]
    scalars = config.num_layers * config.layer_scale
    assert count_parameters_by_layer(config).total == sum(p.numel() for p in built.parameters()) + scalars
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        context = built.make_forward_context(ids, sequence_bounds=DocumentBounds([tokens]))
        built.head.norm(built(built.embed_inputs(ids, ids), context))
    exact = compute_forward_flops_per_token(config, tokens, causal=False)
    assert counted.get_total_flops() == tokens * (sum(exact.values()) - exact["head"] - exact["attention scores"])


def test_experts_added_after_the_next_layer_are_counted_as_they_multiply() -> None:
    """Each token goes to all experts, those that return their input included, so that the load is even."""
    config, tokens = variant("longcat"), 16
    assert config.moe is not None
    moe = config.moe.model_copy(update={"top_k": config.moe.num_router_outputs})
    config = config.model_copy(update={"moe": moe})
    built = Decoder(LayerBuilder(config))
    assert count_parameters_by_layer(config).total == sum(p.numel() for p in built.parameters()) + 2 * 9
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        context = built.make_forward_context(torch.arange(tokens)[None], sequence_bounds=DocumentBounds([tokens]))
        built(torch.randn(1, tokens, 24), context)
    exact = compute_forward_flops_per_token(config, tokens, causal=False)
    # attention with values of another size has no fused kernel on a CPU: its scores are GEMMs
    assert counted.get_total_flops() == tokens * (sum(exact.values()) - exact["head"])


@pytest.mark.parametrize("indexer", [{"top_k": 4}, {"top_k": 20, "kl_loss": 1.0}, {"top_k": 20}, {"dense": True}])
def test_sparse_attention_is_counted_as_it_multiplies(indexer: dict[str, Any]) -> None:
    """But attention's scores, which torch does not count; with a loss the indexer scores short sequences, too."""
    mla = {**MLA, "q_lora_rank": 20, "indexer": {"num_heads": 3, "head_dim": 8, **indexer}}
    small = ModelConfig.parse(
        {
            "num_layers": 2,
            "hidden_size": 24,
            "ffn_hidden_size": 40,
            "num_attention_heads": 4,
            "vocab_size": 61,
            "mla": mla,
        }
    )
    tokens, built = 16, Decoder(LayerBuilder(small))
    assert count_parameters_by_layer(small).total == sum(p.numel() for p in built.parameters())
    scored = indexer["top_k"] < tokens or "kl_loss" in indexer if "top_k" in indexer else False
    with FlopCounterMode(display=False) as counted:
        routing = MicroBatchRouting(None, None, 1.0, 1.0)
        built(torch.zeros(1, tokens, 24), built.make_forward_context(torch.arange(tokens)[None], routing=routing))
    exact, attention = compute_forward_flops_per_token(small, tokens, causal=False), 2 * 2 * tokens * 4 * (10 + 10)
    index = 2 * 2 * tokens * 3 * 9 if scored else 0
    assert exact["attention scores"] == attention + index
    # no products of an indexer that scores nothing; with a loss once more attention's products of queries and keys
    unused = 0 if scored else 2 * 2 * (3 * 8 * 20 + 8 * 24 + 3 * 24)
    again = 2 * 2 * tokens * 4 * 10 if "kl_loss" in indexer else 0
    assert counted.get_total_flops() == tokens * (sum(exact.values()) - exact["head"] - attention - unused + again)
    few = compute_forward_flops_per_token(small, tokens)["attention scores"]
    visible = 8.5 if indexer != {"top_k": 4} else 4 - 4 * 3 / 32
    assert few == 2 * (2 * visible * 4 * 20 + (2 * 8.5 * 3 * 9 if scored else 0))


def test_layers_of_several_kinds_cost_what_their_parts_do() -> None:
    small = ModelConfig.parse({**HYBRID, "mtp_layers": 1})
    costs, parts = relative_layer_costs(small, 64), compute_forward_flops_per_token(small, 64)
    assert costs is not None
    assert sum(costs) == pytest.approx(len(costs) == 5 and 5)
    assert costs[0] / costs[3] == pytest.approx((parts["mamba projections"] + parts["mamba scan"]) / (2 * 3 * 24 * 40))
    assert relative_layer_costs(model("tiny"), 64) is None


def test_operations_of_t5_are_those_that_torch_counts_in_transformers(tmp_path: Path) -> None:
    theirs = published(tmp_path, attn_implementation="eager")
    config = open_weight_source(tmp_path).model
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        theirs(input_ids=torch.ones(2, 17, dtype=torch.int64), decoder_input_ids=torch.ones(2, 9, dtype=torch.int64))
    parts = compute_forward_flops_per_token(config, 17, causal=False, target=9)
    assert sum(parts.values()) * 2 * (17 + 9) == pytest.approx(counted.get_total_flops())


RETRO = {
    "num_layers": 4, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 61,
    "retro": {"chunk_length": 4, "neighbors": 3, "layers": [1, 3]},
}  # fmt: skip


def test_operations_of_retrieval_are_those_that_torch_counts() -> None:
    """Two texts of four chunks, with dropout, by which attention goes product by product."""
    config = ModelConfig.parse({**RETRO, "attention_dropout": 0.1})
    built = select_model_class(config)(LayerBuilder(config)).eval()
    tokens, places = torch.ones(2, 16, dtype=torch.int64), torch.arange(16).expand(2, -1)
    found = build_neighbor_batch(np.ones((2, 4, 3, 8), np.int64), torch.device("cpu"))
    batch = MicroBatch(tokens, tokens, torch.ones(2, 16), places, DocumentBounds([16, 16]), [0, 1], neighbors=found)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        context = built.make_batch_context(batch, lambda length, _: SeededDropout(0, [0, 1], [range(length)]))
        built.compute_logits(built(built.embed_micro_batch(batch, context), context))
    assert sum(compute_forward_flops_per_token(config, 16, causal=False).values()) * 2 * 16 == pytest.approx(
        counted.get_total_flops()
    )


def test_the_layer_with_the_neighbors_encoder_is_the_most_work() -> None:
    config = ModelConfig.parse(RETRO)
    costs = relative_layer_costs(config, 16)
    assert costs is not None
    assert costs[1] > costs[3] > costs[0] == costs[2]
    assert sum(costs) == pytest.approx(4)
    built = select_model_class(config)(LayerBuilder(config, device=torch.device("meta")))
    count = count_parameters_by_layer(config)
    assert count.total == sum(p.numel() for p in built.parameters())
    assert count.layers[1].total == sum(p.numel() for p in built.layers[1].parameters())


def test_stages_of_an_encoder_decoder_are_cut_by_the_work_of_each_stack() -> None:
    """At 512 and 64 tokens a layer of the decoder is less work than one of the encoder; at as many tokens it is more."""
    config = model("t5-base")
    short, even = (relative_layer_costs(config, 512, target) for target in (64, 512))
    assert short is not None
    assert even is not None
    assert short[0] > short[-1]
    assert even[0] < even[-1]
    assert sum(short) == pytest.approx(24)
    layers = split_stage_layers(24, 4, head_cost=head_cost_in_layers(config, 512, 64), layer_costs=short)
    assert len(layers[0]) < 6
