"""Rules between the fields of a `ModelConfig`, each with a fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_common.encoder_config import find_encoder_config_problems
from mega_common.extension_block import FUNCTION_FIELDS, FUNCTION_NAMES
from mega_common.layer_kinds import (
    COMPRESSED_MIXERS,
    FEEDS,
    MIXERS,
    expand_layer_pattern,
    find_largest_divisor,
    find_missing_sections,
)
from mega_common.retro_config import find_retro_config_problems
from mega_common.strict_config import ConfigProblem, find_conflicting_settings, find_near_option

if TYPE_CHECKING:
    from mega_common.layer_kinds import IndexerConfig
    from mega_common.model_config import ModelConfig, RopeConfig


def list_given_settings(model: ModelConfig, *names: str) -> str:
    """Return the names of those of `names` that are set in `model`, joined for a message, such as "mla and encoder"."""
    found = [name for name in names if getattr(model, name)]
    return " and ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))


def find_model_config_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules between the fields of a model configuration."""
    yield from _find_head_problems(model) if "attention" in model.heads_by_mixer else ()
    layers = model.num_layers + model.mtp_layers
    listed = {
        "full_attention_layers": model.full_attention_layers,
        "no_rope_layers": model.no_rope_layers,
        "moe.layers": model.moe and model.moe.layers,
        "moe.hash_layers": model.moe and model.moe.hash_layers,
    }
    for name, indices in listed.items():
        if indices and max(indices) >= layers:
            hint = f"leave out {name}" if layers == 1 else f"use numbers from 0 to {layers - 1}"
            yield ConfigProblem(name, f"must be layer numbers up to {layers - 1}", max(indices), hint)
    if model.shared_norm and (not model.parallel_residual or model.norm_position != "pre"):
        rule = "requires parallel_residual and norm_position: pre"
        yield ConfigProblem("shared_norm", rule, True, "shared_norm: false")
    if model.mtp_layers and model.position == "learned":
        rule = "is not supported with position: learned"
        yield ConfigProblem("mtp_layers", rule, model.mtp_layers, "mtp_layers: 0, or position: rope")
    if model.position == "alibi" and (
        model.mla or not model.causal or model.encoder or model.retro or model.attention_softcap
    ):
        found = list_given_settings(model, "mla", "encoder", "retro", "attention_softcap") or "causal: false"
        yield ConfigProblem("position", f"is not supported with {found}", "alibi", "position: rope")
    if model.qk_norm_after_rope and not model.qk_norm:
        yield ConfigProblem("qk_norm_after_rope", "requires qk_norm", True, "qk_norm: true")
    if model.chunked_window and (
        not model.sliding_window or not model.causal or (model.vision and model.vision.bidirectional)
    ):
        rule = "requires sliding_window" if not model.sliding_window else "requires causal attention"
        yield ConfigProblem("chunked_window", rule, True, "chunked_window: false")
    if model.no_rope_scaling and not model.no_rope_layers:
        yield ConfigProblem("no_rope_scaling", "requires no_rope_layers", model.no_rope_scaling, "leave it out")
    yield from _find_full_attention_problems(model)
    if model.layer_scale and (model.norm_position in ("sum", "stream") or model.encoder or model.retro):
        found = list_given_settings(model, "encoder", "retro") or f"norm_position: {model.norm_position}"
        yield ConfigProblem("layer_scale", f"is not supported with {found}", True, "layer_scale: false")
    if model.head_bias and (found := list_given_settings(model, "encoder", "masked_lm")):
        rule = f"is not supported with {found}, which has a bias of its own"
        yield ConfigProblem("head_bias", rule, True, "head_bias: false")
    yield from _find_function_problems(model)
    yield from _find_bidirectional_problems(model)
    yield from _find_vision_problems(model)
    if model.activation == "xielu" and (found := list_given_settings(model, "moe", "encoder", "retro")):
        yield ConfigProblem("activation", f"is not supported with {found}", "xielu", "activation: swiglu")
    yield from _find_mlp_problems(model)
    if model.output_input_norms and (found := list_given_settings(model, "moe", "mla", "encoder", "retro", "layers")):
        yield ConfigProblem("output_input_norms", f"is not supported with {found}", True, "output_input_norms: false")
    if model.qkv_clip and model.mla:
        yield ConfigProblem("qkv_clip", "is not supported with mla", model.qkv_clip, "leave out mla")
    if model.attention_gate and model.mla and model.mla.q_lora_rank:
        yield ConfigProblem("attention_gate", "is not supported with mla.q_lora_rank", hint="leave out mla.q_lora_rank")
    yield from _find_layer_problems(model) if model.layers is not None else ()
    yield from _find_compressed_problems(model) if model.compressed else ()
    yield from _find_hash_routing_problems(model) if model.moe and model.moe.hash_layers else ()
    yield from _find_block_problems(model)
    yield from find_encoder_config_problems(model)
    yield from find_retro_config_problems(model)


