"""What Megatron-Core calls a model's tensors, and where the canonical tensors are inside them.

A `Part` is one tensor of one layer as a single rank would hold it (tp = pp = ep = 1); its pieces say which rectangle of it is
which rectangle of a canonical tensor. Legend: V vocabulary, D width, F feed-forward width, E experts, G key/value groups.

    linear_qkv   group by group: the queries of the group, its key, its value      [(H + 2G) d, D]
                 with gates of attention those after the queries                   [(2H + 2G) d, D]
    linear_kv    of cross attention: head by head its key, its value               [2H d, D]
    linear_fc1   all gate rows, then all up rows                                   [2F, D], of experts [E, 2F, D]
    eh_proj      the columns of the embedding, then those of the layer before      [D, 2D]
    in_proj      of Mamba-2, a tensor for each of z, x, B, C and dt; in files of ranks one, of the rank's rows of each
    conv1d       the same for x, B and C; there [channels, 1, k]                   [channels, k]
    embedding    padded with rows that no token has                                [V', D]

Layers are `decoder.layers`, of a BERT `encoder.layers`; a T5 has both, each counted from 0.

Facts: Megatron-LM, megatron/core/models/{gpt,bert,T5} and transformer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import Piece, Shape
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

EMBEDDING, HEAD, HEAD_BIAS = "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"
LAYER = "decoder.layers."
STACKS = ("encoder.layers.", LAYER)
FURTHER, INNER = "mtp.layers.", "transformer_layer."  # a layer that predicts a further token, the plain one inside it
EXPERTS = "mlp.experts.experts."
HEAD_STATES = ("output_layer._extra_state", "lm_head.output_layer._extra_state")  # of the second kind T5 alone has one


@dataclass(frozen=True)
class Part:
    """One tensor of Megatron's.

    Attributes:
        name: its name; `decoder.layers.{i}.` with the number of the layer in its whole stack, those that predict further
            tokens by themselves.
        shape: its shape on a single rank. The experts of a layer are stacked on axis 0.
        pieces: the canonical tensors in it.
        axis: the axis that tensor parallelism splits; None where every rank has it whole.
        halves: how many tensors lie one after another on that axis, each of which is split by itself.
        inside: where it is a block of rows of another tensor in the files of ranks: the name of that, in all layers'.
        taps: whether it has an axis of length one in the middle there.
        te, local: its name inside the layer, where Transformer Engine's layers, or Megatron's own, have another.
        also: another name that it has everywhere: of a module that two others hold.
    """

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    axis: int | None = None
    halves: int = 1
    inside: str = ""
    taps: bool = False
    te: str = ""
    local: str = ""
    also: str = ""

    @property
    def padded(self) -> bool:
        """Whether its rows are the vocabulary, which may have others at its end."""
        return self.name in (EMBEDDING, HEAD, HEAD_BIAS)


def parts_of(model: ModelConfig, padded_vocab: int | None = None) -> list[Part]:
    """Every tensor of `model` in Megatron, in the order of the forward pass.

    Raises:
        CheckpointError: when Megatron has no place for one of the model's tensors.
    """
    shapes = tensors_of(model)
    rows = padded_vocab or model.vocab_size
    out = [_vocabulary(EMBEDDING, "model.embed_tokens.weight", shapes, rows)]
    if model.position == "learned":
        out.append(_plain("embedding.position_embeddings.weight", "model.embed_positions.weight", shapes))
    for index in range(model.num_layers):
        out += _layer(model, index, shapes, head_of_layer(model, index))
    last = "final_norm" if is_hybrid(model) else "final_layernorm"
    for kind in ("weight", "bias"):
        for source, stack in (
            ("model.encoder_norm", "encoder"),
            ("model.norm", "decoder" if model.causal else "encoder"),
        ):
            if f"{source}.{kind}" in shapes:
                out.append(_plain(f"{stack}.{last}.{kind}", f"{source}.{kind}", shapes))
    if not model.tie_embeddings:
        out.append(_vocabulary(HEAD, "lm_head.weight", shapes, rows))
    for index in range(model.mtp_layers):
        out += _predictor(model, index, shapes)
    out += [_plain(name, source, shapes) for source, name in _OUTSIDE.items() if source in shapes]
    if "lm_head.bias" in shapes:
        out.append(_vocabulary(HEAD_BIAS, "lm_head.bias", shapes, rows))
    if model.encoder:
        out = [replace(part, also=_ALSO.get(part.name, "")) for part in out]
    left = shapes.keys() - {piece.name for part in out for piece in part.pieces}
    if left:
        raise CheckpointError(f"Megatron has no place for the tensor {min(left)} of this model")
    return out


# {canonical name in a layer: (name there, axis that tensor parallelism splits)}
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
# Those of BERT and T5 outside their layers.
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
# Modules of T5 that it has under two names.
_ALSO: Mapping[str, str] = {
    "embedding.position_embeddings.weight": "position_embeddings.weight",
    HEAD: f"lm_head.{HEAD}",
    HEAD_BIAS: f"lm_head.{HEAD_BIAS}",
}
# The same for Mamba-2.
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
# The same for multi-head latent attention. Those that go down are split, or whole on every rank.
_LATENT: Mapping[str, tuple[str, int | None]] = {
    "self_attn.q_proj.weight": ("self_attention.linear_q_proj.weight", 0),
    "self_attn.q_a_proj.weight": ("self_attention.linear_q_down_proj.weight", 0),
    "self_attn.q_a_layernorm.weight": ("self_attention.q_layernorm.weight", None),
    "self_attn.q_b_proj.weight": ("self_attention.linear_q_up_proj.weight", 0),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.linear_kv_down_proj.weight", 0),
    "self_attn.kv_a_layernorm.weight": ("self_attention.kv_layernorm.weight", None),
    "self_attn.kv_b_proj.weight": ("self_attention.linear_kv_up_proj.weight", 0),
}
# Those of a layer that predicts a further token, beside the plain one inside it.
_PREDICTOR: Mapping[str, tuple[str, int | None]] = {
    "enorm.weight": ("enorm.weight", None),
    "enorm.bias": ("enorm.bias", None),
    "hnorm.weight": ("hnorm.weight", None),
    "hnorm.bias": ("hnorm.bias", None),
    "eh_proj.weight": ("eh_proj.weight", 0),
    "shared_head.norm.weight": ("final_layernorm.weight", None),
    "shared_head.norm.bias": ("final_layernorm.bias", None),
}
# Names of the same tensors in other versions and other kinds of layers.
_SAME = (
    (r"input_layernorm\.(weight|bias)", r"self_attention.linear_qkv.layer_norm_\1"),
    (r"pre_mlp_layernorm\.(weight|bias)", r"mlp.linear_fc1.layer_norm_\1"),
    (r"norm\.(weight|bias)", r"mixer.in_proj.layer_norm_\1"),
    (r"mixer\.conv1d_(weight|bias)", r"mixer.conv1d.\1"),
    (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight", r"self_attention.\1_layernorm.weight"),
    (r"mlp\.experts\.local_experts\.", EXPERTS),
    *((re.escape(also), name) for name, also in _ALSO.items()),
)


def _layer(model: ModelConfig, index: int, shapes: Mapping[str, Shape], theirs: str) -> Iterator[Part]:
    ours = f"model.layers.{index}."

    def joined(name: str, sources: Sequence[str], axis: int = 0) -> Iterator[Part]:
        names = [ours + source for source in sources if ours + source in shapes]
        if names:
            yield _joined(theirs + name, names, shapes, axis)

    for kind in ("weight", "bias"):
        for source, fused in (("self_attn", "qkv"), ("cross_attn", "kv")):
            gated = fused == "qkv" and model.attention_gate
            names = [f"{ours}{source}.{one}_proj.{kind}" for one in ("qgkv" if gated else fused)]
            if names[-1] in shapes:
                name = source.replace("attn", "attention")
                yield _by_group(f"{theirs}{name}.linear_{fused}.{kind}", names, shapes, model.kv_heads)
    mamba = model.mixer(index) == "mamba"
    yield from _blocks(ours, theirs, shapes) if mamba else ()
    for source, (name, split) in {**_PLAIN, **(_LATENT if model.mla else {}), **(_MAMBA if mamba else {})}.items():
        if ours + source in shapes:
            part = _plain(theirs + name, ours + source, shapes, split)
            yield replace(part, te=_in_te(name, model, index), local=_in_local(name))
    for kind in ("weight", "bias"):
        yield from joined(f"mlp.linear_fc1.{kind}", [f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"])
        experts = [f"mlp.experts.{one}_proj.{kind}" for one in ("gate", "up")]
        yield from joined(f"{EXPERTS}linear_fc1.{kind}", experts, axis=1)
    shared = [f"mlp.shared_expert.{one}_proj.weight" for one in ("gate", "up")]
    yield from joined("mlp.shared_experts.linear_fc1.weight", shared)


def _blocks(ours: str, theirs: str, shapes: Mapping[str, Shape]) -> Iterator[Part]:
    """Of Mamba-2: the tensors that are one in the files of ranks."""
    for name, blocks in _BLOCKS.items():
        module, kind = name.split(".")
        for block in blocks:
            source = f"{ours}mamba.{module}.{block}.{kind}"
            if source in shapes:
                part = _plain(f"{theirs}mixer.{name}.{block}", source, shapes, 0)
                yield replace(part, inside=f"{theirs}mixer.{name}", taps=name == "conv1d.weight")


def _predictor(model: ModelConfig, index: int, shapes: Mapping[str, Shape]) -> Iterator[Part]:
    layer, theirs = model.num_layers + index, f"{FURTHER}{index}."
    for source, (name, split) in _PREDICTOR.items():
        if f"model.layers.{layer}.{source}" in shapes:
            yield _plain(theirs + name, f"model.layers.{layer}.{source}", shapes, split)
    yield from _layer(model, layer, shapes, theirs + INNER)


def _plain(name: str, source: str, shapes: Mapping[str, Shape], axis: int | None = None) -> Part:
    return Part(name, shapes[source], (Piece.whole(source, shapes[source]),), axis)


def _vocabulary(name: str, source: str, shapes: Mapping[str, Shape], rows: int) -> Part:
    return Part(name, (rows, *shapes[source][1:]), (Piece.whole(source, shapes[source]),), 0)


def _joined(name: str, sources: Sequence[str], shapes: Mapping[str, Shape], axis: int) -> Part:
    """One after another on `axis`; all have the same shape."""
    shape = shapes[sources[0]]

    def moved(count: int) -> Shape:
        return tuple(count * n if place == axis else 0 for place, n in enumerate(shape))

    zeros = (0,) * len(shape)
    pieces = tuple(Piece(source, shape, zeros, moved(count), shape) for count, source in enumerate(sources))
    return Part(name, (*shape[:axis], len(sources) * shape[axis], *shape[axis + 1 :]), pieces, axis, len(sources))


def _by_group(name: str, sources: Sequence[str], shapes: Mapping[str, Shape], groups: int) -> Part:
    """For each group its share of every source."""
    pieces, at = [], 0
    for group in range(groups):
        for source in sources:
            rows, *others = shapes[source]
            share, tail = rows // groups, (0,) * len(others)
            pieces.append(Piece(source, shapes[source], (group * share, *tail), (at, *tail), (share, *others)))
            at += share
    return Part(name, (at, *shapes[sources[0]][1:]), tuple(pieces), 0)


def head_of_layer(model: ModelConfig, index: int) -> str:
    """`decoder.layers.{i}.` or `encoder.layers.{i}.`, with the number of the layer in its stack."""
    first = model.encoder.num_layers if model.encoder else 0
    encodes = not model.causal or index < first
    return f"{STACKS[not encodes]}{index if encodes else index - first}."


def depth(model: ModelConfig, stack: str) -> int:
    """Layers of a stack, one of `STACKS`."""
    if model.encoder is None:
        return model.num_layers
    return model.num_layers - model.encoder.num_layers if stack == LAYER else model.encoder.num_layers


def told_by(names: Iterable[str]) -> dict[str, Any]:
    """What `args` do not tell and tensors do: whether a model is a BERT, or a T5 and of how many layers."""
    names = set(names)
    if "lm_head.dense.weight" in names:
        return {"is_encoder": True}
    layers = {split_layer(name)[0] for name in names}
    encoder, decoder = (sum(head.startswith(stack) for head in layers) for stack in STACKS)
    if not (encoder and decoder):
        return {}
    return {"is_encoder_decoder": True, "encoder_num_layers": encoder, "decoder_num_layers": decoder}


def usual_name(name: str) -> str:
    """The name that `parts_of` has for a tensor, whatever version or kind of layer it is from."""
    head, tail = split_layer(name)
    for pattern, replacement in _SAME:
        tail = re.sub(rf"^{pattern}", replacement, tail)
    return head + tail


def _in_te(tail: str, model: ModelConfig, layer: int) -> str:
    """Norms are parts of the projections after them, but for those before experts and before latent attention."""
    if model.mla:
        tail = tail.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        tail = re.sub(r"\.(q|kv)_layernorm\.weight", r".linear_\1_up_proj.layer_norm_weight", tail)
    return tail.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.") if model.has_experts(layer) else tail


def _in_local(tail: str) -> str:
    """Norms are modules of their own."""
    tail = tail.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    tail = tail.replace("mixer.in_proj.layer_norm_", "norm.")
    return tail.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def is_projection(name: str) -> bool:
    """Whether a tensor is the weight of a projection, of which Transformer Engine keeps a state."""
    return re.fullmatch(r"(encoder|decoder|mtp)\..*\b(linear_\w+|\w+_proj)\.weight", name) is not None


def is_hybrid(model: ModelConfig) -> bool:
    """Whether its layers are one half each, which are layers of Megatron's `MambaModel`."""
    return any(None in kind for kind in model.kinds)


def split_layer(name: str) -> tuple[str, str]:
    """('decoder.layers.3.', the rest), ('decoder.layers.', the rest) without a number, the same of an encoder, or ('', name).

    What is inside of a layer that predicts a further token is ('mtp.layers.0.transformer_layer.', the rest), also of
    versions that call it `mtp_model_layer`.
    """
    if found := re.match(rf"({re.escape(FURTHER)}\d+\.)(transformer_layer|mtp_model_layer)\.", name):
        return found[1] + INNER, name[found.end() :]
    found = re.match(r"(?:encoder|decoder)\.layers\.(\d+\.)?", name)
    return (found[0], name[found.end() :]) if found else ("", name)
