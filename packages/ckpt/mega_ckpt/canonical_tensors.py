"""Canonical tensors of a model: named as in HuggingFace Llama, unfused, (out, in), vocabulary unpadded.

Legend: V vocabulary, D model width, F feed-forward width, E experts, P positions, d head dimension, H heads of a state
space, G their groups, N state size, k kernel size of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import ConfigError
from mega_common.layer_kinds import COMPRESSED_MIXERS, AltUpConfig, IndexerConfig
from mega_common.model_config import ModelConfig
from mega_common.vision_config import PROJECTOR, TOWER, VisionConfig

TensorShapes = dict[str, TensorShape]
EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
SCORE_BIAS = "score.bias"
EXPERT_TABLE = "tid2eid"  # end of the name of the table of experts by token id
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
# Prefixes of the tensors of reward and task heads, which a language model may lack: they are then randomly initialized.
TASK_HEADS = ("score.", "model.pooler.", "lm_head.dense.", "lm_head.norm.")


def canonical_tensors(config: ModelConfig) -> TensorShapes:
    """Return {canonical name: shape} of every tensor of a model, in the order of the forward pass.
    Canonical names are mega's own tensor names.

    A layer's experts are one tensor stacked on axis 0. `lm_head.weight` is absent with tied embeddings, and replaced by
    `score.weight` (and `score.bias`) in a model with a reward or task head. A module of transformers has the names and the order of transformers.
    """
    if config.transformers is not None:
        return dict(config.transformers.tensors)
    width, vocab, embedded = config.hidden_size, config.vocab_size, config.embedding_width
    out: TensorShapes = {EMBEDDING: (vocab, embedded)}
    if config.position == "learned":
        out["model.embed_positions.weight"] = (config.max_position + config.position_offset, embedded)
    out |= _vision(config)
    if config.position == "relative" and not config.relative.every_layer:
        out |= {f"model.{stack}_relative_bias.weight": _relative(config) for stack in ("encoder", "decoder")}
    out |= {"model.relative_bias.weight": _relative(config)} if config.relative_bias else {}
    if config.token_types:
        out["model.embed_types.weight"] = (config.token_types, embedded)
    out |= _norm(config, "model.embed_norm", embedded) if config.embedding_norm else {}
    out |= _linear("model.embed_proj", width, embedded, True) if config.embedding_size else {}
    out |= _layer_inputs(config, config.per_layer_input_size) if config.per_layer_input_size else {}
    out |= _stream_projections(config, "altup_projections")
    for index in range(config.num_layers):
        if config.encoder and index == config.encoder.num_layers:
            out |= _norm(config, "model.encoder_norm")
        out |= {f"model.layers.{index}.{name}": shape for name, shape in _layer(config, index).items()}
        out |= _retro_encoder(config, index)
    out |= _hyper_connection(config, "model.hc_head.hc_", head=True) if config.hyper_connections else {}
    out |= _stream_projections(config, "altup_unembed_projections")
    out |= _norm(config, "model.norm") if config.norm_position != "sum" else {}
    out |= _encoder_heads(config)
    if config.num_score_outputs:
        out[SCORE] = (config.num_score_outputs, width)
        out |= {SCORE_BIAS: (config.num_score_outputs,)} if config.has_score_bias else {}
    elif config.task_head is None and not config.tie_embeddings:
        out[HEAD] = (vocab, embedded)
    for index in range(config.num_layers, config.num_layers + config.mtp_layers):
        out |= {f"model.layers.{index}.{name}": shape for name, shape in _mtp_layer(config, index).items()}
    return out


def _layer_inputs(config: ModelConfig, size: int) -> TensorShapes:
    """Return the tensors that make the inputs of all layers: embedding table, projection and norm."""
    joined = config.num_layers * size
    return {
        LAYER_EMBEDDING: (config.per_layer_vocab_size or config.vocab_size, joined),
        **_linear("model.per_layer_model_projection", joined, config.hidden_size, False),
        **_norm(config, "model.per_layer_projection_norm", size),
    }


def _layer_input_gate(config: ModelConfig, size: int) -> TensorShapes:
    """Return the tensors by which a layer adds its input: gate, projection and norm."""
    return {
        **_linear("per_layer_input_gate", size, config.hidden_size, False),
        **_linear("per_layer_projection", config.hidden_size, size, False),
        **_norm(config, "post_per_layer_input_norm"),
    }


def _vision(config: ModelConfig) -> TensorShapes:
    """Return the tensors of a vision encoder and its projector, including last layers and a norm that may be unused."""
    vision, tower = config.vision, config.vision_encoder_config
    if vision is None or tower is None:
        return {}
    if vision.module is not None:
        return dict(vision.module.tensors)
    width, prefixes = vision.hidden_size, "model.layers." if vision.native else ("model.layers.", "model.norm.")
    layers = {
        name.replace("model.", TOWER, 1): shape
        for name, shape in canonical_tensors(tower).items()
        if name.startswith(prefixes)
    }
    count = vision.native.positions if vision.native else vision.patches_per_image + vision.class_token
    return {
        **_linear(f"{TOWER}embed_patches", width, vision.values_per_patch, vision.patch_bias),
        **({f"{TOWER}class_embedding": (width,)} if vision.class_token else {}),
        **({f"{TOWER}embed_positions.weight": (count, width)} if count else {}),
        **(_norm(tower, f"{TOWER}pre_norm") if vision.pre_norm else {}),
        **layers,
        **_projector(config, vision),
    }


def _projector(config: ModelConfig, vision: VisionConfig) -> TensorShapes:
    if vision.projector == "norm":
        return {
            f"{PROJECTOR}norm.weight": (vision.hidden_size,),
            **_linear(f"{PROJECTOR}linear", config.hidden_size, vision.hidden_size, bias=False),
        }
    if vision.native:
        out = _patch_merger(config, vision, PROJECTOR, vision.hidden_size)
        for index in range(len(vision.deepstack_layers)):
            prefix, joined = f"{PROJECTOR}deepstack.{index}.", vision.hidden_size * vision.native.merge**2
            out |= _patch_merger(config, vision, prefix, joined)
        return out
    return {
        **_linear(f"{PROJECTOR}linear_1", config.hidden_size, vision.hidden_size, vision.projector_bias),
        **_linear(f"{PROJECTOR}linear_2", config.hidden_size, config.hidden_size, vision.projector_bias),
        **({f"{PROJECTOR}newline": (config.hidden_size,)} if vision.pinpoints is not None else {}),
    }


def _patch_merger(config: ModelConfig, vision: VisionConfig, prefix: str, norm_size: int) -> TensorShapes:
    """Return the tensors of a patch merger; its norm is over one patch, or over all patches of a feature."""
    assert vision.native is not None
    joined = vision.hidden_size * vision.native.merge**2
    return {
        f"{prefix}norm.weight": (norm_size,),
        **({f"{prefix}norm.bias": (norm_size,)} if vision.native.norm == "layernorm" else {}),
        **_linear(f"{prefix}linear_1", joined, joined, bias=True),
        **_linear(f"{prefix}linear_2", config.hidden_size, joined, bias=True),
    }


def count_model_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the model that `config` describes; tied embeddings count once.

    Tables of experts by token id are not counted.
    """
    return sum(math.prod(shape) for name, shape in canonical_tensors(config).items() if not name.endswith(EXPERT_TABLE))