def _find_full_attention_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules of layers that differ in heads, values, keys or inputs."""
    yield from _find_shared_input_problems(model)
    for name in ("full_attention", "value_norm", "keys_are_values", "value_head_dim", "softplus_gate"):
        if getattr(model, name) and (found := list_given_settings(model, "mla", "encoder", "retro")):
            yield ConfigProblem(name, f"is not supported with {found}", hint=f"leave out {name}")
    yield from _find_asymmetric_problems(model) if model.has_asymmetric_attention else ()
    full = model.full_attention
    if full is None:
        return
    if (heads := model.full_attention_layer_config.num_attention_heads) % full.num_kv_heads:
        rule = f"must divide num_attention_heads = {heads}"
        hint = f"full_attention.num_kv_heads: {find_largest_divisor(heads, full.num_kv_heads)}"
        yield ConfigProblem("full_attention.num_kv_heads", rule, full.num_kv_heads, hint)
    if full.num_attention_heads and (model.has_position_bias or model.shared_kv_layers):
        rule = "is not supported with position: alibi or relative, and shared_kv_layers"
        yield ConfigProblem("full_attention.num_attention_heads", rule, hint="position: rope")
    if model.position == "rope" and model.full_attention_layer_config.rotary_dim % 2:
        rule = "must give an even number of rotated elements (RoPE)"
        yield ConfigProblem("full_attention.head_dim", rule, full.head_dim, "change full_attention.head_dim")


def _find_hyper_connection_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield settings that a model with hyper-connections does not have."""
    names = ("mtp_layers", "encoder", "retro", "vision", "parallel_residual", "layer_scale", "norm_positions")
    yield from find_conflicting_settings(
        model, "hyper_connections", (*names, "per_layer_input_size", "shared_kv_layers")
    )
    if model.norm_position != "pre" or not model.causal:
        rule = "requires norm_position: pre and causal attention"
        yield ConfigProblem("hyper_connections", rule, hint="leave out hyper_connections")


def _find_altup_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield settings that a model with AltUp, or with sparse gates, does not have."""
    if model.altup is not None:
        names = ("hyper_connections", "mtp_layers", "encoder", "retro", "vision", "moe", "layers", "parallel_residual")
        yield from find_conflicting_settings(model, "altup", (*names, "layer_scale", "norm_positions", "relative_bias"))
        if model.norm_position != "both" or not model.per_layer_input_size or not model.first_norm or not model.causal:
            rule = "requires norm_position: both, per_layer_input_size and causal attention"
            yield ConfigProblem("altup", rule, hint="leave out altup")
        if model.altup.active >= model.altup.streams:
            yield ConfigProblem("altup.active", f"must be below streams = {model.altup.streams}", model.altup.active)
    if model.ffn_sparsity is not None:
        if len(model.ffn_sparsity) != model.num_layers:
            rule = f"must have a value for each of num_layers = {model.num_layers} layers"
            yield ConfigProblem("ffn_sparsity", rule, len(model.ffn_sparsity))
        if not model.has_gated_mlp or model.moe or model.mlp_multipliers or model.output_input_norms:
            rule = "requires a gated activation, and no moe, mlp_multipliers and output_input_norms"
            yield ConfigProblem("ffn_sparsity", rule, hint="leave out ffn_sparsity")
    if (rows := model.per_layer_vocab_size) and (not model.per_layer_input_size or rows >= model.vocab_size):
        rule = f"requires per_layer_input_size, and must be below vocab_size = {model.vocab_size}"
        yield ConfigProblem("per_layer_vocab_size", rule, rows, "leave out per_layer_vocab_size")


def _find_shortcut_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules of experts whose output is added after the next layer."""
    names = (
        "hyper_connections",
        "parallel_residual",
        "layer_scale",
        "per_layer_input_size",
        "residual_dropout",
        "norm_positions",
    )
    yield from find_conflicting_settings(model, "moe.shortcut", (*names, "encoder", "retro", "vision"))
    if model.norm_position != "pre":
        yield ConfigProblem("norm_position", "must be pre with moe.shortcut", model.norm_position, "norm_position: pre")
    experts = [layer for layer in range(model.num_layers + model.mtp_layers) if model.has_shortcut(layer)]
    alone = all(layer + 1 < model.num_layers and layer + 1 not in experts for layer in experts)
    if not alone or any(None in model.get_layer_kind(layer) for each in experts for layer in (each, each + 1)):
        rule = "requires a layer without experts after each with experts, and a mixer and a feed-forward block in both"
        yield ConfigProblem("moe.shortcut", rule, True, f"moe.layers: {list(range(0, model.num_layers - 1, 2))}"[:60])


