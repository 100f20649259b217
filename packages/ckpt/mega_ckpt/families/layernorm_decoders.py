"""Dense decoders with LayerNorm. Command R (Cohere): parallel attention and MLP after one norm without bias, scaled
logits, interleaved rotation; Command R+ normalises each head of queries and keys separately. GPT-NeoX and Pythia
(arXiv:2204.06745): parallel attention and MLP, partial rotation, heads interleaved on disk. StableLM
(arXiv:2402.17834): Llama with LayerNorm and a quarter of each head rotated. StarCoder 2 (arXiv:2402.19173): biases,
grouped queries, an MLP without gate. Nemotron and Minitron (arXiv:2402.16819): squared ReLU, norms that multiply by 1 +
weight, partial rotation. Jais 2: biases, squared ReLU without gate.

Command R7B and A (`cohere2`, arXiv:2504.00698) have a window in three of four layers and rotate in these alone.

The 12B of StableLM 2 has one norm before attention and MLP, and one for each head of queries and keys.
"""

from __future__ import annotations

from mega_ckpt.families.common_entries import SIZES, TIED, MultiHeadEntry
from mega_ckpt.families.config_entries import ConfigEntry, FixedFieldsEntry, HeadsEntry, KeyEntry, PerHeadNormEntry
from mega_ckpt.families.disk_layouts import TensorRule, UnstackedLayout
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import RopeInWindowsEntry, UniformWindowEntry

_SHARED: tuple[ConfigEntry, ...] = (
    *SIZES,
    KeyEntry("tie_word_embeddings", "tie_embeddings", True),
    KeyEntry("hidden_act", "activation", "silu", {"silu": "swiglu"}),
    KeyEntry("layer_norm_eps", "norm_eps", 1e-5),
    KeyEntry("logit_scale", "logit_scale", 0.0625, forbids_null=True),
    KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
    FixedFieldsEntry(
        {"norm": "layernorm", "norm_bias": False, "position": "rope", "parallel_residual": True, "shared_norm": True,
         "mlp_bias": False}
    ),
)  # fmt: skip

