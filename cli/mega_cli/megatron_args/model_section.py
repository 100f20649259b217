"""The `model:` section: the model that Megatron builds from its flags, with defaults written out."""

from __future__ import annotations

import re

from mega_cli.megatron_args.bert_and_t5 import count_t5_layers, is_t5_script
from mega_cli.megatron_args.experts_section import has_megatron_moe_flags, translate_moe_flags
from mega_cli.megatron_args.hybrid_layers import (
    PATTERNS,
    compute_layer_pattern_mask,
    get_megatron_hybrid_pattern,
    has_hybrid_layers,
    is_hybrid_pattern_without_moe,
    translate_attention_variant_flags,
    translate_hybrid_layer_flags,
)
from mega_cli.megatron_args.run_draft import RunYamlDraft
from mega_cli.megatron_args.shell_words import MARK, format_unknown_placeholders

NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none", "mrope": "rope"}
GLU = {"swiglu": "swiglu", "geglu": "geglu"}
MISSING = ("xielu", "xiprelu", "xiprelup")
GPT2_TOKENS = 50_257
GPT_OSS = "--activation-func-clamp-value and --glu-linear-offset 1"


def translate_model_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `model` section of a run.yaml, from Megatron-LM flags."""
    _sizes(draft)
    if has_hybrid_layers(draft):
        translate_hybrid_layer_flags(draft)
    _parts(draft)
    _position(draft)
    if draft["multi_latent_attention"]:
        _latents(draft)
    if draft.is_megatron_setting_enabled("mtp_num_layers"):
        draft.set_key("model.mtp_layers", draft["mtp_num_layers"], "mtp_num_layers")
        draft.set_key("model.mtp_loss", draft["mtp_loss_scaling_factor"], "mtp_loss_scaling_factor")
    _dropout_and_init(draft)
    if has_megatron_moe_flags(draft) and not is_hybrid_pattern_without_moe(draft):
        translate_moe_flags(draft, get_megatron_ffn_width(draft))
    translate_attention_variant_flags(draft)


def _sizes(draft: RunYamlDraft) -> None:
    put = draft.set_key
    pattern = get_megatron_hybrid_pattern(draft)
    layers = len(pattern.letters) if pattern else draft["num_layers"] or draft["encoder_num_layers"]
    layers = count_t5_layers(draft) if is_t5_script(draft) else layers
    put("model.num_layers", layers, "num_layers", "encoder_num_layers", *(() if "num_layers" in draft else PATTERNS))
    put("model.hidden_size", draft["hidden_size"], "hidden_size")
    ask = "Megatron's default is 4 x hidden_size; with --swiglu 8/3 x hidden_size, rounded down to a multiple of 64"
    put(
        "model.ffn_hidden_size",
        get_megatron_ffn_width(draft),
        "ffn_hidden_size",
        because=_default_width(draft),
        ask=ask,
    )
    put("model.num_attention_heads", draft["num_attention_heads"], "num_attention_heads")
    if not draft["multi_latent_attention"]:  # latent attention has as many keys as queries, and its own sizes
        _heads(draft)
    else:
        draft.add_note("not needed", "latent attention has a key for every query", "num_query_groups")
    _vocabulary(draft)
    length, kind = "max_position_embeddings", _position_kind(draft)
    if length in draft or kind in ("learned_absolute", None):
        put("model.max_position", draft[length], length)
    else:
        put("model.max_position", draft["seq_length"], because="seq_length; positions of this kind are unlimited")


def _heads(draft: RunYamlDraft) -> None:
    if draft["group_query_attention"]:
        draft.set_key("model.num_kv_heads", draft["num_query_groups"], "num_query_groups", "group_query_attention")
    elif draft.uses_checkpoint_args:
        draft.set_key("model.num_kv_heads", None)
    elif "attention_head_type" in draft:
        heads = {"multiquery": 1, "multihead": draft["num_attention_heads"]}.get(draft["attention_head_type"])
        draft.set_key("model.num_kv_heads", heads, "attention_head_type")
    else:
        draft.add_note("not needed", "has no effect without --group-query-attention", "num_query_groups")
    if "kv_channels" in draft:
        draft.set_key("model.head_dim", draft["kv_channels"], "kv_channels")


def _vocabulary(draft: RunYamlDraft) -> None:
    """Write the vocabulary; `pretrain_gpt.py` takes GPT-2's tokenizer if none is named, with the size of its vocabulary
    file.
    """
    key, file = "model.vocab_size", draft["vocab_file"] or ""
    default = "patch_tokenizer_type" not in draft and (file or draft.program == "pretrain_gpt.py")
    kind = draft["tokenizer_type"] or ("GPT2BPETokenizer" if default else "")
    if "vocab_size" in draft:
        draft.set_key(key, draft["vocab_size"], "vocab_size")
        if kind == "NullTokenizer":
            draft.add_note(
                "changes meaning", "Megatron-LM before 2026 adds a token for the end of documents", "vocab_size"
            )
    elif draft.is_megatron_setting_unknown("tokenizer_type"):
        draft.set_key(key, None, "tokenizer_type")
    elif kind != "GPT2BPETokenizer":
        draft.set_key(key, None, ask="the script does not say how many tokens the tokenizer has")
        draft.add_note(
            "changes meaning", "is added to the tokenizer's size: include it in model.vocab_size", "extra_vocab_size"
        )
    elif _is_gpt2(file):
        why = "" if "tokenizer_type" in draft else "GPT-2's tokenizer, which is pretrain_gpt.py's default"
        draft.set_key(key, GPT2_TOKENS, "tokenizer_type", "vocab_file", because=why)
    else:
        draft.set_key(key, None, "vocab_file", ask=f"the number of tokens in --vocab-file, {GPT2_TOKENS} for GPT-2")


def _is_gpt2(file: str) -> bool:
    """Return whether a vocabulary file is GPT-2's by its name, or has no name."""
    words = re.findall(r"[a-z]+|\d{3,}", "/".join(MARK.sub("", file.lower()).split("/")[-2:]))
    return "gpt2" in file.lower() or set(words) <= {"bpe", "vocab", "json", "gpt", "tokenizer", "txt"}


