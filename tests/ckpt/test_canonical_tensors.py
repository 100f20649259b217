from __future__ import annotations

import pytest

from mega_ckpt.canonical_tensors import abbreviate_name_list, canonical_tensors, count_model_parameters
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset

SMALL = {
    "num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "vocab_size": 11, "max_position": 5,
}  # fmt: skip


def model(**changes: object) -> ModelConfig:
    return ModelConfig.parse(SMALL | changes)


def test_a_plain_decoder() -> None:
    tensors = canonical_tensors(model())
    layer = {name: shape for name, shape in tensors.items() if name.startswith("model.layers.1.")}
    assert layer == {
        "model.layers.1.input_layernorm.weight": (8,),
        "model.layers.1.self_attn.q_proj.weight": (24, 8),
        "model.layers.1.self_attn.k_proj.weight": (12, 8),
        "model.layers.1.self_attn.v_proj.weight": (12, 8),
        "model.layers.1.self_attn.o_proj.weight": (8, 24),
        "model.layers.1.post_attention_layernorm.weight": (8,),
        "model.layers.1.mlp.gate_proj.weight": (12, 8),
        "model.layers.1.mlp.up_proj.weight": (12, 8),
        "model.layers.1.mlp.down_proj.weight": (8, 12),
    }
    assert next(iter(tensors)) == "model.embed_tokens.weight"
    assert list(tensors)[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert tensors["lm_head.weight"] == (11, 8)


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"qkv_bias": True}, {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}),
        ({"attention_out_bias": True}, {"self_attn.o_proj.bias"}),
        ({"mlp_bias": True}, {"mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"}),
        ({"qk_norm": True}, {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}),
        ({"norm_position": "post"}, {"post_feedforward_layernorm.weight"}),
        ({"norm": "layernorm"}, {"input_layernorm.bias", "post_attention_layernorm.bias"}),
    ],
)
def test_options_add_tensors_to_each_layer(changes: dict[str, object], added: set[str]) -> None:
    new = {name for name in canonical_tensors(model(**changes)) if name not in canonical_tensors(model())}
    assert new - {"model.norm.bias"} == {f"model.layers.{i}.{name}" for i in range(2) for name in added}


def test_norms_after_the_blocks_and_over_all_heads() -> None:
    tensors = canonical_tensors(model(norm_position="post", qk_norm=True, qk_norm_span="all", head_dim=6))
    assert "model.layers.0.input_layernorm.weight" not in tensors
    for name in "qk":
        norm, projection = (f"model.layers.0.self_attn.{name}_{kind}.weight" for kind in ("norm", "proj"))
        assert tensors[norm] == tensors[projection][:1]


def test_options_outside_the_layers() -> None:
    encoder = {"causal": False, "position": "learned", "token_types": 2, "position_offset": 2, "norm_position": "sum"}
    tensors = canonical_tensors(model(**encoder, embedding_norm=True, masked_lm={}, pooler=True, sentence_pairs=True))
    assert tensors["model.embed_positions.weight"] == (7, 8)
    shapes = {
        "model.embed_types.weight": (2, 8),
        "lm_head.bias": (11,),
        "model.pooler.weight": (8, 8),
        "pair_head.weight": (2, 8),
    }
    assert shapes.items() <= tensors.items()
    assert "model.norm.weight" not in tensors
    assert "model.layers.0.input_layernorm.weight" not in canonical_tensors(model(first_norm=False))
    assert "lm_head.weight" not in canonical_tensors(model(tie_embeddings=True))
    assert canonical_tensors(model(position="learned"))["model.embed_positions.weight"] == (5, 8)
    assert "model.layers.0.mlp.gate_proj.weight" not in canonical_tensors(model(activation="gelu"))


def test_experts_are_stacked() -> None:
    moe = {"num_experts": 3, "top_k": 2, "ffn_hidden_size": 7, "shared_ffn_hidden_size": 5}
    tensors = canonical_tensors(model(moe=moe))
    assert tensors["model.layers.0.mlp.gate.weight"] == (3, 8)
    assert tensors["model.layers.0.mlp.experts.gate_proj.weight"] == (3, 7, 8)
    assert tensors["model.layers.0.mlp.experts.down_proj.weight"] == (3, 8, 7)
    assert tensors["model.layers.0.mlp.shared_expert.up_proj.weight"] == (5, 8)
    assert "model.layers.0.mlp.up_proj.weight" not in tensors


