"""Names of a model's tensors in Megatron-Core, and positions of the canonical tensors in them.

A `MegatronTensorMapping` is one tensor of one layer as on a single rank (tp = pp = ep = 1); its pieces map rectangles of it to
rectangles of canonical tensors. Legend: V vocabulary, D width, F feed-forward width, E experts, G key/value groups.

    linear_qkv   per group: queries, key, value                                    [(H + 2G) d, D]
                 with attention gates: queries, gates, key, value                  [(2H + 2G) d, D]
    linear_kv    of cross attention, per head: key, value                          [2H d, D]
    linear_fc1   all gate rows, then all up rows                                   [2F, D], of experts [E, 2F, D]
    eh_proj      columns of the embedding, then of the previous layer              [D, 2D]
    in_proj      of Mamba-2: one tensor each for z, x, B, C and dt; fused in rank files, with the rank's rows of each
    conv1d       likewise for x, B and C; [channels, 1, k] in rank files           [channels, k]
    embedding    padded with unused rows                                           [V', D]

Layers are `decoder.layers`, of a BERT `encoder.layers`; a T5 has both, each counted from 0.

Sources: Megatron-LM, megatron/core/models/{gpt,bert,T5} and transformer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.tensor_pieces import TensorPiece, TensorShape
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

EMBEDDING, HEAD, HEAD_BIAS = "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"
LAYER = "decoder.layers."
STACKS = ("encoder.layers.", LAYER)
MTP_STACK, MTP_INNER = "mtp.layers.", "transformer_layer."  # MTP layers, and the transformer layer in each
EXPERTS = "mlp.experts.experts."
HEAD_STATES = ("output_layer._extra_state", "lm_head.output_layer._extra_state")  # the second one only in T5


@dataclass(frozen=True)
class MegatronTensorMapping:
    """One tensor of a Megatron model, and the canonical tensors in it.

    Attributes:
        name: its name; `decoder.layers.{i}.` has the index of the layer in the whole stack, MTP layers are counted
            separately.
        shape: its shape on a single rank. The experts of a layer are stacked on axis 0.
        pieces: the canonical tensors in it.
        axis: the axis that tensor parallelism shards; None if every rank has the whole tensor.
        halves: number of concatenated tensors on that axis, each of which is sharded separately.
        inside: name of the tensor of rank files that contains it as a block of rows, with the layer's global index; empty
            if it is a separate tensor there.
        taps: the tensor of rank files has an additional axis of length one in the middle.
        te, local: its name inside a layer of Transformer Engine or of Megatron's own layers, if different.
        also: second name of a tensor whose module is part of two modules.
    """

    name: str
    shape: TensorShape
    pieces: tuple[TensorPiece, ...]
    axis: int | None = None
    halves: int = 1
    inside: str = ""
    taps: bool = False
    te: str = ""
    local: str = ""
    also: str = ""

    @property
    def has_vocabulary_rows(self) -> bool:
        """True if the tensor has one row per token of the vocabulary, which may be padded at the end."""
        return self.name in (EMBEDDING, HEAD, HEAD_BIAS)


def list_megatron_tensor_mappings(model: ModelConfig, padded_vocab: int | None = None) -> list[MegatronTensorMapping]:
    """Return every tensor that `model` has in Megatron, in the order of the forward pass.

    Raises:
        CheckpointError: when Megatron has no counterpart of one of the model's tensors.
    """
    shapes = canonical_tensors(model)
    rows = padded_vocab or model.vocab_size
    out = [_vocabulary_part(EMBEDDING, "model.embed_tokens.weight", shapes, rows)]
    if model.position == "learned":
        out.append(_plain_part("embedding.position_embeddings.weight", "model.embed_positions.weight", shapes))
    for index in range(model.num_layers):
        out += _layer_parts(model, index, shapes, get_megatron_layer_prefix(model, index))
    last = "final_norm" if is_hybrid_model(model) else "final_layernorm"
    for kind in ("weight", "bias"):
        for source, stack in (
            ("model.encoder_norm", "encoder"),
            ("model.norm", "decoder" if model.causal else "encoder"),
        ):
            if f"{source}.{kind}" in shapes:
                out.append(_plain_part(f"{stack}.{last}.{kind}", f"{source}.{kind}", shapes))
    if not model.tie_embeddings:
        out.append(_vocabulary_part(HEAD, "lm_head.weight", shapes, rows))
    for index in range(model.mtp_layers):
        out += _mtp_parts(model, index, shapes)
    out += [_plain_part(name, source, shapes) for source, name in _OUTSIDE.items() if source in shapes]
    if "lm_head.bias" in shapes:
        out.append(_vocabulary_part(HEAD_BIAS, "lm_head.bias", shapes, rows))
    if model.encoder:
        out = [replace(part, also=_ALSO.get(part.name, "")) for part in out]
    left = shapes.keys() - {piece.name for part in out for piece in part.pieces}
    if left:
        raise CheckpointError(f"the tensor {min(left)} of this model is not supported in Megatron")
    return out


# {canonical name in a layer: (Megatron's name, axis that tensor parallelism shards)}
_PLAIN: Mapping[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", None),
    "input_layernorm.bias": ("self_attention.linear_qkv.layer_norm_bias", None),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight", None),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight", None),
    "self_attn.sinks": ("self_attention.core_attention.softmax_offset", 0),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", 1),
    "self_attn.o_proj.bias": ("self_attention.linear_proj.bias", None),
    "cross_attn_layernorm.weight": ("pre_cross_attn_layernorm.weight", None),
    "cross_attn_layernorm.bias": ("pre_cross_attn_layernorm.bias", None),
    "cross_attn.q_proj.weight": ("cross_attention.linear_q.weight", 0),
    "cross_attn.q_proj.bias": ("cross_attention.linear_q.bias", 0),
    "cross_attn.o_proj.weight": ("cross_attention.linear_proj.weight", 1),
    "cross_attn.o_proj.bias": ("cross_attention.linear_proj.bias", None),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", None),
    "post_attention_layernorm.bias": ("mlp.linear_fc1.layer_norm_bias", None),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight", 1),
    "mlp.down_proj.bias": ("mlp.linear_fc2.bias", None),
    "mlp.gate.weight": ("mlp.router.weight", None),
    "mlp.gate.bias": ("mlp.router.bias", None),
    "mlp.gate.e_score_correction_bias": ("mlp.router.expert_bias", None),
    "mlp.experts.down_proj.weight": (EXPERTS + "linear_fc2.weight", 2),
    "mlp.experts.down_proj.bias": (EXPERTS + "linear_fc2.bias", None),
    "mlp.shared_expert.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight", 1),
    "mlp.fc1_latent_proj.weight": ("mlp.fc1_latent_proj.weight", None),
    "mlp.fc2_latent_proj.weight": ("mlp.fc2_latent_proj.weight", None),
    "mlp.shared_expert_gate.weight": ("mlp.shared_experts.gate_weight", None),
}
# Tensors of BERT and T5 outside their layers.
_OUTSIDE: Mapping[str, str] = {
    "model.embed_types.weight": "embedding.tokentype_embeddings.weight",
    "lm_head.dense.weight": "lm_head.dense.weight",
    "lm_head.dense.bias": "lm_head.dense.bias",
    "lm_head.norm.weight": "lm_head.layer_norm.weight",
    "lm_head.norm.bias": "lm_head.layer_norm.bias",
    "model.pooler.weight": "pooler.dense.weight",
    "model.pooler.bias": "pooler.dense.bias",
    "pair_head.weight": "binary_head.weight",
    "pair_head.bias": "binary_head.bias",
    "model.encoder_relative_bias.weight": "encoder_relative_pos_emb.relative_attention_bias.weight",
    "model.decoder_relative_bias.weight": "decoder_relative_pos_emb.relative_attention_bias.weight",
}
# Tensors of T5 with two names: {name: second name}.
_ALSO: Mapping[str, str] = {
    "embedding.position_embeddings.weight": "position_embeddings.weight",
    HEAD: f"lm_head.{HEAD}",
    HEAD_BIAS: f"lm_head.{HEAD_BIAS}",
}
# As `_PLAIN`, for Mamba-2.
_MAMBA: Mapping[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("mixer.in_proj.layer_norm_weight", None),
    "input_layernorm.bias": ("mixer.in_proj.layer_norm_bias", None),
    "mamba.dt_bias": ("mixer.dt_bias", 0),
    "mamba.A_log": ("mixer.A_log", 0),
    "mamba.D": ("mixer.D", 0),
    "mamba.norm.weight": ("mixer.norm.weight", 0),
    "mamba.out_proj.weight": ("mixer.out_proj.weight", 1),
}
_BLOCKS: Mapping[str, Sequence[str]] = {
    "in_proj.weight": ("z", "x", "B", "C", "dt"), "conv1d.weight": ("x", "B", "C"), "conv1d.bias": ("x", "B", "C"),
}  # fmt: skip
# As `_PLAIN`, for multi-head latent attention. Down projections are sharded, or whole on every rank.
_LATENT: Mapping[str, tuple[str, int | None]] = {
    "self_attn.q_proj.weight": ("self_attention.linear_q_proj.weight", 0),
    "self_attn.q_a_proj.weight": ("self_attention.linear_q_down_proj.weight", 0),
    "self_attn.q_a_layernorm.weight": ("self_attention.q_layernorm.weight", None),
    "self_attn.q_b_proj.weight": ("self_attention.linear_q_up_proj.weight", 0),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.linear_kv_down_proj.weight", 0),
    "self_attn.kv_a_layernorm.weight": ("self_attention.kv_layernorm.weight", None),
    "self_attn.kv_b_proj.weight": ("self_attention.linear_kv_up_proj.weight", 0),
}
# As `_PLAIN`, for tensors of an MTP layer outside its transformer layer.
_MTP: Mapping[str, tuple[str, int | None]] = {
    "enorm.weight": ("enorm.weight", None),
    "enorm.bias": ("enorm.bias", None),
    "hnorm.weight": ("hnorm.weight", None),
    "hnorm.bias": ("hnorm.bias", None),
    "eh_proj.weight": ("eh_proj.weight", 0),
    "shared_head.norm.weight": ("final_layernorm.weight", None),
    "shared_head.norm.bias": ("final_layernorm.bias", None),
}
# Names in other versions and other kinds of layers: (pattern, normalized name).
_ALIASES = (
    (r"input_layernorm\.(weight|bias)", r"self_attention.linear_qkv.layer_norm_\1"),
    (r"pre_mlp_layernorm\.(weight|bias)", r"mlp.linear_fc1.layer_norm_\1"),
    (r"norm\.(weight|bias)", r"mixer.in_proj.layer_norm_\1"),
    (r"mixer\.conv1d_(weight|bias)", r"mixer.conv1d.\1"),
    (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight", r"self_attention.\1_layernorm.weight"),
    (r"mlp\.experts\.local_experts\.", EXPERTS),
    *((re.escape(also), name) for name, also in _ALSO.items()),
)


def _layer_parts(
    model: ModelConfig, index: int, shapes: Mapping[str, TensorShape], prefix: str
) -> Iterator[MegatronTensorMapping]:
    source_prefix = f"model.layers.{index}."

    def join_parts(name: str, sources: Sequence[str], axis: int = 0) -> Iterator[MegatronTensorMapping]:
        names = [source_prefix + source for source in sources if source_prefix + source in shapes]
        if names:
            yield _concatenated_part(prefix + name, names, shapes, axis)

    for kind in ("weight", "bias"):
        for source, fused in (("self_attn", "qkv"), ("cross_attn", "kv")):
            gated = fused == "qkv" and model.attention_gate
            names = [f"{source_prefix}{source}.{one}_proj.{kind}" for one in ("qgkv" if gated else fused)]
            if names[-1] in shapes:
                name = source.replace("attn", "attention")
                yield _grouped_part(f"{prefix}{name}.linear_{fused}.{kind}", names, shapes, model.key_value_heads)
    mamba = model.get_mixer_kind(index) == "mamba"
    yield from _mamba_parts(source_prefix, prefix, shapes) if mamba else ()
    for source, (name, split) in {**_PLAIN, **(_LATENT if model.mla else {}), **(_MAMBA if mamba else {})}.items():
        if source_prefix + source in shapes:
            part = _plain_part(prefix + name, source_prefix + source, shapes, split)
            yield replace(part, te=_te_layer_name(name, model, index), local=_local_layer_name(name))
    for kind in ("weight", "bias"):
        yield from join_parts(f"mlp.linear_fc1.{kind}", [f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"])
        experts = [f"mlp.experts.{one}_proj.{kind}" for one in ("gate", "up")]
        yield from join_parts(f"{EXPERTS}linear_fc1.{kind}", experts, axis=1)
    shared = [f"mlp.shared_expert.{one}_proj.weight" for one in ("gate", "up")]
    yield from join_parts("mlp.shared_experts.linear_fc1.weight", shared)


def _mamba_parts(source_prefix: str, prefix: str, shapes: Mapping[str, TensorShape]) -> Iterator[MegatronTensorMapping]:
    """Yield the Mamba-2 tensors that are fused in rank files."""
    for name, blocks in _BLOCKS.items():
        module, kind = name.split(".")
        for block in blocks:
            source = f"{source_prefix}mamba.{module}.{block}.{kind}"
            if source in shapes:
                part = _plain_part(f"{prefix}mixer.{name}.{block}", source, shapes, 0)
                yield replace(part, inside=f"{prefix}mixer.{name}", taps=name == "conv1d.weight")


def _mtp_parts(model: ModelConfig, index: int, shapes: Mapping[str, TensorShape]) -> Iterator[MegatronTensorMapping]:
    layer, prefix = model.num_layers + index, f"{MTP_STACK}{index}."
    for source, (name, split) in _MTP.items():
        if f"model.layers.{layer}.{source}" in shapes:
            yield _plain_part(prefix + name, f"model.layers.{layer}.{source}", shapes, split)
    yield from _layer_parts(model, layer, shapes, prefix + MTP_INNER)


def _plain_part(
    name: str, source: str, shapes: Mapping[str, TensorShape], axis: int | None = None
) -> MegatronTensorMapping:
    return MegatronTensorMapping(name, shapes[source], (TensorPiece.whole_tensor(source, shapes[source]),), axis)


def _vocabulary_part(name: str, source: str, shapes: Mapping[str, TensorShape], rows: int) -> MegatronTensorMapping:
    return MegatronTensorMapping(
        name, (rows, *shapes[source][1:]), (TensorPiece.whole_tensor(source, shapes[source]),), 0
    )


def _concatenated_part(
    name: str, sources: Sequence[str], shapes: Mapping[str, TensorShape], axis: int
) -> MegatronTensorMapping:
    """Return a part of several tensors of equal shape, concatenated on `axis`."""
    shape = shapes[sources[0]]

    def offset_of(count: int) -> TensorShape:
        return tuple(count * n if place == axis else 0 for place, n in enumerate(shape))

    zeros = (0,) * len(shape)
    pieces = tuple(TensorPiece(source, shape, zeros, offset_of(count), shape) for count, source in enumerate(sources))
    return MegatronTensorMapping(
        name, (*shape[:axis], len(sources) * shape[axis], *shape[axis + 1 :]), pieces, axis, len(sources)
    )


def _grouped_part(
    name: str, sources: Sequence[str], shapes: Mapping[str, TensorShape], groups: int
) -> MegatronTensorMapping:
    """Return a part with the rows of all sources interleaved by group."""
    pieces, at = [], 0
    for group in range(groups):
        for source in sources:
            rows, *others = shapes[source]
            share, tail = rows // groups, (0,) * len(others)
            pieces.append(TensorPiece(source, shapes[source], (group * share, *tail), (at, *tail), (share, *others)))
            at += share
    return MegatronTensorMapping(name, (at, *shapes[sources[0]][1:]), tuple(pieces), 0)


def get_megatron_layer_prefix(model: ModelConfig, index: int) -> str:
    """Return the prefix of a layer's tensor names in Megatron: `decoder.layers.{i}.` or `encoder.layers.{i}.`.
    The layer with this `index` in the model is number i within encoder or decoder.
    """
    first = model.encoder.num_layers if model.encoder else 0
    encodes = not model.causal or index < first
    return f"{STACKS[not encodes]}{index if encodes else index - first}."


def count_encoder_or_decoder_layers(model: ModelConfig, stack: str) -> int:
    """Return the layers of a T5's `stack` ("encoder.layers." or "decoder.layers."); for other models the number of all layers."""
    if model.encoder is None:
        return model.num_layers
    return model.num_layers - model.encoder.num_layers if stack == LAYER else model.encoder.num_layers