def abbreviate_name_list(names: Iterable[str]) -> str:
    """Format names for an error message: the first name and the number of further ones."""
    first, *others = sorted(names)
    return first + (f" (and {len(others)} more)" if others else "")


def _encoder_heads(config: ModelConfig) -> TensorShapes:
    """Return the tensors of the masked-language-model head, the pooler and the sentence-pair head."""
    width, head = config.hidden_size, config.masked_lm
    masked_lm: TensorShapes = {}
    if head and head.dense:
        out = config.embedding_width
        masked_lm = {**_linear("lm_head.dense", out, width, head.dense_bias), **_norm(config, "lm_head.norm", out)}
    return {
        **masked_lm,
        **({"lm_head.bias": (config.vocab_size,)} if config.has_output_bias else {}),
        **(_linear("model.pooler", width, width, True) if config.pooler else {}),
        **(_linear("pair_head", 2, width, True) if config.sentence_pairs else {}),
    }


_KEYS = {"self_attn.k_", "self_attn.v_"}  # first letters of the tensors of keys and values


def _layer(config: ModelConfig, index: int) -> TensorShapes:
    config = config.get_layer_config(index)
    before, after = config.norm_position in ("pre", "both", "stream"), config.norm_position not in ("pre", "stream")
    mixer, feed = config.get_mixer_kind(index), config.get_feed_forward_kind(index)
    mlp_norm = "pre_feedforward_layernorm" if config.norm_position == "both" else "post_attention_layernorm"
    parts: list[TensorShapes] = [
        _norm(config, "input_layernorm") if mixer and before and (index or config.first_norm) else {},
        {name: shape for name, shape in _mixer(config, mixer).items() if config.has_own_keys or name[:12] not in _KEYS},
        _norm(config, "post_attention_layernorm") if mixer and after else {},
        _cross_attention(config) if config.has_cross_attention(index) else {},
        _norm(config, mlp_norm) if before and config.has_norm_before_feed(feed) else {},
        _feed(config, feed, hashed=config.is_hash_layer(index)),
        _norm(config, "post_feedforward_layernorm") if feed and after else {},
        _layer_input_gate(config, config.per_layer_input_size) if config.per_layer_input_size else {},
        {"layer_scalar": (1,)} if config.layer_scale else {},
        _hyper_connection(config, "attn_hc.") if config.hyper_connections and mixer else {},
        _hyper_connection(config, "ffn_hc.") if config.hyper_connections and feed else {},
        _altup(config, config.altup) if config.altup else {},
    ]
    return _join_tensors(parts, index)


