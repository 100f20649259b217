from __future__ import annotations

from typing import Any

import pytest
from config_problems import check_hints

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.strict_config import StrictConfig, find_config_problems

SMALL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 100}

LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
MAMBA = {"num_heads": 4, "head_dim": 8}


class RunWithModel(StrictConfig):
    model: ModelConfig


def test_what_follows_from_what_is_given() -> None:
    config = ModelConfig.parse(SMALL)
    assert (config.key_value_heads, config.query_key_head_dim, config.has_gated_mlp) == (4, 16, True)
    config = ModelConfig.parse({**SMALL, "num_kv_heads": 2, "head_dim": 32, "activation": "gelu"})
    assert (config.key_value_heads, config.query_key_head_dim, config.has_gated_mlp) == (2, 32, False)

    config = ModelConfig.parse({**SMALL, "hidden_size": 66, "mla": LATENT})
    assert (config.key_value_heads, config.query_key_head_dim, config.attention_value_dim, config.rotary_dim) == (
        4,
        12,
        6,
        4,
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"hidden_size": 66},
            "hidden_size = 66: must be a multiple of num_attention_heads = 4 -> hidden_size: 72, or head_dim: 18",
        ),
        (
            {"num_kv_heads": 3},
            "num_kv_heads = 3: must divide num_attention_heads = 4 -> num_kv_heads: 2, or another of [1, 2, 4]",
        ),
        ({"head_dim": 15}, "rope.fraction = 1.0: must give an even number of rotated elements of the head size 15"),
        (
            {"rope": {"scaling": "yarn", "factor": 4}},
            "rope.original_max_position: is required with rope.scaling = yarn",
        ),
        ({"rope": {"scaling": "linear", "factor": 0.5}}, "rope.factor = 0.5: must be at least 1"),
        ({"rope": {"theta": 0}}, "rope.theta = 0: must be greater than 0"),
        ({"moe": {"num_experts": 2, "top_k": 3, "ffn_hidden_size": 8}}, "moe.top_k = 3: must be at most"),
        ({"activation_limit": 7.0, "activation": "geglu"}, "activation_limit = 7.0: requires activation: swiglu"),
        ({"mla": LATENT, "qk_norm": True}, "mla: is not supported with qk_norm -> leave out qk_norm"),
        ({"mla": LATENT, "num_kv_heads": 2}, "-> leave out num_kv_heads"),
        (
            {"mla": {**LATENT, "qk_rope_head_dim": 3}},
            "mla.qk_rope_head_dim = 3: must be even -> mla.qk_rope_head_dim: 4",
        ),
        (
            {"mla": LATENT, "position": "learned"},
            "mla: requires position: rope or none, and rope.fraction = 1 -> position:",
        ),
        (
            {"residual_factors": {"attention": [2, 1]}},
            "residual_factors = {attention: [2.0, 1.0]}: requires norm_position: stream",
        ),
        (
            {"norm_position": "stream", "residual_factors": {"moe": [2, 1]}},
            "must name mixers and feed-forward blocks that layers",
        ),
        (
            {"norm_position": "stream", "parallel_residual": True},
            "norm_position = 'stream': is not supported with parallel",
        ),
        ({"layers": ["kda", "mlp"]}, "kda: is required: layers names layers of this kind"),
        ({"layers": ["mamba1", "mlp"]}, "mamba1: is required: layers names layers of this kind"),
        ({"layers": ["hybrid", "mlp"], "hybrid": {}}, "mamba: is required: layers names layers of this kind"),
        ({"activation": "gelu", "mlp_multipliers": [2, 3]}, "requires a gated activation, such as swiglu, and no moe"),
        ({"mla": LATENT, "rope": {"fraction": 0.5}}, "-> rope.fraction: 1"),
        ({"hyper_connections": {}, "mtp_layers": 1}, "mtp_layers: is not supported with hyper_connections"),
        ({"hyper_connections": {}, "norm_position": "post"}, "requires norm_position: pre and causal attention"),
        ({"altup": {}, "mtp_layers": 1}, "mtp_layers: is not supported with altup"),
        ({"altup": {}}, "altup: requires norm_position: both, per_layer_input_size and causal attention"),
        ({"altup": {"streams": 2, "active": 2}}, "altup.active = 2: must be below streams = 2"),
        ({"ffn_sparsity": [0.5]}, "ffn_sparsity = 1: must have a value for each of num_layers = 2 layers"),
        ({"ffn_sparsity": [0.5, 1]}, "ffn_sparsity.1 = 1: must be less than 1"),
        ({"ffn_sparsity": [0.5, 0], "activation": "gelu"}, "ffn_sparsity: requires a gated activation, and no moe"),
        (
            {"per_layer_vocab_size": 4},
            "per_layer_vocab_size = 4: requires per_layer_input_size, and must be below vocab_size",
        ),
        ({"norm_positions": {"convolution": "pre"}}, "norm_positions = {convolution: 'pre'}: must name mixers"),
        (
            {"norm_positions": {"delta": "pre"}, "norm_position": "sum"},
            "is not supported with norm_position: sum or stream",
        ),
        (
            {"value_head_dim": 4, "attention_gate": True},
            "attention_gate: is not supported with value_head_dim, value_scale",
        ),
        ({"softplus_gate": "head", "qkv_bias": True}, "softplus_gate = 'head': is not supported with qkv_bias"),
        ({"value_scale": 0.5, "position": "alibi"}, "position = 'alibi': must be rope or none with value_head_dim"),
        ({"value_head_dim": 4, "mla": LATENT}, "value_head_dim: is not supported with mla"),
        (
            {"head_dim": 10, "local_rope": {"fraction": 0.3}},
            "local_rope.fraction = 0.3: must give an even number of rotated elements",
        ),
        (
            {"sliding_window": 4, "full_attention": {"head_dim": 4, "num_kv_heads": 3, "num_attention_heads": 8}},
            "full_attention.num_kv_heads = 3: must divide num_attention_heads = 8",
        ),
        ({"mtp_layers": 1, "position": "learned"}, "mtp_layers = 1: is not supported with position: learned"),
        ({"mtp_layers": 1, "full_attention_layers": [3]}, "full_attention_layers = 3: must be layer numbers up to 2"),
        ({"layers": ["attention+mlp", "mlp+mamba"]}, "'mlp+mamba' is not a layer kind; use a mixer (attention,"),
        ({"layers": "*X"}, "layers = '*X': 'X' is not a layer kind; use one of the letters M (m"),
        ({"layers": []}, "layers = []: must name at least one layer: a mixer"),
        (
            {"layers": "*-*"},
            "num_layers = 2: conflicts with layers, which names 3 layers instead of 2 -> num_layers: 3",
        ),
        ({"layers": "M-"}, "mamba: is required: layers names layers of this kind"),
        ({"layers": [{"times": 0, "of": ["mlp"]}]}, "layers.0.times = 0: must be greater than 0"),
        (
            {"layers": "*-", "parallel_residual": True},
            "parallel_residual: requires a mixer and a feed-forward block in every",
        ),
        ({"layers": "*-", "moe": MOE}, "moe: requires a layer with experts in layers -> name one in layers"),
        (
            {"layers": "*E", "moe": {**MOE, "layers": [1]}},
            "moe.layers = [1]: conflicts with layers -> leave out moe.layers",
        ),
        (
            {"mamba": {"num_heads": 4, "head_dim": 8, "num_groups": 3}},
            "mamba.num_groups = 3: must divide num_heads = 4",
        ),
        (
            {"mamba": {"num_heads": 4, "head_dim": 8, "dt_limit": [1, 0.5]}},
            "must be a lower and an upper limit, in this order",
        ),
        ({"delta": {**DELTA, "num_key_heads": 3}}, "delta.num_key_heads = 3: must divide num_value_heads = 4"),
        (
            {"mla": {**LATENT, "q_lora_rank": 8}, "attention_gate": True},
            "attention_gate: is not supported with mla.q_lora_rank -> leave out mla.q_lora_rank",
        ),
        (
            {"per_layer_input_size": 4, "mtp_layers": 1},
            "per_layer_input_size = 4: requires a gated activation, and no encoder",
        ),
        ({"shared_kv_ffn_hidden_size": 8}, "shared_kv_ffn_hidden_size = 8: requires shared_kv_layers"),
        ({"shared_kv_layers": 3}, "shared_kv_layers = 3: must leave a layer of each window before them"),
        (
            {"shared_kv_layers": 1, "sliding_window": 4, "full_attention_layers": [1]},
            "shared_kv_layers = 1: must leave a layer of each window before them",
        ),
        (
            {"shared_kv_layers": 1, "attention_sinks": True},
            "plain causal attention in all layers, without attention_sinks",
        ),
        ({"moe": {**MOE, "shortcut": True}}, "moe.shortcut = true: requires shared_ffn_hidden_size"),
        (
            {"moe": {**MOE, "shared_ffn_hidden_size": 8, "shortcut": True}},
            "requires a layer without experts after each",
        ),
        (
            {"moe": {**MOE, "zero_experts": 2, "capacity_factor": 1.0}},
            "moe.zero_experts = 2: is not supported with groups",
        ),
        ({"moe": {**MOE, "separate_norms": True}}, "moe.separate_norms = true: requires shared_ffn_hidden_size"),
        (
            {"moe": {**MOE, "shared_ffn_hidden_size": 8, "separate_norms": True}},
            "moe.separate_norms = true: requires norm: rmsnorm and norm_position: both",
        ),
        ({"num_layer": 2}, "num_layer: unknown key -> did you mean 'num_layers'?"),
        ({"activation": "swish"}, "activation = 'swish': must be swiglu"),
        ({"vocab_size": 0}, "vocab_size = 0: must be greater than 0"),
    ],
)
def test_an_impossible_model_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.parse({**SMALL, **change})
    assert said in str(caught.value)
    check_hints(RunWithModel, {"model": {**SMALL, **change}})