def infer_megatron_args_from_names(names: Iterable[str]) -> dict[str, Any]:
    """Return the Megatron arguments of a BERT or T5 that a checkpoint's tensor names imply; none for other models.
    They are for checkpoints that lack arguments: of a BERT, or of a T5 with its numbers of layers.
    """
    names = set(names)
    if "lm_head.dense.weight" in names:
        return {"is_encoder": True}
    layers = {split_megatron_layer_prefix(name)[0] for name in names}
    encoder, decoder = (sum(head.startswith(stack) for head in layers) for stack in STACKS)
    if not (encoder and decoder):
        return {}
    return {"is_encoder_decoder": True, "encoder_num_layers": encoder, "decoder_num_layers": decoder}


def normalize_megatron_tensor_name(name: str) -> str:
    """Return the name that `list_megatron_tensor_mappings` uses for a tensor of a Megatron checkpoint.
    The tensor's name may be from any version of Megatron and kind of layer.
    """
    head, tail = split_megatron_layer_prefix(name)
    for pattern, replacement in _ALIASES:
        tail = re.sub(rf"^{pattern}", replacement, tail)
    return head + tail


def _te_layer_name(tail: str, model: ModelConfig, layer: int) -> str:
    """Return the name in Transformer Engine's layers, where norms are fused into the next projection, except before
    experts and latent attention.
    """
    if model.mla:
        tail = tail.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        tail = re.sub(r"\.(q|kv)_layernorm\.weight", r".linear_\1_up_proj.layer_norm_weight", tail)
    return tail.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.") if model.is_moe_layer(layer) else tail