def _join_tensors(parts: Sequence[TensorShapes], layer: int) -> TensorShapes:
    """Return the tensors of all parts of a layer.

    Raises:
        ConfigError: if two parts have a tensor of one name, as a mixer and a feed-forward block of extensions may.
    """
    found: TensorShapes = {}
    for part in parts:
        for name in part:
            if name in found:
                raise ConfigError(
                    f"two tensors are named model.layers.{layer}.{name}",
                    hint="let the names of an extension's block begin with model.layers.{layer}.NAME_OF_THE_BLOCK",
                )
        found |= part
    return found


def _hyper_connection(config: ModelConfig, prefix: str, *, head: bool = False) -> TensorShapes:
    """Return the tensors of hyper-connections around a block of a layer, or before the head."""
    assert config.hyper_connections is not None
    n = config.hyper_connections.streams
    rows = n if head else (2 + n) * n
    return {
        f"{prefix}fn": (rows, config.stream_width),
        f"{prefix}base": (rows,),
        f"{prefix}scale": (1,) if head else (3,),
    }


def _altup(config: ModelConfig, altup: AltUpConfig) -> TensorShapes:
    """Return the tensors of a layer that predict and correct residual streams, and its residual of low rank."""
    n, width = altup.streams, config.hidden_size
    return {
        "altup.correct_output_scale": (width,),
        **_linear("altup.correction_coefs", n, n, False),
        **_linear("altup.prediction_coefs", n * n, n, False),
        **_linear("altup.modality_router", n, width, False),
        **_norm(config, "altup.router_norm"),
        **_linear("laurel.linear_left", altup.laurel_rank, width, False),
        **_linear("laurel.linear_right", width, altup.laurel_rank, False),
        **_norm(config, "laurel.post_laurel_norm"),
    }


def _stream_projections(config: ModelConfig, name: str) -> TensorShapes:
    """Return the projections from or to all residual streams but the first, in a model with AltUp."""
    others, shape = range(config.altup.streams - 1) if config.altup else (), (config.hidden_size,) * 2
    return {f"model.{name}.{index}.weight": shape for index in others}


def _mixer(config: ModelConfig, kind: str | None) -> TensorShapes:
    if kind is None:
        return {}
    if kind in config.mixers:
        return dict(config.mixers[kind].declaration.tensors)
    mixers: dict[str, Callable[[ModelConfig], TensorShapes]] = {
        "mamba": _mamba,
        "mamba1": _mamba1,
        "delta": _delta,
        "kda": _kimi_delta,
        "lightning": _lightning,
        "conv": _short_convolution,
        "hybrid": lambda config: _attention(config) | _mamba(config),
        "attention": _latent_attention if config.mla else _attention,
        **{name: partial(_compressed_attention, kind=name) for name in COMPRESSED_MIXERS},
    }
    return mixers[kind](config)