VISION = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "image_token": 5,
}
NATIVE = VISION | {
    "class_token": False,
    "pre_norm": False,
    "feature_layer": -1,
    "projector": "merger",
    "native": {"window": None},
}
ENCODER = {"encoder": {"num_layers": 1}, "position": "relative", "norm": "rmsnorm"}


@pytest.mark.parametrize(
    "change",
    [
        {"shared_norm": True},
        {"position": "alibi", "attention_softcap": 3.0},
        {"chunked_window": True},
        {"no_rope_scaling": [0.1, 8]},
        {"layer_scale": True, "norm_position": "sum"},
        {"activation": "xielu", "moe": MOE},
        {"output_input_norms": True, "moe": MOE},
        {"moe": {**MOE, "groups": 3}},
        {"moe": {**MOE, "top_groups": 2}},
        {"moe": {**MOE, "layers": []}},
        {"moe": {**MOE, "shared_gate": True}},
        {"moe": {**MOE, "groups": 2, "choice": "logits"}},
        {"moe": {**MOE, "hash_layers": [1], "layers": [0]}},
        {"moe": {**MOE, "bias_rate": 0.1}},
        {"causal": False, "mtp_layers": 1},
        {"masked_lm": {}, "score": True},
        {"pooler": True},
        {"sentence_pairs": True},
        {"position_offset": 2},
        {"activation": "clamped_swiglu"},
        {"mlp_out_bias": True, "mlp_bias": True},
        {"position": "relative"},
        {**ENCODER, "encoder": {"num_layers": 2}},
        {**ENCODER, "moe": MOE},
        {"retro": {"layers": [7], "chunk_length": 16, "encoder_layers": 2}},
        {"rope": {"sections": [2, 2, 2]}},
        {"rope": {"scaling": "dynamic", "sections": [2, 2, 4]}},
        {"vision": {**VISION, "image_token": 500}},
        {"vision": VISION, "causal": False},
        {"vision": VISION, "mtp_layers": 1},
        {"vision": {**VISION, "bidirectional": True}, "attention_dropout": 0.1},
        {"vision": {**VISION, "bidirectional_windows": True}},
        {"vision": {**VISION, "bidirectional": True, "bidirectional_windows": True}},
        {"vision": {**VISION, "image_size": 9}},
        {"vision": {**VISION, "num_attention_heads": 3}},
        {"vision": {**VISION, "feature_layer": 7}},
        {"vision": {**VISION, "feature_class": True, "class_token": False}},
        {"vision": {**VISION, "pool": 3}},
        {"vision": {**VISION, "projector": "merger"}},
        {"vision": {**VISION, "begin_token": 3}},
        {"vision": {**VISION, "feature_norm": True}},
        {"vision": {**NATIVE, "class_token": True}},
        {"vision": {**NATIVE, "native": {"window": 5, "full_layers": []}}},
        {"vision": {**NATIVE, "native": {"window": None, "positions": 8}}},
        {"vision": {**NATIVE, "native": {"window": None, "deepstack": [1, 0]}}},
        {"vision": {**NATIVE, "native": {"window": None, "min_pixels": 99_000_000}}},
        {"vision": {**NATIVE, "num_attention_heads": 8}},
    ],
    ids=str,
)  # fmt: skip
def test_the_hint_for_an_impossible_model_works(change: dict[str, Any]) -> None:
    raw = {"model": {**SMALL, **change}}
    assert all(problem.hint for problem in find_config_problems(RunWithModel, raw))
    with pytest.raises(ConfigError):
        RunWithModel.parse(raw)
    check_hints(RunWithModel, raw)