def _find_asymmetric_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with values of another size, a factor on values or a softplus gate."""
    names = ("attention_gate", "qkv_clip", "value_norm", "keys_are_values", "output_input_norms", "qk_norm_after_rope")
    for name in (*names, "no_rope_scaling", "vision", "mla", "encoder", "retro", "shared_kv_layers"):
        if getattr(model, name) or (model.full_attention and getattr(model.full_attention, name, False)):
            rule = "is not supported with value_head_dim, value_scale and softplus_gate"
            yield ConfigProblem(name, rule, hint=f"leave out {name}")
    if model.rope.query_scaling:
        rule = "is not supported with value_head_dim, value_scale and softplus_gate"
        yield ConfigProblem("rope.query_scaling", rule, model.rope.query_scaling, "leave out rope.query_scaling")
    if model.softplus_gate and model.qkv_bias:
        yield ConfigProblem("softplus_gate", "is not supported with qkv_bias", model.softplus_gate, "qkv_bias: false")
    if model.position not in ("rope", "none"):
        rule = "must be rope or none with value_head_dim, value_scale and softplus_gate"
        yield ConfigProblem("position", rule, model.position, "position: rope")


def _find_shared_input_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules of what layers get from outside: per-layer inputs, and keys and values of earlier layers."""
    if model.per_layer_input_size and (
        model.encoder or model.retro or model.mtp_layers or not model.has_gated_mlp or model.norm_position == "sum"
    ):
        rule = "requires a gated activation, and no encoder, retro, mtp_layers and norm_position: sum"
        yield ConfigProblem("per_layer_input_size", rule, model.per_layer_input_size, "leave out per_layer_input_size")
    if model.shared_kv_ffn_hidden_size and not model.shared_kv_layers:
        rule = "requires shared_kv_layers"
        yield ConfigProblem("shared_kv_ffn_hidden_size", rule, model.shared_kv_ffn_hidden_size, "leave it out")
    if model.moe and model.moe.separate_norms and (model.norm != "rmsnorm" or model.norm_position != "both"):
        rule = "requires norm: rmsnorm and norm_position: both"
        yield ConfigProblem("moe.separate_norms", rule, True, "moe.separate_norms: false")
    if not model.shared_kv_layers:
        return
    single = ("mla", "encoder", "retro", "layers", "mtp_layers", "attention_sinks", "attention_gate", "output_input_norms",
              "qkv_clip", "no_rope_scaling", "qk_norm_after_rope", "has_position_bias")  # fmt: skip
    found = [name for name in single if getattr(model, name)]
    if found or not model.causal or model.rope.query_scaling or model.qk_norm_span != "head":
        rule = "requires plain causal attention in all layers" + (f", without {found[0]}" if found else "")
        yield ConfigProblem("shared_kv_layers", rule, model.shared_kv_layers, "shared_kv_layers: 0")
        return
    windows = {model.get_attention_window(layer) for layer in filter(model.shares_keys, range(model.num_layers))}
    if len(model.key_value_sources) < len(windows):
        rule = f"must leave a layer of each window before them, of num_layers = {model.num_layers}"
        yield ConfigProblem("shared_kv_layers", rule, model.shared_kv_layers, "reduce shared_kv_layers")