def _feed(config: ModelConfig, kind: str | None, *, hashed: bool) -> TensorShapes:
    if kind is None:
        return {}
    if kind in config.feed_forwards:
        return dict(config.feed_forwards[kind].declaration.tensors)
    return _experts(config, hashed=hashed) if kind == "moe" else _mlp(config, config.ffn_hidden_size)


def _mtp_layer(config: ModelConfig, index: int) -> TensorShapes:
    """Return the tensors of a multi-token prediction (MTP) layer (arXiv:2412.19437): two norms and a projection before
    the layer, one norm after it.
    """
    width = config.hidden_size
    return {
        **_norm(config, "enorm"),
        **_norm(config, "hnorm"),
        "eh_proj.weight": (width, 2 * width),
        **_layer(config, index),
        **_norm(config, "shared_head.norm"),
    }


def _norm(config: ModelConfig, name: str, width: int | None = None) -> TensorShapes:
    shape: TensorShape = (width or config.hidden_size,)
    if not config.norm_weight:
        return {}
    biased = config.norm == "layernorm" and config.norm_bias
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape} if biased else {})


def _linear(name: str, out: int, into: int, bias: bool) -> TensorShapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def _attention(config: ModelConfig) -> TensorShapes:
    width, head, value = config.hidden_size, config.query_key_head_dim, config.attention_value_dim
    queries, keys = config.num_attention_heads * head, config.key_value_heads * head
    values, out = config.key_value_heads * value, config.num_attention_heads * value
    spans: dict[str, tuple[TensorShape, TensorShape]] = {
        **dict.fromkeys(("head", "layernorm", "plain"), ((head,), (head,))),
        "all": ((queries,), (keys,)),
        "each": ((config.num_attention_heads, head), (config.key_value_heads, head)),
    }
    kinds = ("weight", "bias") if config.qk_norm_span == "layernorm" else ("weight",)
    gates = {"head": config.num_attention_heads, "channel": out}
    norms: TensorShapes = {
        f"self_attn.{name}_norm.{kind}": span
        for name, span in zip("qk", spans[config.qk_norm_span], strict=True)
        for kind in kinds
    }
    return {
        **_linear("self_attn.q_proj", queries, width, config.qkv_bias),
        **_linear("self_attn.k_proj", keys, width, config.qkv_bias),
        **({} if config.keys_are_values else _linear("self_attn.v_proj", values, width, config.qkv_bias)),
        **(norms if config.qk_norm and config.qk_norm_span != "plain" else {}),
        **(_linear("self_attn.g_proj", queries, width, config.qkv_bias) if config.attention_gate else {}),
        **({"self_attn.g_proj.weight": (gates[config.softplus_gate], width)} if config.softplus_gate else {}),
        **({"self_attn.sinks": (config.num_attention_heads,)} if config.attention_sinks else {}),
        **({"self_attn.relative_bias.weight": _relative(config)} if _own_table(config) else {}),
        **({"self_attn.o_norm.weight": (queries,)} if config.output_input_norms else {}),
        **_linear("self_attn.o_proj", width, out, config.attention_out_bias),
    }


def _own_table(config: ModelConfig) -> bool:
    return config.position == "relative" and config.relative.every_layer


def _relative(config: ModelConfig) -> TensorShape:
    return (config.relative.buckets, config.num_attention_heads)


def _cross_attention(config: ModelConfig) -> TensorShapes:
    """Return the tensors of cross-attention to the encoder output, and of the norm before it."""
    width, head = config.hidden_size, config.query_key_head_dim
    queries, keys = config.num_attention_heads * head, config.key_value_heads * head
    return {
        **_norm(config, "cross_attn_layernorm"),
        **_linear("cross_attn.q_proj", queries, width, config.qkv_bias),
        **_linear("cross_attn.k_proj", keys, width, config.qkv_bias),
        **_linear("cross_attn.v_proj", keys, width, config.qkv_bias),
        **_linear("cross_attn.o_proj", width, queries, config.attention_out_bias and not config.retro),
    }


