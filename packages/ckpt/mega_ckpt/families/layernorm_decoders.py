"""Dense decoders with LayerNorm. Command R (Cohere): parallel attention and MLP after one norm without bias, scaled
logits, interleaved rotation; Command R+ normalises each head of queries and keys separately. GPT-NeoX and Pythia
(arXiv:2204.06745): parallel attention and MLP, partial rotation, heads interleaved on disk. StableLM
(arXiv:2402.17834): Llama with LayerNorm and a quarter of each head rotated. StarCoder 2 (arXiv:2402.19173): biases,
grouped queries, an MLP without gate. Nemotron and Minitron (arXiv:2402.16819): squared ReLU, norms that multiply by 1 +
weight, partial rotation. Jais 2: biases, squared ReLU without gate. Falcon (arXiv:2311.16867): parallel attention and
MLP, with multi-query or grouped-query attention.

Command R7B and A (`cohere2`, arXiv:2504.00698) have a sliding window in three of four layers, and rotary positions only
in these. The 12B of StableLM 2 has one norm before attention and MLP, and one for each head of queries and keys. The
old architecture of Falcon (7B) has one norm before attention and MLP, the new one (40B, 180B) one before each or,
by a setting, one (11B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    GELUS,
    SILU,
    SIZES,
    TIED,
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    MultiHeadEntry,
    PerHeadNormEntry,
    check_config_json_head_dim,
    check_heads_fill_hidden_size,
)
from mega_ckpt.families.disk_layouts import LAYER, QKV, TensorRule, UnstackedLayout, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import RopeInWindowsEntry, UniformWindowEntry
from mega_common.model_config import ModelConfig

_SHARED: tuple[ConfigEntry, ...] = (
    *SIZES,
    KeyEntry("tie_word_embeddings", "tie_embeddings", True),
    KeyEntry("hidden_act", "activation", "silu", SILU),
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
        KeyValueHeadsEntry(explicit_dim=False, divisible=True),
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
        KeyValueHeadsEntry(explicit_dim=False),
        RopeEntry(interleaved=True),
        RopeInWindowsEntry(every_key="sliding_window_pattern"),
        FixedFieldsEntry({"qk_norm": False}),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)


_QK_LAYERNORM_RULES = tuple(
    rule for x in "qk" for rule in weight_bias_rules(f"{LAYER}.self_attn.{x}_layernorm", f"{LAYER}.self_attn.{x}_norm")
)
PHI = ModelFamily(
    name="phi",
    architecture="PhiForCausalLM",
    entries=(
        *SIZES,
        TIED,
        KeyEntry("hidden_act", "activation", "gelu_new", {"gelu_new": "gelu_tanh", **GELUS}),
        KeyEntry("layer_norm_eps", "norm_eps", 1e-5),
        KeyEntry("embd_pdrop", "embedding_dropout", 0.0),
        KeyEntry("resid_pdrop", "residual_dropout", 0.0),
        KeyValueHeadsEntry(explicit_dim=False),
        RopeEntry(fraction=0.5, partial=True),
        UniformWindowEntry(supports_windows=False),
        PerHeadNormEntry("qk_layernorm", "layernorm"),
        FixedFieldsEntry(
            {"norm": "layernorm", "position": "rope", "parallel_residual": True, "shared_norm": True, "head_bias": True,
             "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
        ),
    ),
    rules=(
        *_QK_LAYERNORM_RULES,
        *weight_bias_rules(f"{LAYER}.self_attn.dense", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{LAYER}.mlp.fc1", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{LAYER}.mlp.fc2", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("model.final_layernorm", "model.norm"),
    ),
)  # fmt: skip


PERSIMMON = ModelFamily(
    name="persimmon",
    architecture="PersimmonForCausalLM",
    entries=(
        *SIZES,
        TIED,
        KeyEntry("hidden_act", "activation", "relu2", {"relu2": "relu2", "relu": "relu"}),
        KeyEntry("layer_norm_eps", "norm_eps", 1e-5),
        KeyEntry("hidden_dropout", "residual_dropout", 0.0),
        MultiHeadEntry(),
        RopeEntry(fraction=0.5, partial=True),
        UniformWindowEntry(supports_windows=False),
        PerHeadNormEntry("qk_layernorm", "layernorm", default=True),
        FixedFieldsEntry(
            {"norm": "layernorm", "position": "rope", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
        ),
    ),
    rules=(
        *_QK_LAYERNORM_RULES,
        *weight_bias_rules(f"{LAYER}.self_attn.query_key_value", *QKV, per_head="kv"),
        *weight_bias_rules(f"{LAYER}.self_attn.dense", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{LAYER}.mlp.dense_h_to_4h", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{LAYER}.mlp.dense_4h_to_h", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("model.final_layernorm", "model.norm"),
    ),
)

_NEOX = "gpt_neox.layers.{i}"


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
        *weight_bias_rules(f"{_NEOX}.input_layernorm", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{_NEOX}.attention.query_key_value", *QKV, per_head="kv"),
        *weight_bias_rules(f"{_NEOX}.attention.dense", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{_NEOX}.post_attention_layernorm", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{_NEOX}.mlp.dense_h_to_4h", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{_NEOX}.mlp.dense_4h_to_h", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("gpt_neox.final_layer_norm", "model.norm"),
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
        KeyEntry("hidden_act", "activation", "silu", SILU),
        KeyEntry("layer_norm_eps", "norm_eps", 1e-5),
        KeyEntry("hidden_dropout", "residual_dropout", 0.0),
        KeyEntry("use_qkv_bias", "qkv_bias", False),
        KeyEntry("use_parallel_residual", "parallel_residual shared_norm", False),
        KeyValueHeadsEntry(kv_default=32, explicit_dim=False, derived=True),
        RopeEntry(fraction=0.25, partial=True),
        UniformWindowEntry(supports_windows=False),
        PerHeadNormEntry("qk_layernorm"),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "attention_out_bias": False, "mlp_bias": False}),
    ),
    rules=tuple(
        TensorRule(
            f"{LAYER}.self_attn.{x}_layernorm.norms.{{e}}.weight",
            (f"{LAYER}.self_attn.{x}_norm.weight",),
            UnstackedLayout(),
        )
        for x in "qk"
    ),
)


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
        KeyValueHeadsEntry(kv_default=2, explicit_dim=False),
        RopeEntry(),
        UniformWindowEntry(),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    rules=(
        *weight_bias_rules(f"{LAYER}.mlp.c_fc", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{LAYER}.mlp.c_proj", f"{LAYER}.mlp.down_proj"),
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
        KeyValueHeadsEntry(),
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
        KeyValueHeadsEntry(),
        RopeEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", True),
        KeyEntry("mlp_bias", "mlp_bias", True),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    tokens=("eos_token_id",),
)


_BLOCK = "transformer.h.{i}"
_MLP_NORM = f"{LAYER}.post_attention_layernorm"


@dataclass(frozen=True)
class FalconArchitectureEntry:
    """Translation to and from config.json of key/value heads and norms of Falcon.
    It covers the config.json keys of Falcon's old (7B) and new (40B) architecture.
    """

    handled_config_keys: frozenset[str] = frozenset(
        {
            "num_kv_heads",
            "new_decoder_architecture",
            "multi_query",
            "parallel_attn",
            "num_ln_in_parallel_attn",
            "head_dim",
        }
    )
    handled_model_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim", "parallel_residual", "shared_norm"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Falcon's key/value heads and norms from config.json.
        They are `num_kv_heads`, `parallel_residual` and `shared_norm` (one norm before attention and MLP). Raises
        ConfigMismatchError without parallel attention and for other numbers of norms.
        """
        new, norms = bool(raw.get("new_decoder_architecture")), raw.get("num_ln_in_parallel_attn")
        if not raw.get("parallel_attn", True):
            raise ConfigMismatchError("parallel_attn = False is not supported (only True)")
        if norms not in ((None, 1, 2) if new else (None, 1)):
            raise ConfigMismatchError(f"num_ln_in_parallel_attn = {norms!r} is not supported")
        check_config_json_head_dim(raw)
        single = not new and raw.get("multi_query", True)
        return {
            "num_kv_heads": 1 if single else raw.get("num_kv_heads"),
            "parallel_residual": True,
            "shared_norm": not new or norms == 1,
        }

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of Falcon's old architecture if it can express the model, else of the new one.
        Raises ConfigMismatchError for a model whose attention and MLP are not parallel.
        """
        if not model.parallel_residual:
            raise ConfigMismatchError("parallel_residual must be True")
        check_heads_fill_hidden_size(model)
        new = not model.shared_norm or model.key_value_heads not in (1, model.num_attention_heads)
        return {
            "new_decoder_architecture": new,
            "num_ln_in_parallel_attn": (1 if model.shared_norm else 2) if new else None,
            "multi_query": new or model.key_value_heads == 1,
            # the old architecture ignores the key
            "num_kv_heads": model.key_value_heads if new else model.num_attention_heads,
            "parallel_attn": True,
        }


@dataclass(frozen=True)
class FalconWidthEntry:
    """Translation to and from config.json of Falcon's MLP width, four times the hidden size by default."""

    handled_config_keys: frozenset[str] = frozenset({"ffn_hidden_size"})
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `ffn_hidden_size`, the MLP width."""
        return {"ffn_hidden_size": raw.get("ffn_hidden_size") or 4 * raw.get("hidden_size", 0)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `ffn_hidden_size` of config.json with its value, the MLP width."""
        return {"ffn_hidden_size": model.ffn_hidden_size}