def _find_vision_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules between the vision encoder and the model."""
    if model.vision is None:
        return
    if model.vision.image_token >= model.vocab_size:
        rule, hint = f"must be below vocab_size = {model.vocab_size}", f"vocab_size: {model.vision.image_token + 1}"
        yield ConfigProblem("vision.image_token", rule, model.vision.image_token, hint)
    deepstack = len(model.vision.deepstack_layers)
    if deepstack > model.num_layers:
        rule = f"must have at most num_layers = {model.num_layers} layers, one for each decoder layer"
        hint = "name fewer layers in vision.native.deepstack"
        yield ConfigProblem("vision.native.deepstack", rule, model.vision.deepstack_layers, hint)
    if model.vision.bidirectional and model.attention_dropout:
        yield ConfigProblem(
            "vision.bidirectional", "is not supported with attention_dropout", hint="attention_dropout: 0"
        )
    if model.vision.bidirectional_windows and not model.has_attention_windows:
        rule = "requires decoder layers with a sliding window, found none"
        yield ConfigProblem("vision.bidirectional_windows", rule, True, "vision.bidirectional_windows: false")
    if model.mtp_layers:
        rule = "is not supported with vision"
        yield ConfigProblem("mtp_layers", rule, model.mtp_layers, "mtp_layers: 0, or leave out vision")
    if model.encoder or not model.causal:
        hint = "leave out encoder" if model.encoder else "causal: true"
        yield ConfigProblem("vision", "requires a decoder-only model", hint=hint)


def _find_bidirectional_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules of bidirectional attention and of encoder models."""
    if not model.causal and (model.is_recurrent or model.mtp_layers):
        rule = "is not supported with recurrent layers (mamba, mamba1, delta, kda, lightning, conv) or mtp_layers"
        yield ConfigProblem("causal", rule, model.causal, "mtp_layers: 0" if model.mtp_layers else "causal: true")
    if model.causal and model.masked_lm and (model.mtp_layers or model.score or model.task_head):
        found = list_given_settings(model, "mtp_layers", "score", "task_head")
        yield ConfigProblem("masked_lm", f"is not supported with causal: true and {found}", hint=f"leave out {found}")
    for name in ("pooler", "sentence_pairs"):
        if model.causal and getattr(model, name):
            yield ConfigProblem(name, "requires causal: false (bidirectional attention)", hint=f"leave out {name}")
    if model.sentence_pairs and not model.pooler:
        yield ConfigProblem("sentence_pairs", "requires pooler", True, "sentence_pairs: false")
    if model.embedding_size and (model.causal or (model.masked_lm and not model.masked_lm.dense)):
        rule = "requires causal: false, without masked_lm.dense: false"
        yield ConfigProblem("embedding_size", rule, model.embedding_size, "leave it out")
    if model.relative_bias and (
        model.causal
        or model.encoder
        or model.position in ("relative", "alibi")
        or model.attention_softcap
        or model.attention_sinks
    ):
        rule = "requires causal: false, without encoder, attention_softcap, attention_sinks, and another position than relative"
        yield ConfigProblem("relative_bias", rule, True, "relative_bias: false")
    if model.position_offset and model.position != "learned":
        rule = "requires position: learned"
        yield ConfigProblem("position_offset", rule, model.position_offset, "position: learned")
    yield from _find_hyper_connection_problems(model) if model.hyper_connections else ()
    yield from _find_shortcut_problems(model) if model.has_shortcuts else ()
    yield from _find_altup_problems(model)
    alone = model.norm_position in ("sum", "stream") or model.parallel_residual or model.has_encoder
    if model.norm_positions and (alone or not set(model.norm_positions) <= {*MIXERS, *model.mixers}):
        rule = "must name mixers, and is not supported with norm_position: sum or stream, parallel_residual, encoder and retro"
        yield ConfigProblem("norm_positions", rule, model.norm_positions, "leave it out")
    unused = [kind for kind in model.residual_factors if all(kind not in layer for layer in model.layer_kinds)]
    if model.residual_factors and (unused or model.norm_position != "stream"):
        rule = "requires norm_position: stream, and must name mixers and feed-forward blocks that layers have"
        yield ConfigProblem("residual_factors", rule, model.residual_factors, "leave it out")
    if model.norm_position == "stream" and (model.parallel_residual or not model.first_norm or model.has_encoder):
        rule = "is not supported with parallel_residual, encoder, retro and first_norm: false"
        yield ConfigProblem("norm_position", rule, "stream", "norm_position: pre")
    if model.norm_position == "sum" and (model.parallel_residual or any(None in layer for layer in model.layer_kinds)):
        rule = "requires a mixer and a feed-forward block in every layer, without parallel_residual"
        hint = "parallel_residual: false, and layers such as attention+mlp"
        yield ConfigProblem("norm_position", rule, "sum", hint)