def _retro_encoder(config: ModelConfig, index: int) -> TensorShapes:
    """Return the tensors of the encoder of retrieved neighbors (Retro), stored in the first layer that attends to
    them.
    """
    encoder = config.neighbor_encoder_config
    if encoder is None or index != config.retrieval_layers[0]:
        return {}
    layers = range(encoder.num_layers)
    return {
        f"{retro_encoder_prefix(index)}{i}.{name}": shape for i in layers for name, shape in _layer(encoder, i).items()
    }


def retro_encoder_prefix(layer: int) -> str:
    """Return the name prefix of the tensors of Retro's neighbor encoder in a checkpoint.
    The encoder is stored in decoder layer `layer`; a layer number of the encoder follows the prefix.
    """
    return f"model.layers.{layer}.encoder."


def _latent_attention(config: ModelConfig) -> TensorShapes:
    """Return the tensors of multi-head latent attention (MLA); the last rows of `kv_a_proj_with_mqa` are the rotary
    part of the key.
    """
    mla, width, heads = config.mla, config.hidden_size, config.num_attention_heads
    assert mla is not None
    queries, bias = heads * config.query_key_head_dim, config.qkv_bias

    def latent_norm(name: str, rank: int) -> TensorShapes:
        return {f"self_attn.{name}.weight": (rank,)} if mla.latent_norm else {}

    latent: TensorShapes = {
        **_linear("self_attn.q_a_proj", mla.q_lora_rank or 0, width, bias),
        **latent_norm("q_a_layernorm", mla.q_lora_rank or 0),
        "self_attn.q_b_proj.weight": (queries, mla.q_lora_rank or 0),
    }
    return {
        **(latent if mla.q_lora_rank else {"self_attn.q_proj.weight": (queries, width)}),
        **({"self_attn.g_proj.weight": (heads, width)} if config.attention_gate else {}),
        **_linear("self_attn.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, width, bias),
        **latent_norm("kv_a_layernorm", mla.kv_lora_rank),
        "self_attn.kv_b_proj.weight": (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        **_linear("self_attn.o_proj", width, heads * mla.v_head_dim, config.attention_out_bias),
        **(_indexer(mla.indexer, mla.q_lora_rank or 0, width) if mla.indexer else {}),
    }


def _indexer(indexer: IndexerConfig, rank: int, width: int) -> TensorShapes:
    """Return the tensors of the indexer of sparse attention (DSA): queries, key and its norm, weights of the heads."""
    return {
        "self_attn.indexer.wq_b.weight": (indexer.num_heads * indexer.head_dim, rank),
        "self_attn.indexer.wk.weight": (indexer.head_dim, width),
        "self_attn.indexer.k_norm.weight": (indexer.head_dim,),
        "self_attn.indexer.k_norm.bias": (indexer.head_dim,),
        "self_attn.indexer.weights_proj.weight": (indexer.num_heads, width),
    }


def _compressed_attention(config: ModelConfig, kind: str) -> TensorShapes:
    """Return the tensors of DeepSeek-V4's attention: with the key that is also the value, and in layers with compressed entries
    the compressor's projections and its bias by the position in a window.
    """
    section, width, size, heads = (
        config.compressed,
        config.hidden_size,
        config.query_key_head_dim,
        config.num_attention_heads,
    )
    assert section is not None
    groups, rank, indexer = section.output_groups, section.q_lora_rank, section.indexer

    def compressor(name: str, rate: int, rows: int, size: int) -> TensorShapes:
        prefix = f"self_attn.{name}"
        return {
            **{f"{prefix}.{part}_proj.weight": (rows, width) for part in ("kv", "gate")},
            f"{prefix}.position_bias": (rate, rows),
            f"{prefix}.kv_norm.weight": (size,),
        }

    entries: TensorShapes = {}
    if kind == "hca":
        entries = compressor("compressor", section.hca_rate, size, size)
    elif kind == "csa" and indexer is not None:
        entries = {
            **compressor("compressor", section.csa_rate, 2 * size, size),
            **compressor("indexer", section.csa_rate, 2 * indexer.head_dim, indexer.head_dim),
            "self_attn.indexer.q_b_proj.weight": (indexer.num_heads * indexer.head_dim, rank),
            "self_attn.indexer.weights_proj.weight": (indexer.num_heads, width),
        }
    return {
        "self_attn.q_a_proj.weight": (rank, width),
        "self_attn.q_a_norm.weight": (rank,),
        "self_attn.q_b_proj.weight": (heads * size, rank),
        "self_attn.kv_proj.weight": (size, width),
        "self_attn.kv_norm.weight": (size,),
        "self_attn.sinks": (heads,),
        **entries,
        "self_attn.o_a_proj.weight": (groups * section.output_rank, heads * size // groups),
        "self_attn.o_b_proj.weight": (width, groups * section.output_rank),
    }


def _mamba(config: ModelConfig) -> TensorShapes:
    """Return the tensors of Mamba-2: in-projection rows and convolution channels, split by purpose."""
    mamba, width = config.mamba, config.hidden_size
    assert mamba is not None
    inner, heads, states = mamba.inner_size, mamba.num_heads, mamba.num_groups * mamba.state_size
    rows = {"z": inner, "x": inner, "B": states, "C": states, "dt": heads}
    into = [_linear(f"mamba.in_proj.{part}", size, width, mamba.bias) for part, size in rows.items()]
    taps = [_linear(f"mamba.conv1d.{part}", rows[part], mamba.conv_kernel, mamba.conv_bias) for part in "xBC"]
    return {
        **{name: shape for tensors in (*into, *taps) for name, shape in tensors.items()},
        **{f"mamba.{name}": (heads,) for name in ("dt_bias", "A_log", "D")},
        **({"mamba.norm.weight": (inner,)} if mamba.norm != "none" else {}),
        **_linear("mamba.out_proj", width, inner, mamba.bias),
    }


def _mamba1(config: ModelConfig) -> TensorShapes:
    """Return the tensors of Mamba-1: `x_proj` has the rows of dt, B and C; each channel has its decays `A_log`."""
    mamba, width = config.mamba1, config.hidden_size
    assert mamba is not None
    inner, states, sizes = mamba.inner_size, mamba.state_size, {"dt": mamba.dt_rank}
    sizes |= {"B": states, "C": states}
    return {
        **_linear("mamba1.in_proj.x", inner, width, mamba.bias),
        **_linear("mamba1.in_proj.z", inner, width, mamba.bias),
        **_linear("mamba1.conv1d.x", inner, mamba.conv_kernel, mamba.conv_bias),
        "mamba1.x_proj.weight": (sum(sizes.values()), inner),
        **({f"mamba1.{part}_norm.weight": (size,) for part, size in sizes.items()} if mamba.norms == "weight" else {}),
        **_linear("mamba1.dt_proj", inner, mamba.dt_rank, True),
        "mamba1.A_log": (inner, states),
        "mamba1.D": (inner,),
        **_linear("mamba1.out_proj", width, inner, mamba.bias),
    }


def _delta(config: ModelConfig) -> TensorShapes:
    """Return the tensors of a gated delta net: queries and keys of the key heads, values, gates and steps of the value
    heads.
    """
    delta, width = config.delta, config.hidden_size
    assert delta is not None
    keys, values = delta.num_key_heads * delta.key_head_dim, delta.num_value_heads * delta.value_head_dim
    rows = {"q": keys, "k": keys, "v": values, "z": values, "b": delta.num_value_heads, "a": delta.num_value_heads}
    return {
        **{f"linear_attn.in_proj.{part}.weight": (size, width) for part, size in rows.items()},
        **{f"linear_attn.conv1d.{part}.weight": (rows[part], delta.conv_kernel) for part in "qkv"},
        **{f"linear_attn.{name}": (delta.num_value_heads,) for name in ("dt_bias", "A_log")},
        "linear_attn.norm.weight": (delta.value_head_dim,),
        "linear_attn.out_proj.weight": (width, values),
    }


def _kimi_delta(config: ModelConfig) -> TensorShapes:
    """Return the tensors of Kimi Delta Attention: projections of queries, keys, values and steps, and the forget gate f
    and output gate g, each one matrix or two of low rank.
    """
    kda, width = config.kda, config.hidden_size
    assert kda is not None
    inner, heads, rank = kda.inner_size, kda.num_heads, kda.head_dim
    gates: TensorShapes = {}
    for part in "fg" if kda.low_rank_gates else "":
        gates |= {f"kda.{part}_a_proj.weight": (rank, width), f"kda.{part}_b_proj.weight": (inner, rank)}
    projected = "qkvb" if kda.low_rank_gates else "qkvbfg"
    return {
        **{f"kda.in_proj.{part}.weight": (heads if part == "b" else inner, width) for part in projected},
        **{f"kda.conv1d.{part}.weight": (inner, kda.conv_kernel) for part in "qkv"},
        **gates,
        "kda.dt_bias": (inner,),
        "kda.A_log": (heads,),
        "kda.norm.weight": (rank,),
        "kda.out_proj.weight": (width, inner),
    }


def _lightning(config: ModelConfig) -> TensorShapes:
    """Return the tensors of lightning attention: projections of queries, keys, values and the output gate z."""
    lightning, width = config.lightning, config.hidden_size
    assert lightning is not None
    inner = lightning.inner_size
    return {
        **{f"lightning.in_proj.{part}.weight": (inner, width) for part in "qkvz"},
        "lightning.norm.weight": (inner,),
        "lightning.out_proj.weight": (width, inner),
    }


def _short_convolution(config: ModelConfig) -> TensorShapes:
    """Return the tensors of a gated short convolution: projections of the gates b and c and of the input x."""
    conv, width = config.conv, config.hidden_size
    assert conv is not None
    rows = [_linear(f"short_conv.in_proj.{part}", width, width, conv.bias) for part in "bcx"]
    return {
        **{name: shape for tensors in rows for name, shape in tensors.items()},
        **_linear("short_conv.conv1d.x", width, conv.kernel, conv.bias),
        **_linear("short_conv.out_proj", width, width, conv.bias),
    }


def _mlp(config: ModelConfig, ffn: int, name: str = "mlp", latent: int | None = None) -> TensorShapes:
    width, bias = latent or config.hidden_size, config.mlp_bias
    return {
        **(_linear(f"{name}.gate_proj", ffn, width, bias) if config.has_gated_mlp else {}),
        **_linear(f"{name}.up_proj", ffn, width, bias),
        **({f"{name}.down_norm.weight": (ffn,)} if config.output_input_norms else {}),
        **_linear(f"{name}.down_proj", width, ffn, bias or config.mlp_out_bias),
        **(
            dict.fromkeys((f"{name}.act_fn.alpha_p", f"{name}.act_fn.alpha_n"), (1,))
            if config.activation == "xielu"
            else {}
        ),
    }


def _experts(config: ModelConfig, *, hashed: bool) -> TensorShapes:
    """Return the router [E, D], the experts' projections stacked [E, ...], and the shared expert.
    With `hashed`, the experts of each token id are in a table [V, K].
    """
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    experts, shared, latent = moe.num_experts, moe.shared_ffn_hidden_size, moe.latent_size
    stacked = _mlp(config, moe.ffn_hidden_size, "mlp.experts", latent)
    norms = ("shared_expert_norm", "shared_expert_output_norm", "experts_norm", "experts_output_norm")
    separate: TensorShapes = {f"mlp.{name}.weight": (width,) for name in norms}
    separate |= {"mlp.gate.scale": (width,), "mlp.gate.per_expert_scale": (experts,)}
    return {
        **(separate if moe.separate_norms else {}),
        **_linear("mlp.gate", moe.num_router_outputs, width, moe.router_bias),
        **(
            {"mlp.gate.e_score_correction_bias": (moe.num_router_outputs,)} if moe.selection_bias and not hashed else {}
        ),
        **({f"mlp.gate.{EXPERT_TABLE}": (config.vocab_size, moe.top_k)} if hashed else {}),
        **({"mlp.fc1_latent_proj.weight": (latent, width)} if latent else {}),
        **{name: (experts, *shape) for name, shape in stacked.items()},
        **({"mlp.fc2_latent_proj.weight": (width, latent)} if latent else {}),
        **(_mlp(config, shared, "mlp.shared_expert") if shared else {}),
        **({"mlp.shared_expert_gate.weight": (1, width)} if moe.shared_gate else {}),
        **(_norm(config, "mlp.output_norm") if moe.output_norm else {}),
    }