def test_a_configuration_survives_its_own_dump() -> None:
    config = ModelConfig.parse({**SMALL, "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}})
    assert ModelConfig.parse(config.model_dump(mode="json")) == config


def test_a_pattern_says_the_kind_of_every_layer() -> None:
    plain = {key: value for key, value in SMALL.items() if key != "num_layers"}
    sections = {"moe": MOE, "mamba": MAMBA, "delta": DELTA, "conv": {}}
    letters = ModelConfig.parse({**plain, **sections, "layers": "MG*-E"})
    halves = [("mamba", None), ("delta", None), ("attention", None), (None, "mlp"), (None, "moe")]
    assert (letters.num_layers, letters.layer_kinds) == (5, halves)
    names = ["mamba+mlp", {"times": 2, "of": ["delta+moe", "attention+moe"]}]
    named = ModelConfig.parse({**plain, **sections, "layers": names, "mtp_layers": 1})
    assert [named.get_mixer_kind(layer) for layer in range(6)] == ["mamba", *["delta", "attention"] * 2, "attention"]
    assert [named.is_moe_layer(layer) for layer in range(6)] == [False, *[True] * 5]
    assert ModelConfig.parse(named.model_dump(mode="json")) == named
    assert ModelConfig.parse({**plain, **sections, "layers": ["conv", "moe"]}).heads_by_mixer == {
        "conv": (SMALL["hidden_size"],) * 2
    }
    further = ModelConfig.parse({**SMALL, "mamba": MAMBA, "layers": "*-M", "mtp_layers": 1})
    assert (further.num_layers, further.get_mixer_kind(2)) == (2, "mamba")
    switched = ModelConfig.parse({**SMALL, "mtp_layers": 1, "moe": {**MOE, "layers": [1]}})
    assert switched.layer_kinds == [("attention", "mlp"), ("attention", "moe"), ("attention", "mlp")]


def test_a_number_of_layers_in_place_of_their_kinds_is_named() -> None:
    with pytest.raises(ConfigError, match="layers"):
        ModelConfig.parse({"hidden_size": 100, "layers": 2, "vocab_size": 1024})