def _find_head_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules between the sizes of attention heads."""
    heads = model.num_attention_heads
    if model.head_dim is None and model.mla is None and model.hidden_size % heads:
        even = -(-model.hidden_size // (2 * heads)) * 2
        rule, hint = (
            f"must be a multiple of num_attention_heads = {heads}",
            f"hidden_size: {even * heads}, or head_dim: {even}",
        )
        yield ConfigProblem("hidden_size", rule, model.hidden_size, hint)
    if heads % model.key_value_heads:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        hint = f"num_kv_heads: {find_largest_divisor(heads, model.key_value_heads)}, or another of {fits}"
        yield ConfigProblem("num_kv_heads", f"must divide num_attention_heads = {heads}", model.key_value_heads, hint)
    size = model.query_key_head_dim
    rule = f"must give an even number of rotated elements of the head size {size}"
    if model.position == "rope" and model.rotary_dim % 2 and model.mla is not None:
        hint = f"mla.qk_rope_head_dim: {model.rotary_dim + 1}"
        yield ConfigProblem("mla.qk_rope_head_dim", "must be even", model.rotary_dim, hint)
    elif model.position == "rope" and model.rotary_dim % 2:
        hint = (
            f"head_dim: {size + 1}" if model.rope.fraction == 1 else f"rope.fraction: {(model.rotary_dim - 1) / size}"
        )
        yield ConfigProblem("rope.fraction", rule, model.rope.fraction, hint)
    if model.local_rope and int(size * model.local_rope.fraction) % 2 and model.mla is None:
        hint = f"local_rope.fraction: {(int(size * model.local_rope.fraction) - 1) / size}"
        yield ConfigProblem("local_rope.fraction", rule, model.local_rope.fraction, hint)
    for name, rope in (("rope", model.rope), ("local_rope", model.local_rope)):
        yield from _find_rope_problems(name, rope, model.rotary_dim // 2) if rope else ()
    if model.mla and (model.qk_norm or model.key_value_heads != heads or model.head_dim or model.attention_sinks):
        found = list_given_settings(model, "head_dim", "num_kv_heads", "qk_norm", "attention_sinks")
        yield ConfigProblem("mla", f"is not supported with {found}", hint=f"leave out {found}")
    if model.mla and (model.position not in ("rope", "none") or model.rope.fraction != 1):
        rule = "requires position: rope or none, and rope.fraction = 1"
        hint = "position: rope" if model.position not in ("rope", "none") else "rope.fraction: 1"
        yield ConfigProblem("mla", rule, hint=hint)
    if model.mla and model.no_rope_layers:
        yield ConfigProblem("no_rope_layers", "is not supported with mla", hint="leave it out")
    if model.mla and model.mla.indexer:
        names = ("sliding_window", "attention_softcap", "attention_dropout", "vision", "encoder", "retro")
        yield from find_conflicting_settings(model, "mla.indexer", names)
        if not model.causal:
            yield ConfigProblem("causal", "must be true with mla.indexer", False, "causal: true")
        if model.position != "rope":
            yield ConfigProblem("position", "must be rope with mla.indexer", model.position, "position: rope")


def _find_compressed_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules of DeepSeek-V4's attention."""
    section = model.compressed
    assert section is not None
    mixers = {kind.mixer for kind in model.layer_kinds}
    if not mixers <= {*COMPRESSED_MIXERS}:
        rule = f"requires that the mixer of each layer is one of {', '.join(COMPRESSED_MIXERS)}"
        yield ConfigProblem("compressed", rule, hint="name them in layers, such as csa+moe")
    if model.num_attention_heads % section.output_groups:
        rule = f"must divide num_attention_heads = {model.num_attention_heads}"
        hint = f"compressed.output_groups: {find_largest_divisor(model.num_attention_heads, section.output_groups)}"
        yield ConfigProblem("compressed.output_groups", rule, section.output_groups, hint)
    if model.rotary_dim % 2 or (model.local_rope or model.rope).fraction != model.rope.fraction:
        rule = (
            f"must be equal in rope and local_rope, and give an even number of the head size {model.query_key_head_dim}"
        )
        yield ConfigProblem("rope.fraction", rule, model.rope.fraction, "change rope.fraction or local_rope.fraction")
    for name, rope in (("rope", model.rope), ("local_rope", model.local_rope)):
        yield from _find_rope_problems(name, rope, model.rotary_dim // 2) if rope else ()
        if rope and (rope.scaling in ("dynamic", "longrope") or rope.query_scaling or rope.sections):
            rule = "with scaling dynamic or longrope, query_scaling or sections is not supported with compressed"
            yield ConfigProblem(name, rule, hint=f"{name}.scaling: none, and leave out the others")
    if "csa" in mixers and section.indexer is None:
        yield ConfigProblem(
            "compressed.indexer", "is required: layers names csa layers", hint="give compressed.indexer"
        )
    if section.indexer is not None:
        yield from _find_entry_indexer_problems(model, section.indexer)
    names = ("mtp_layers", "encoder", "retro", "vision", "mla", "sliding_window", "attention_dropout", "attention_softcap", "qk_norm", "qkv_bias",
             "attention_out_bias", "attention_gate", "no_rope_layers", "full_attention", "full_attention_layers", "qkv_clip", "task_head", "score",
             "value_head_dim", "value_norm", "keys_are_values", "softplus_gate", "attention_scores")  # fmt: skip
    yield from find_conflicting_settings(model, "compressed", names)
    if model.num_kv_heads not in (None, 1):
        rule = "must be 1 with compressed, whose heads share one key"
        yield ConfigProblem("num_kv_heads", rule, model.num_kv_heads, "num_kv_heads: 1")
    if model.value_scale != 1:
        yield ConfigProblem("value_scale", "is not supported with compressed", model.value_scale, "value_scale: 1")
    if not model.causal or model.position != "rope" or model.norm != "rmsnorm" or model.zero_centered_norm:
        rule = "requires causal attention, position: rope and norm: rmsnorm, not zero-centered"
        yield ConfigProblem("compressed", rule, hint="leave out compressed")


def _find_entry_indexer_problems(model: ModelConfig, indexer: IndexerConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules of the indexer of compressed sparse attention."""
    if indexer.head_dim < model.rotary_dim:
        rule = f"must be at least the {model.rotary_dim} rotated elements of a head"
        yield ConfigProblem(
            "compressed.indexer.head_dim", rule, indexer.head_dim, f"compressed.indexer.head_dim: {model.rotary_dim}"
        )
    if indexer.interleaved != model.rope.interleaved:
        value = str(model.rope.interleaved).lower()
        rule, hint = f"must be rope.interleaved = {value}", f"compressed.indexer.interleaved: {value}"
        yield ConfigProblem("compressed.indexer.interleaved", rule, indexer.interleaved, hint)
    if indexer.kl_loss:
        rule = "must be 0: the indexer of compressed attention has no loss"
        yield ConfigProblem("compressed.indexer.kl_loss", rule, indexer.kl_loss, "compressed.indexer.kl_loss: 0")


def _find_hash_routing_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules of layers whose experts are chosen by token id."""
    assert model.moe is not None
    named = model.moe.hash_layers or []
    fits = [layer for layer in named if layer < model.num_layers and model.is_moe_layer(layer)]
    if wrong := sorted({*named} - {*fits}):
        rule = "must be layers with experts, without those of mtp_layers"
        hint = f"moe.hash_layers: {fits}" if fits else "leave out moe.hash_layers"
        yield ConfigProblem("moe.hash_layers", rule, wrong, hint)
    yield from find_conflicting_settings(model, "moe.hash_layers", ("encoder", "retro", "vision"))


def _find_mlp_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules of the limit of activations, and of the MLP's output bias and factors."""
    if model.activation_limit and model.activation not in ("swiglu", "clamped_swiglu"):
        rule = "requires activation: swiglu or clamped_swiglu"
        yield ConfigProblem("activation_limit", rule, model.activation_limit, "activation: swiglu")
    if model.activation == "clamped_swiglu" and not model.activation_limit:
        yield ConfigProblem(
            "activation_limit", "is required with activation: clamped_swiglu", hint="activation_limit: 7.0"
        )
    if model.mlp_out_bias and (model.moe or model.mlp_bias):
        rule = "is not supported with moe, and is part of mlp_bias"
        yield ConfigProblem("mlp_out_bias", rule, True, "mlp_out_bias: false")
    if model.mlp_multipliers and (model.moe or not model.has_gated_mlp):
        rule = "requires a gated activation, such as swiglu, and no moe"
        yield ConfigProblem("mlp_multipliers", rule, list(model.mlp_multipliers), "leave it out")


def _find_layer_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield violated rules between the layer kinds and other fields."""
    named = len(expand_layer_pattern(model.layers or []))
    if named not in (model.num_layers, model.num_layers + model.mtp_layers):
        mtp = f" (or {model.num_layers + model.mtp_layers} with the mtp_layers)" if model.mtp_layers else ""
        hint = f"num_layers: {named}" if not model.mtp_layers else ""
        rule = f"conflicts with layers, which names {named} layers instead of {model.num_layers}{mtp}"
        yield ConfigProblem("num_layers", rule, model.num_layers, hint)
        return
    if model.moe and model.moe.layers is not None:
        yield ConfigProblem("moe.layers", "conflicts with layers", model.moe.layers, "leave out moe.layers")
    if model.moe and not any(kind.feed_forward == "moe" for kind in model.layer_kinds):
        yield ConfigProblem(
            "moe",
            "requires a layer with experts in layers",
            hint="name one in layers, such as attention+moe, or leave out moe",
        )
    given = {
        "mamba": model.mamba is not None,
        "mamba1": model.mamba1 is not None,
        "delta": model.delta is not None,
        "kda": model.kda is not None,
        "lightning": model.lightning is not None,
        "conv": model.conv is not None,
        "hybrid": model.hybrid is not None,
        **dict.fromkeys(COMPRESSED_MIXERS, model.compressed is not None),
        "moe": model.moe is not None,
    }
    yield from find_missing_sections(model.layer_kinds, given)
    if model.hybrid and (model.mla or model.full_attention):
        found = list_given_settings(model, "mla", "full_attention")
        yield ConfigProblem("hybrid", f"is not supported with {found}", hint=f"leave out {found}")
    if model.parallel_residual and any(None in layer for layer in model.layer_kinds):
        rule = "requires a mixer and a feed-forward block in every layer"
        yield ConfigProblem("parallel_residual", rule, hint="use layers such as attention+mlp")


def _find_block_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield blocks of extensions whose extension is not loaded, that no layer has, or that have a built-in name."""
    used = {half for kind in model.layer_kinds for half in kind}
    for section, known in (("mixers", MIXERS), ("feed_forwards", FEEDS)):
        for name, block in getattr(model, section).items():
            path = f"{section}.{name}"
            if name in known:
                rule = f"must have another name than those of mega: {', '.join(known)}"
                yield ConfigProblem(path, rule, hint=f"rename it, or leave out {path}")
            elif block.declares is None:
                hint = "name its file or package in extensions: [./FILE.py], or correct the name"
                kind = section.removesuffix("s").replace("_", "-").replace("feed-forward", "feed-forward block")
                yield ConfigProblem(path, f"requires an extension with a {kind} {name!r}", hint=hint)
            if name not in used:
                yield ConfigProblem(path, "requires a layer that names it in layers", hint=f"layers: [{name}+mlp, ...]")
    if (model.mixers or model.feed_forwards) and (model.encoder or model.retro or model.vision):
        rule = "are not supported in a model with encoder, retro or vision"
        yield ConfigProblem(
            "mixers", rule, hint=f"leave out {list_given_settings(model, 'encoder', 'retro', 'vision')}"
        )


def _find_function_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield names of functions that no loaded extension has, settings of unused ones, and unsupported combinations."""
    used = set()
    for key in FUNCTION_FIELDS.values():
        name, known = getattr(model, key), FUNCTION_NAMES[key]
        if name is None or name in known:
            continue
        used.add(name)
        section = model.functions.get(name)
        if section is None or section.declares is None:
            near = find_near_option(name, known)
            hint = f"did you mean {near!r}?" if near else "name its file in extensions: [./FILE.py]"
            rule = (
                f"must be {', '.join((*known, 'or one that an extension adds'))}" if known else "requires its extension"
            )
            yield ConfigProblem(key, rule, name, hint)
        elif model.encoder or model.retro or model.vision or model.mla:
            rule = "of an extension is not supported in a model with encoder, retro, vision or mla"
            found = list_given_settings(model, "encoder", "retro", "vision", "mla")
            yield ConfigProblem(key, rule, name, f"leave out {found}")
    for name in sorted(model.functions.keys() - used):
        yield ConfigProblem(f"functions.{name}", "requires a setting of the model that names it", hint=f"norm: {name}")
    if model.attention_scores in used:
        for key in ("attention_dropout", "chunked_window"):
            if value := getattr(model, key):
                yield ConfigProblem(key, "is not supported with attention_scores", value, f"leave out {key}")
    if model.position in used:
        for key in ("no_rope_layers", "local_rope", "qk_norm_after_rope"):
            if value := getattr(model, key):
                yield ConfigProblem(key, "requires position: rope", value, f"leave out {key}")
    if model.norm in used and model.zero_centered_norm:
        yield ConfigProblem(
            "zero_centered_norm", "is not supported with the norm of an extension", True, "zero_centered_norm: false"
        )


def _find_rope_problems(name: str, rope: RopeConfig, pairs: int) -> Iterator[ConfigProblem]:
    if rope.scaling != "none" and rope.factor < 1:
        yield ConfigProblem(f"{name}.factor", "must be at least 1 with scaling", rope.factor, f"{name}.factor: 1")
    if rope.sections is not None and sum(rope.sections) != pairs:
        rule = f"must sum to {pairs}, the number of rotated pairs"
        yield ConfigProblem(f"{name}.sections", rule, rope.sections, "change the numbers, or the head size")
    if rope.sections_interleaved and rope.sections is None:
        yield ConfigProblem(f"{name}.sections_interleaved", f"requires {name}.sections", True, f"set {name}.sections")
    if rope.sections is not None and rope.scaling in ("dynamic", "longrope"):
        rule = f"is not supported with {name}.scaling = {rope.scaling}"
        yield ConfigProblem(f"{name}.sections", rule, rope.sections, f"leave out {name}.sections")
    if rope.scaling in ("llama3", "yarn", "longrope") and rope.original_max_position is None:
        rule = f"is required with {name}.scaling = {rope.scaling}"
        hint = f"set {name}.original_max_position to the context length before scaling"
        yield ConfigProblem(f"{name}.original_max_position", rule, hint=hint)
    if rope.query_scaling and (rope.original_max_position is None or rope.sections or name == "local_rope"):
        rule = "requires original_max_position, in rope alone, without sections"
        yield ConfigProblem(f"{name}.query_scaling", rule, rope.query_scaling, f"set {name}.original_max_position")
    for key in ("short_factor", "long_factor"):
        factors = getattr(rope, key)
        if rope.scaling == "longrope" and len(factors or ()) != pairs:
            rule = f"must have {pairs} numbers with {name}.scaling = longrope, one for each rotated pair"
            yield ConfigProblem(f"{name}.{key}", rule, factors, f"set {name}.{key} to a list of {pairs} numbers")