COHERE = ModelFamily(
    name="cohere",
    architecture="CohereForCausalLM",
    entries=(
        *_SHARED,
        HeadsEntry(explicit_dim=False, divisible=True),
        RopeEntry(theta=500_000.0, interleaved=True),
        UniformWindowEntry(supports_windows=False),
        PerHeadNormEntry("use_qk_norm"),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)

COHERE2 = ModelFamily(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    entries=(
        *_SHARED,
        HeadsEntry(explicit_dim=False),
        RopeEntry(interleaved=True),
        RopeInWindowsEntry(every_key="sliding_window_pattern"),
        FixedFieldsEntry({"qk_norm": False}),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)


_LAYER, _NEOX = "model.layers.{i}", "gpt_neox.layers.{i}"
_QKV = tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv")


def _neox_rules(disk: str, *names: str, by: str = "") -> tuple[TensorRule, ...]:
    """Return the rules of the weight and the bias of a GPT-NeoX module."""
    return tuple(
        TensorRule(f"{disk}.{kind}", tuple(f"{name}.{kind}" for name in names), by=by) for kind in ("weight", "bias")
    )


GPT_NEOX = ModelFamily(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    head="embed_out.weight",
    buffers=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    entries=(
        *SIZES,
        TIED,
        KeyEntry("hidden_act", "activation", "gelu",
            {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}),
        KeyEntry("layer_norm_eps", "norm_eps", 1e-5),
        KeyEntry("hidden_dropout", "embedding_dropout residual_dropout", 0.0),
        KeyEntry("use_parallel_residual", "parallel_residual", True),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", True),
        MultiHeadEntry(),
        RopeEntry(fraction=0.25, partial=True, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "mlp_bias": True, "qk_norm": False}),
    ),
    rules=(
        TensorRule("gpt_neox.embed_in.weight", ("model.embed_tokens.weight",)),
        *_neox_rules(f"{_NEOX}.input_layernorm", f"{_LAYER}.input_layernorm"),
        *_neox_rules(f"{_NEOX}.attention.query_key_value", *_QKV, by="kv"),
        *_neox_rules(f"{_NEOX}.attention.dense", f"{_LAYER}.self_attn.o_proj"),
        *_neox_rules(f"{_NEOX}.post_attention_layernorm", f"{_LAYER}.post_attention_layernorm"),
        *_neox_rules(f"{_NEOX}.mlp.dense_h_to_4h", f"{_LAYER}.mlp.up_proj"),
        *_neox_rules(f"{_NEOX}.mlp.dense_4h_to_h", f"{_LAYER}.mlp.down_proj"),
        *_neox_rules("gpt_neox.final_layer_norm", "model.norm"),
        TensorRule("embed_out.weight", ("lm_head.weight",)),
    ),
    carried=frozenset({"classifier_dropout"}),
)  # fmt: skip


STABLELM = ModelFamily(
    name="stablelm",
    architecture="StableLmForCausalLM",
    entries=(
        *SIZES,
        TIED,
        KeyEntry("hidden_act", "activation", "silu", {"silu": "swiglu"}),
        KeyEntry("layer_norm_eps", "norm_eps", 1e-5),
        KeyEntry("hidden_dropout", "residual_dropout", 0.0),
        KeyEntry("use_qkv_bias", "qkv_bias", False),
        KeyEntry("use_parallel_residual", "parallel_residual shared_norm", False),
        HeadsEntry(kv_default=32, explicit_dim=False, derived=True),
        RopeEntry(fraction=0.25, partial=True),
        UniformWindowEntry(supports_windows=False),
        PerHeadNormEntry("qk_layernorm"),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "attention_out_bias": False, "mlp_bias": False}),
    ),
    rules=tuple(
        TensorRule(
            f"model.layers.{{i}}.self_attn.{x}_layernorm.norms.{{e}}.weight",
            (f"model.layers.{{i}}.self_attn.{x}_norm.weight",),
            UnstackedLayout(),
        )
        for x in "qk"
    ),
)


_MLP = "model.layers.{i}.mlp"

STARCODER2 = ModelFamily(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    entries=(
        *SIZES,
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("initializer_range", "init_std", 0.018042),
        KeyEntry("hidden_act", "activation", "gelu_pytorch_tanh",
            {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}),
        KeyEntry("norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("use_bias", "qkv_bias attention_out_bias mlp_bias", True),
        KeyEntry("embedding_dropout", "embedding_dropout", 0.0),
        KeyEntry("residual_dropout", "residual_dropout", 0.0),
        HeadsEntry(kv_default=2, explicit_dim=False),
        RopeEntry(),
        UniformWindowEntry(),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    rules=tuple(
        TensorRule(f"{_MLP}.{disk}.{kind}", (f"{_MLP}.{name}.{kind}",))
        for disk, name in (("c_fc", "up_proj"), ("c_proj", "down_proj"))
        for kind in ("weight", "bias")
    ),
)  # fmt: skip


NEMOTRON = ModelFamily(
    name="nemotron",
    architecture="NemotronForCausalLM",
    entries=(
        *SIZES,
        TIED,
        KeyEntry("initializer_range", "init_std", 0.0134),
        KeyEntry("hidden_act", "activation", "relu2", {"relu2": "relu2"}),
        KeyEntry("norm_eps", "norm_eps", 1e-5),
        HeadsEntry(),
        RopeEntry(fraction=0.5, partial=True),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"norm": "layernorm", "zero_centered_norm": True, "position": "rope", "qk_norm": False}),
    ),
)


JAIS2 = ModelFamily(
    name="jais2",
    architecture="Jais2ForCausalLM",
    entries=(
        *SIZES,
        TIED,
        KeyEntry("hidden_act", "activation", "relu2", {"relu2": "relu2"}),
        KeyEntry("layer_norm_eps", "norm_eps", 1e-5),
        HeadsEntry(),
        RopeEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", True),
        KeyEntry("mlp_bias", "mlp_bias", True),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    tokens=("eos_token_id",),
)