def _local_layer_name(tail: str) -> str:
    """Return the name in Megatron's own layers, where norms are separate modules."""
    tail = tail.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    tail = tail.replace("mixer.in_proj.layer_norm_", "norm.")
    return tail.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def is_projection_weight(name: str) -> bool:
    """Return whether a Megatron tensor is the weight of a projection, for which Transformer Engine keeps extra state."""
    return re.fullmatch(r"(encoder|decoder|mtp)\..*\b(linear_\w+|\w+_proj)\.weight", name) is not None


def is_hybrid_model(model: ModelConfig) -> bool:
    """Return whether some layer of `model` has a mixer or a feed-forward block only, as in Megatron's `MambaModel`."""
    return any(None in kind for kind in model.layer_kinds)


def split_megatron_layer_prefix(name: str) -> tuple[str, str]:
    """Split a Megatron tensor name into its layer prefix, such as `decoder.layers.3.`, and the rest; ("", name) outside layers.
    Without a number the prefix is `decoder.layers.`; an encoder has `encoder.layers.`.

    In the transformer layer of an MTP layer it is ('mtp.layers.0.transformer_layer.', rest), also in versions that call
    it `mtp_model_layer`.
    """
    if found := re.match(rf"({re.escape(MTP_STACK)}\d+\.)(transformer_layer|mtp_model_layer)\.", name):
        return found[1] + MTP_INNER, name[found.end() :]
    found = re.match(r"(?:encoder|decoder)\.layers\.(\d+\.)?", name)
    return (found[0], name[found.end() :]) if found else ("", name)