def get_megatron_ffn_width(draft: RunYamlDraft) -> int | None:
    """Return the feed-forward width by Megatron-LM flags, by default from the hidden size; None if it is unknown.
    By default it is 4 times the hidden size, for SwiGLU two thirds of that in multiples of 64.

    FlagScale rounds those two thirds up to multiples of `--multiple-of`, after a factor.
    """
    given: int | None = draft["ffn_hidden_size"]
    hidden: int | None = draft["hidden_size"]
    if "ffn_hidden_size" in draft or not hidden or draft.is_megatron_setting_unknown("multiple_of"):
        return given
    if not draft["swiglu"]:
        return 4 * hidden
    if not draft["multiple_of"]:
        return int((4 * hidden * 2 / 3) / 64) * 64
    if draft.is_megatron_setting_unknown("hidden_dim_multiplier"):
        return None
    width = int(int(4 * hidden * 2 / 3) * (draft["hidden_dim_multiplier"] or 1))
    return int(-(-width // draft["multiple_of"]) * draft["multiple_of"])


def _default_width(draft: RunYamlDraft) -> str:
    if "ffn_hidden_size" in draft or not draft["hidden_size"]:
        return ""
    if not draft["swiglu"]:
        return "Megatron's default: 4 x hidden_size"
    if "multiple_of" in draft:
        return "8/3 x hidden_size x --hidden-dim-multiplier, rounded up to a multiple of --multiple-of"
    return "Megatron's default: 8/3 x hidden_size, rounded down to a multiple of 64"


def _parts(draft: RunYamlDraft) -> None:
    put, biased = draft.set_key, has_linear_biases(draft)
    if not draft.uses_checkpoint_args:
        draft.add_note("not needed", "a checkpoint in the run's own folder has the same model", "use_checkpoint_args")
    put("model.tie_embeddings", not draft["untie_embeddings_and_output_weights"], "untie_embeddings_and_output_weights")
    put("model.norm", NORMS.get(draft["normalization"]), "normalization")
    put("model.norm_eps", draft["layernorm_epsilon"], "layernorm_epsilon")
    if draft["layernorm_zero_centered_gamma"]:
        put("model.zero_centered_norm", True, "layernorm_zero_centered_gamma")
    _activation(draft)
    latent = draft["multi_latent_attention"]
    if latent:
        text = "mega's norms of latents multiply by weight, not by 1 + weight"
        if draft["qk_layernorm"]:
            draft.add_note("changes meaning", text, "layernorm_zero_centered_gamma")
    else:
        put("model.qkv_bias", biased or draft["add_qkv_bias"], *([] if biased else ["add_qkv_bias"]), "add_bias_linear")
        draft.add_note("translated", "model.qkv_bias, which --add-bias-linear switches on already", "add_qkv_bias")
    put("model.attention_out_bias", biased, "add_bias_linear")
    put("model.mlp_bias", biased, "add_bias_linear")
    if draft["qk_layernorm"] and not latent:
        put("model.qk_norm", True, "qk_layernorm")
        if draft["normalization"] == "LayerNorm":
            text = "mega normalises queries and keys with RMSNorm, Megatron with LayerNorm"
            draft.add_note("changes meaning", text, "qk_layernorm")
    if draft["softmax_type"] in ("learnable", None) and not latent:
        put("model.attention_sinks", draft["softmax_type"] and True, "softmax_type")
    if "window_size" in draft:
        _window(draft)
    elif "sliding_window" in draft:
        put("model.sliding_window", draft["sliding_window"], "sliding_window")


def has_linear_biases(draft: RunYamlDraft) -> bool:
    """Return whether Megatron's flags give linear layers biases.
    Megatron-LLM, whose flags have underscores, has its own flags for biases.
    """
    return bool(draft["add_bias_linear"] and (draft["use_bias"] or not draft.arguments.respelled))


def _activation(draft: RunYamlDraft) -> None:
    for other in MISSING:
        if draft[other]:
            return draft.set_key("model.activation", None, other, ask=f"the activation {other} is not supported")
    if "glu_activation" in draft:
        kind = draft["glu_activation"]
        return draft.set_key(
            "model.activation", GLU.get(kind), "glu_activation", ask=f"the activation {kind} is not supported"
        )
    if draft["swiglu"]:
        return draft.set_key("model.activation", "swiglu", "swiglu")
    if draft["squared_relu"]:
        return draft.set_key("model.activation", "relu2", "squared_relu")
    if draft["quick_geglu"]:
        return _quick_geglu(draft)
    if draft["openai_gelu"]:
        return draft.set_key("model.activation", "gelu_tanh", "openai_gelu")
    if draft["bias_gelu_fusion"] and has_linear_biases(draft):
        why = "Megatron's default: its GELU fused with the bias is the tanh form"
        return draft.set_key("model.activation", "gelu_tanh", because=why)
    return draft.set_key("model.activation", "gelu", "bias_gelu_fusion", "add_bias_linear")


def _quick_geglu(draft: RunYamlDraft) -> None:
    """Write the gate x sigmoid(1.702 x), which mega has in its clamped form that adds one to the linear half."""
    limit, offset = "activation_func_clamp_value", "glu_linear_offset"
    if draft.is_megatron_setting_enabled(limit) and draft[offset] == 1.0:
        draft.set_key("model.activation", "swiglu", "quick_geglu", offset)
        draft.set_key("model.activation_limit", draft[limit], limit)
        return
    draft.set_key("model.activation", "geglu", "quick_geglu")
    text = f"quick GeGLU is only supported in the form of GPT-OSS, with {GPT_OSS}; model.activation is geglu"
    draft.add_note("no equivalent", text, "quick_geglu")


def _window(draft: RunYamlDraft) -> None:
    if MARK.search(draft["window_size"]):
        return draft.set_key(
            "model.sliding_window", None, "window_size", instead=format_unknown_placeholders(draft["window_size"])
        )
    sizes = [int(number) for number in re.findall(r"-?\d+", draft["window_size"])]
    if len(sizes) != 2 or sizes[0] < 0:
        return draft.add_note("not needed", "this window is unlimited", "window_size")
    draft.set_key("model.sliding_window", sizes[0] + 1, "window_size")
    if sizes[1] != 0:
        draft.add_note(
            "no equivalent", "a forward window is not supported; model.sliding_window is backward only", "window_size"
        )
    if "window_attn_skip_freq" in draft:
        _full_attention_layers(draft)
    return None


def _full_attention_layers(draft: RunYamlDraft) -> None:
    """Write which layers use full attention: every n-th, or those with a zero in the list."""
    key, dest = "model.full_attention_layers", "window_attn_skip_freq"
    further = draft["mtp_num_layers"] or 0
    windowed = compute_layer_pattern_mask(draft, key, dest, lambda layer, n: (layer + 1) % n != 0, further)
    if windowed is not None:
        draft.set_key(key, [layer for layer, narrow in enumerate(windowed) if not narrow], dest)


def _position_kind(draft: RunYamlDraft) -> str | None:
    """Return the kind of --position-embedding-type; latent attention always has rotary positions."""
    kind: str | None = "rope" if draft["use_rotary_position_embeddings"] else draft["position_embedding_type"]
    return "rope" if kind == "none" and draft["multi_latent_attention"] else kind


def _position(draft: RunYamlDraft) -> None:
    kind, latent = _position_kind(draft), draft["multi_latent_attention"]
    known = POSITIONS | ({"relative": "relative"} if is_t5_script(draft) else {})
    if draft["use_alibi_mask"]:
        return draft.set_key("model.position", None, "use_alibi_mask", ask="ALiBi is not supported")
    flags = ("use_rotary_position_embeddings", "position_embedding_type")
    draft.set_key(
        "model.position", known.get(kind or ""), *flags, ask=f"the position embedding {kind} is not supported"
    )
    if kind == "mrope":
        draft.add_note("no equivalent", "mrope is not supported; model.position is rope", *flags)
    if kind in ("rope", "yarn", "mrope"):
        _rope(draft, yarn=draft["rope_type"] != "rope" if latent else kind == "yarn")
    return None


def _rope(draft: RunYamlDraft, *, yarn: bool) -> None:
    put, stretch = draft.set_key, "rotary_seq_len_interpolation_factor"
    base: int | None = draft["rotary_base"]
    put("model.rope.theta", base and float(base), "rotary_base")
    if draft["multi_latent_attention"] and draft.is_megatron_setting_unknown("rope_type"):
        return put("model.rope.scaling", None, "rope_type")
    if yarn:
        return _yarn(draft)
    if draft["multi_latent_attention"]:  # rotates its own part of the head, completely
        if draft.is_megatron_setting_enabled("mscale_all_dim") and draft["rotary_scaling_factor"] != 1:
            draft.add_note(
                "no equivalent", "without YaRN only Megatron scales attention scores by it", "mscale_all_dim"
            )
        if draft["rotary_percent"] != 1 and not draft.is_megatron_setting_unknown("rotary_percent"):
            draft.add_note(
                "no equivalent", "partial rotary dimensions are not supported with latent attention", "rotary_percent"
            )
        return None
    put("model.rope.fraction", draft["rotary_percent"], "rotary_percent")
    if draft["rotary_interleaved"]:
        put("model.rope.interleaved", True, "rotary_interleaved")
    if draft["use_rope_scaling"]:
        put("model.rope.scaling", "llama3", "use_rope_scaling")
        put("model.rope.factor", draft["rope_scaling_factor"], "rope_scaling_factor")
        put("model.rope.low_freq_factor", 1.0)
        put("model.rope.high_freq_factor", 4.0)
        put("model.rope.original_max_position", 8192)
    elif draft[stretch] not in (None, 1) or draft.is_megatron_setting_unknown(stretch):
        put("model.rope.scaling", "linear", stretch)
        put("model.rope.factor", draft[stretch] and float(draft[stretch]), stretch)
    return None


def _yarn(draft: RunYamlDraft) -> None:
    """Write YaRN, which rotates whole heads; latent attention ignores its flags."""
    put, original, whole = draft.set_key, "yarn_original_max_position_embeddings", "yarn_correction_range_round_to_int"
    if draft["multi_latent_attention"] and "rope_type" not in draft:
        put("model.rope.scaling", "yarn", because="default of Megatron's latent attention")
    else:
        put("model.rope.scaling", "yarn", "rope_type", "position_embedding_type")
    put("model.rope.factor", draft["rotary_scaling_factor"], "rotary_scaling_factor")
    if draft["multi_latent_attention"]:
        put("model.rope.original_max_position", 4096)
    else:
        put("model.rope.original_max_position", draft.get_megatron_setting(original, 4096), original)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            dest = f"yarn_{name}"
            put(f"model.rope.{name}", draft.get_megatron_setting(dest, default), dest)
        if whole in draft:
            put("model.rope.truncate", draft[whole], whole)
    factors = {name: draft[name] for name in ("mscale", "mscale_all_dim")}
    if all(factors.values()) or any(map(draft.is_megatron_setting_unknown, factors)):
        for name, factor in factors.items():
            put(f"model.rope.{name}", factor, name)
    elif factors != {"mscale": 1.0, "mscale_all_dim": 0.0}:
        draft.add_note("no equivalent", "YaRN's mscale and mscale_all_dim are only supported together", *factors)


def _latents(draft: RunYamlDraft) -> None:
    put = draft.set_key
    put("model.mla.kv_lora_rank", draft["kv_lora_rank"], "kv_lora_rank", "multi_latent_attention")
    if draft.is_megatron_setting_enabled("q_lora_rank"):
        put("model.mla.q_lora_rank", draft["q_lora_rank"], "q_lora_rank")
    put("model.mla.qk_nope_head_dim", draft["qk_head_dim"], "qk_head_dim")
    put("model.mla.qk_rope_head_dim", draft["qk_pos_emb_head_dim"], "qk_pos_emb_head_dim")
    put("model.mla.v_head_dim", draft["v_head_dim"], "v_head_dim")
    if draft["qk_layernorm"]:
        put("model.mla.norm_eps", draft["layernorm_epsilon"], "layernorm_epsilon", "qk_layernorm")
    else:
        put("model.mla.latent_norm", draft["qk_layernorm"], because="as Megatron without --qk-layernorm")
    put("model.rope.interleaved", True, because="as Megatron's latent attention always does")


def _dropout_and_init(draft: RunYamlDraft) -> None:
    put = draft.set_key
    put("model.embedding_dropout", draft["hidden_dropout"], "hidden_dropout")
    put("model.attention_dropout", draft["attention_dropout"], "attention_dropout")
    put("model.residual_dropout", draft["hidden_dropout"], "hidden_dropout")
    put("model.init_std", draft["init_method_std"], "init_method_std")
    why = "" if draft["no_scaled_init"] else "as Megatron always does"
    put("model.scale_residual_init", not draft["no_scaled_init"], "no_scaled_init", because=why)
