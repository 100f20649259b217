"""Decoders one setting away from other families. OLMo (arXiv:2402.00838): norms without weights, clipped queries, keys and
values. nanochat (Karpathy): norms without weights, rotation by negative angles, squared ReLU. MiniCPM3 (OpenBMB): latent
attention with scaled embeddings, branches and logits. BitNet (arXiv:2504.12285) in floating point: norms before output projections. Mistral 4: DeepSeek-V3's attention with queries scaled by position,
experts by softmax. The text model of Aria (arXiv:2410.05993). Apertus (arXiv:2509.14233): xIELU. GPT (Radford et al. 2018): post-norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    DECODER,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    MultiHeadEntry,
    exclude_entries_of_fields,
    llama_config_entries,
    split_words,
)
from mega_ckpt.families.deepseek_glm import SHARED_EXPERT_RULES, ExpertGroupsEntry, LatentAttentionEntry
from mega_ckpt.families.disk_layouts import LAYER, QKV, TRANSPOSED, ConcatExpertsLayout, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.llama4_decoders import InOutExpertsLayout
from mega_ckpt.families.moe_entries import (
    FirstKDenseConfigEntry,
    MoeInAllLayersEntry,
    MoeSectionEntry,
    SharedExpertsEntry,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.model_config import ModelConfig

_MLP, _EXPERTS = f"{LAYER}.mlp", f"{LAYER}.mlp.experts"
_NO_WINDOW = UniformWindowEntry(supports_windows=False)
_BOTH_BIASES = KeyEntry("attention_bias", "qkv_bias attention_out_bias", False)
_PLAIN_NORMS = FixedFieldsEntry({"norm_weight": False, "mlp_bias": False})

OLMO = ModelFamily(
    name="olmo",
    architecture="OlmoForCausalLM",
    entries=(
        *exclude_entries_of_fields(DECODER, "norm_eps", "norm"),
        FixedFieldsEntry({"norm": "layernorm", "norm_eps": 1e-5, "position": "rope", "qk_norm": False}),
        KeyValueHeadsEntry(explicit_dim=False, derived=True),
        RopeEntry(),
        _BOTH_BIASES,
        KeyEntry("clip_qkv", "qkv_clip", None),
        _NO_WINDOW,
        _PLAIN_NORMS,
    ),
    tokens=("pad_token_id", "eos_token_id"),
)

NANOCHAT = ModelFamily(
    name="nanochat",
    architecture="NanoChatForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-6, hidden_act={"relu2": "relu2"}),
        KeyValueHeadsEntry(explicit_dim=False),
        RopeEntry(clockwise=True),
        _BOTH_BIASES,
        KeyEntry("final_logit_softcapping", "logit_softcap", 15.0),
        _NO_WINDOW,
        _PLAIN_NORMS,
        FixedFieldsEntry(
            {"embedding_norm": True, "qk_norm": True, "qk_norm_span": "plain", "qk_norm_after_rope": True}
        ),
    ),
    rules=(
        TensorRule(f"{_MLP}.fc1.weight", (f"{_MLP}.up_proj.weight",)),
        TensorRule(f"{_MLP}.fc2.weight", (f"{_MLP}.down_proj.weight",)),
    ),
)


@dataclass(frozen=True)
class MiniCpmScalesEntry:
    """Translation to and from config.json of MiniCPM's factors on residual branches and logits.
    They depend on the depth and the width of the model.
    """

    handled_config_keys: frozenset[str] = split_words("scale_depth dim_model_base")
    handled_model_fields: frozenset[str] = split_words("residual_multiplier logit_scale")

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `residual_multiplier` and `logit_scale`."""
        root, width = math.sqrt(raw.get("num_hidden_layers", 62)), raw.get("hidden_size", 2560)
        depth, base = raw.get("scale_depth", 1.4), raw.get("dim_model_base", 256)
        return {
            "residual_multiplier": 1.0 if depth is None else depth / root,
            "logit_scale": 1.0 if base is None else base / width,
        }

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys `scale_depth` and `dim_model_base`."""
        base = model.logit_scale * model.hidden_size
        whole = round(base) if math.isclose(base, round(base), rel_tol=1e-12) else base
        depth = model.residual_multiplier * math.sqrt(model.num_layers)
        return {"scale_depth": float(f"{depth:.15g}"), "dim_model_base": whole}


MINICPM3 = ModelFamily(
    name="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    entries=(
        *exclude_entries_of_fields(llama_config_entries(norm_eps=1e-5), "init_std", "tie_embeddings"),
        KeyEntry("initializer_range", "init_std", 0.1),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        RopeEntry(scalings=frozenset({"none", "yarn", "longrope"})),
        LatentAttentionEntry(),
        _BOTH_BIASES,
        KeyEntry("mlp_bias", "mlp_bias", False),
        KeyEntry("scale_emb", "embedding_multiplier", 12.0),
        MiniCpmScalesEntry(),
        _NO_WINDOW,
        FixedFieldsEntry({"qk_norm": False}),
    ),
)


@dataclass(frozen=True)
class Mistral4RopeEntry(RopeEntry):
    """Translation to and from config.json of Mistral 4's rotary positions and the rotated share of a head.
    The share follows from the sizes of the head.
    """

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `rope`, whose fraction counts within the rotated part of a head.

        Raises:
            ConfigMismatchError: if `partial_rotary_factor` is not the share of the rotated part in a head.
        """
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        rotated, rest = raw.get("qk_rope_head_dim", 64), raw.get("qk_nope_head_dim", 64)
        share = given.get("partial_rotary_factor")
        if share is not None and not math.isclose(share, rotated / (rotated + rest)):
            raise ConfigMismatchError(f"partial_rotary_factor = {share!r} must be {rotated / (rotated + rest)}")
        given = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
        return super().fields_from_config({**raw, "rope_parameters": given, "rope_scaling": None})

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of the rotary positions, with the rotated share of a head."""
        out = super().config_from_fields(model)
        share = {"partial_rotary_factor": model.rotary_dim / model.query_key_head_dim}
        return out | {key: out[key] | share for key in ("rope_parameters", "rope_scaling")}


_MISTRAL4_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MISTRAL4 = ModelFamily(
    name="mistral4",
    architecture="Mistral4ForCausalLM",
    entries=(
        *DECODER,
        Mistral4RopeEntry(scalings=frozenset({"yarn"}), interleaved=True, query_scaling=True, absent=_MISTRAL4_ROPE),
        LatentAttentionEntry(whole_head=True),
        _BOTH_BIASES,
        MoeSectionEntry(
            (
                KeyEntry("n_routed_experts num_local_experts", "num_experts", 128),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
                KeyEntry("num_experts_per_tok", "top_k", 4),
                KeyEntry("routed_scaling_factor", "scaling", 1.0),
                KeyEntry("norm_topk_prob", "normalize", True),
                SharedExpertsEntry(1),
                ExpertGroupsEntry(("greedy", "greedy"), "top2", (1, 1)),
                FixedFieldsEntry({"score": "softmax"}),
            ),
            FirstKDenseConfigEntry(0),
        ),
        _NO_WINDOW,
        AllowedValuesEntry({"rope_interleave": (True,)}),
        FixedFieldsEntry({"qk_norm": False, "mlp_bias": False}),
    ),
    rules=(
        TensorRule(
            f"{_EXPERTS}.gate_up_proj",
            (f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"),
            ConcatExpertsLayout(),
        ),
        TensorRule(f"{_EXPERTS}.down_proj", (f"{_EXPERTS}.down_proj.weight",), ConcatExpertsLayout()),
        *SHARED_EXPERT_RULES,
    ),
)

ARIA_TEXT = ModelFamily(
    name="aria_text",
    architecture="AriaTextForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(),
        RopeEntry(),
        _BOTH_BIASES,
        MoeSectionEntry(
            (
                KeyEntry("moe_num_experts", "num_experts", 8),
                KeyEntry("moe_topk", "top_k", 2),
                KeyEntry("intermediate_size", "ffn_hidden_size", 4096),
                SharedExpertsEntry(2, "moe_num_shared_experts", width_key="intermediate_size"),
                FixedFieldsEntry({"normalize": True, "score": "softmax"}),
            ),
            MoeInAllLayersEntry(),
        ),
        _NO_WINDOW,
        AllowedValuesEntry({"mlp_bias": (False,)}),
        FixedFieldsEntry({"qk_norm": False, "mlp_bias": False}),
    ),
    rules=(
        TensorRule(f"{_MLP}.router.weight", (f"{_MLP}.gate.weight",)),
        TensorRule(
            f"{_EXPERTS}.fc1.weight",
            (f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"),
            InOutExpertsLayout(),
        ),
        TensorRule(f"{_EXPERTS}.fc2.weight", (f"{_EXPERTS}.down_proj.weight",), InOutExpertsLayout()),
        *SHARED_EXPERT_RULES,
    ),
)

_APERTUS_ROPE = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
APERTUS = ModelFamily(
    name="apertus",
    architecture="ApertusForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5, hidden_act={"xielu": "xielu"}),
        KeyValueHeadsEntry(explicit_dim=False, derived=True),
        RopeEntry(theta=12_000_000.0, absent=_APERTUS_ROPE),
        _BOTH_BIASES,
        _NO_WINDOW,
        FixedFieldsEntry({"qk_norm": True, "mlp_bias": False}),
    ),
    rules=(
        TensorRule(f"{LAYER}.attention_layernorm.weight", (f"{LAYER}.input_layernorm.weight",)),
        TensorRule(f"{LAYER}.feedforward_layernorm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
    ),
    buffers=r".*\.act_fn\.(beta|eps)|(.*\.)?rotary_emb\.inv_freq",
    constants={f"{_MLP}.act_fn.beta": 0.5, f"{_MLP}.act_fn.eps": -1e-6},
    tokens=("pad_token_id",),
)

BITNET = ModelFamily(
    name="bitnet",
    architecture="BitNetForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5, hidden_act={"relu2": "reglu2", "silu": "swiglu"}),
        KeyValueHeadsEntry(kv_default=5, explicit_dim=False, derived=True),
        RopeEntry(theta=500_000.0),
        _BOTH_BIASES,
        _NO_WINDOW,
        FixedFieldsEntry({"qk_norm": False, "mlp_bias": False, "output_input_norms": True}),
    ),
    rules=(
        TensorRule(f"{LAYER}.self_attn.attn_sub_norm.weight", (f"{LAYER}.self_attn.o_norm.weight",)),
        TensorRule(f"{_MLP}.ffn_sub_norm.weight", (f"{_MLP}.down_norm.weight",)),
    ),
)

_BLOCK = "transformer.h.{i}"


@dataclass(frozen=True)
class KeylessFourfoldFfnConfigEntry:
    """Translation of a feed-forward width of four times the model's, for which config.json has no key."""

    handled_config_keys: frozenset[str] = frozenset()
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `ffn_hidden_size`, four times the hidden size in config.json."""
        return {"ffn_hidden_size": 4 * raw.get("n_embd", raw.get("hidden_size", 768))}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return no config.json keys; ConfigMismatchError for another width."""
        if model.ffn_hidden_size != 4 * model.hidden_size:
            raise ConfigMismatchError(f"ffn_hidden_size must be {4 * model.hidden_size}, not {model.ffn_hidden_size}")
        return {}