def test_latent_attention_and_a_layer_that_predicts_further_tokens() -> None:
    mla = {"kv_lora_rank": 5, "q_lora_rank": 3, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
    tensors = canonical_tensors(
        ModelConfig.parse({**SMALL, "num_kv_heads": None, "head_dim": None, "mla": mla, "mtp_layers": 1})
    )
    last = {name.removeprefix("model.layers.2."): shape for name, shape in tensors.items() if "layers.2." in name}
    assert {name: shape for name, shape in last.items() if "mlp" not in name} == {
        "enorm.weight": (8,),
        "hnorm.weight": (8,),
        "eh_proj.weight": (8, 16),
        "input_layernorm.weight": (8,),
        "self_attn.q_a_proj.weight": (3, 8),
        "self_attn.q_a_layernorm.weight": (3,),
        "self_attn.q_b_proj.weight": (40, 3),
        "self_attn.kv_a_proj_with_mqa.weight": (9, 8),
        "self_attn.kv_a_layernorm.weight": (5,),
        "self_attn.kv_b_proj.weight": (52, 5),
        "self_attn.o_proj.weight": (8, 28),
        "post_attention_layernorm.weight": (8,),
        "shared_head.norm.weight": (8,),
    }


def test_latents_without_norms() -> None:
    mla = {"kv_lora_rank": 5, "q_lora_rank": 3, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
    fields = {**SMALL, "num_kv_heads": None, "head_dim": None}
    normed, raw = (
        canonical_tensors(ModelConfig.parse({**fields, "mla": {**mla, "latent_norm": norm}})) for norm in (True, False)
    )
    assert normed.keys() - raw.keys() == {
        f"model.layers.{layer}.self_attn.{name}_a_layernorm.weight" for layer in range(2) for name in ("q", "kv")
    }
    assert raw.items() <= normed.items()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # As published with the weights.
        ("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800),
        ("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360), ("mixtral-8x7b", 46_702_792_704),
    ],
)  # fmt: skip
def test_number_of_parameters_of_published_models(name: str, count: int) -> None:
    assert count_model_parameters(ModelConfig.parse(load_model_preset(name))) == count


def test_some() -> None:
    assert abbreviate_name_list({"b", "a", "c"}) == "a (and 2 more)"
    assert abbreviate_name_list(["x"]) == "x"


MAMBA = {"num_heads": 6, "head_dim": 4, "state_size": 5, "num_groups": 2, "conv_kernel": 3, "bias": True}
DELTA = {"num_key_heads": 2, "num_value_heads": 6, "key_head_dim": 3, "value_head_dim": 4}


def test_layers_of_other_kinds_and_latent_experts() -> None:
    moe = {"num_experts": 3, "top_k": 1, "ffn_hidden_size": 7, "latent_size": 4}
    hybrid = model(num_layers=3, layers=["mamba", "delta+moe", "mlp"], mamba=MAMBA, delta=DELTA, moe=moe)
    layers = {name.removeprefix("model.layers."): shape for name, shape in canonical_tensors(hybrid).items()}
    assert {name: shape for name, shape in layers.items() if name.startswith("0.")} == {
        "0.input_layernorm.weight": (8,),
        **{f"0.mamba.in_proj.{part}.weight": (rows, 8) for part, rows in zip(("z", "x", "B", "C", "dt"), (24, 24, 10, 10, 6), strict=True)},
        **{f"0.mamba.in_proj.{part}.bias": (rows,) for part, rows in zip(("z", "x", "B", "C", "dt"), (24, 24, 10, 10, 6), strict=True)},
        **{f"0.mamba.conv1d.{part}.weight": (rows, 3) for part, rows in zip("xBC", (24, 10, 10), strict=True)},
        **{f"0.mamba.conv1d.{part}.bias": (rows,) for part, rows in zip("xBC", (24, 10, 10), strict=True)},
        **{f"0.mamba.{name}": (6,) for name in ("dt_bias", "A_log", "D")},
        "0.mamba.norm.weight": (24,), "0.mamba.out_proj.weight": (8, 24), "0.mamba.out_proj.bias": (8,),
    }  # fmt: skip
    assert {name: shape for name, shape in layers.items() if name.startswith("1.linear_attn.")} == {
        **{f"1.linear_attn.in_proj.{part}.weight": (rows, 8) for part, rows in zip("qkvzba", (6, 6, 24, 24, 6, 6), strict=True)},
        **{f"1.linear_attn.conv1d.{part}.weight": (rows, 4) for part, rows in zip("qkv", (6, 6, 24), strict=True)},
        "1.linear_attn.dt_bias": (6,), "1.linear_attn.A_log": (6,), "1.linear_attn.norm.weight": (4,),
        "1.linear_attn.out_proj.weight": (8, 24),
    }  # fmt: skip
    assert layers["1.mlp.fc1_latent_proj.weight"] == (4, 8)
    assert layers["1.mlp.experts.up_proj.weight"] == (3, 7, 4)
    assert layers["1.mlp.fc2_latent_proj.weight"] == (8, 4)
    assert [name for name in layers if name.startswith("2.")] == [
        "2.post_attention_layernorm.weight", *(f"2.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    ]  # fmt: skip


def test_a_gate_on_attention() -> None:
    assert canonical_tensors(model(attention_gate=True))["model.layers.0.self_attn.g_proj.weight"] == (24, 8)