FALCON = ModelFamily(
    name="falcon",
    architecture="FalconForCausalLM",
    prefix="transformer.",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        KeyEntry("num_hidden_layers", "num_layers"),
        KeyEntry("num_attention_heads", "num_attention_heads"),
        KeyEntry("max_position_embeddings", "max_position", 2048),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("hidden_dropout", "residual_dropout", 0.0),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("activation", "activation", "gelu", GELUS),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("bias", "qkv_bias attention_out_bias mlp_bias", False),
        FalconArchitectureEntry(),
        FalconWidthEntry(),
        RopeEntry(),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"alibi": (False, None)}),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    rules=(
        TensorRule("transformer.word_embeddings.weight", ("model.embed_tokens.weight",)),
        *weight_bias_rules(f"{_BLOCK}.input_layernorm", f"{LAYER}.input_layernorm", unless=_MLP_NORM),
        *weight_bias_rules(f"{_BLOCK}.ln_attn", f"{LAYER}.input_layernorm", requires=_MLP_NORM),
        *weight_bias_rules(f"{_BLOCK}.ln_mlp", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{_BLOCK}.self_attention.query_key_value", *QKV, per_head="kv"),
        *weight_bias_rules(f"{_BLOCK}.self_attention.dense", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{_BLOCK}.mlp.dense_h_to_4h", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{_BLOCK}.mlp.dense_4h_to_h", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("transformer.ln_f", "model.norm"),
    ),
    carried=frozenset({"classifier_dropout"}),
)  # fmt: skip