OPENAI_GPT = ModelFamily(
    name="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    entries=(
        KeyEntry("vocab_size", "vocab_size", 40478),
        KeyEntry("n_embd hidden_size", "hidden_size", 768),
        KeyEntry("n_layer num_hidden_layers", "num_layers", 12),
        KeyEntry("n_head num_attention_heads", "num_attention_heads", 12),
        KeyEntry("n_positions max_position_embeddings", "max_position", 512),
        KeyEntry("afn", "activation", "gelu", {"gelu": "gelu_tanh", "relu": "relu"}),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("embd_pdrop", "embedding_dropout", 0.1),
        KeyEntry("attn_pdrop", "attention_dropout", 0.1),
        KeyEntry("resid_pdrop", "residual_dropout", 0.1),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeylessFourfoldFfnConfigEntry(),
        MultiHeadEntry(),
        _NO_WINDOW,
        FixedFieldsEntry({
            "norm": "layernorm", "norm_position": "sum", "position": "learned", "qkv_bias": True, "attention_out_bias": True,
            "mlp_bias": True, "qk_norm": False,
        }),
    ),
    prefix="transformer.",
    rules=(
        TensorRule("transformer.tokens_embed.weight", ("model.embed_tokens.weight",)),
        TensorRule("transformer.positions_embed.weight", ("model.embed_positions.weight",)),
        *weight_bias_rules(f"{_BLOCK}.attn.c_attn", *QKV, layout=TRANSPOSED),
        *weight_bias_rules(f"{_BLOCK}.attn.c_proj", f"{LAYER}.self_attn.o_proj", layout=TRANSPOSED),
        *weight_bias_rules(f"{_BLOCK}.ln_1", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{_BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj", layout=TRANSPOSED),
        *weight_bias_rules(f"{_BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj", layout=TRANSPOSED),
        *weight_bias_rules(f"{_BLOCK}.ln_2", f"{LAYER}.post_feedforward_layernorm"),
    ),
    buffers=r"(transformer\.)?(position_ids|h\.\d+\.attn\.bias)",
    carried=split_words(
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj summary_last_dropout predict_special_tokens"
    ),
)  # fmt: skip
