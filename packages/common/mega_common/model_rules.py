"""Rules between the fields of a `ModelConfig`, each with a way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_common.config import Problem
from mega_common.encoder import encoder_problems
from mega_common.layers import section_problems, spelled
from mega_common.retro import retro_problems

if TYPE_CHECKING:
    from mega_common.model_config import ModelConfig, RopeConfig


def model_problems(model: ModelConfig) -> Iterator[Problem]:
    """Rules between sizes."""
    yield from _head_problems(model) if "attention" in model.heads else ()
    layers = model.num_layers + model.mtp_layers
    listed = {
        "full_attention_layers": model.full_attention_layers,
        "no_rope_layers": model.no_rope_layers,
        "moe.layers": model.moe and model.moe.layers,
    }
    for name, indices in listed.items():
        if indices and max(indices) >= layers:
            yield Problem(name, f"names a layer past the last, {layers - 1}", max(indices))
    if model.shared_norm and (not model.parallel_residual or model.norm_position != "pre"):
        rule = "is one norm before attention and MLP, which then see the same input"
        yield Problem("shared_norm", rule, hint="parallel_residual: true and norm_position: pre")
    if model.mtp_layers and model.position == "learned":
        rule = "embeds further tokens without their positions"
        yield Problem("mtp_layers", rule, model.mtp_layers, "0, or position: rope")
    yield from _both_sides_problems(model)
    yield from _vision_problems(model)
    if model.activation_limit and model.activation != "swiglu":
        yield Problem("activation_limit", "bounds swiglu alone", model.activation_limit, "activation: swiglu")
    if model.attention_gate and model.mla:
        yield Problem("attention_gate", "is not for latent attention", hint="leave out mla")
    yield from _layer_problems(model) if model.layers is not None else ()
    yield from encoder_problems(model)
    yield from retro_problems(model)


def _vision_problems(model: ModelConfig) -> Iterator[Problem]:
    """Rules between images and the model that sees them."""
    if model.vision is None:
        return
    if model.vision.image_token >= model.vocab_size:
        yield Problem("vision.image_token", f"must be below vocab_size = {model.vocab_size}", model.vision.image_token)
    if model.vision.bidirectional and model.attention_dropout:
        rule = "is for attention that is computed part by part, without dropout"
        yield Problem("vision.bidirectional", rule, hint="attention_dropout: 0")
    if model.mtp_layers:
        rule = "embeds further tokens without their images"
        yield Problem("mtp_layers", rule, model.mtp_layers, "0, or leave out vision")
    if model.encoder or not model.causal:
        yield Problem("vision", "stands before a decoder alone", hint="leave out encoder, and causal: true")


def _both_sides_problems(model: ModelConfig) -> Iterator[Problem]:
    """Rules of attention to both sides, and of what encoders have."""
    if not model.causal and (model.recurrent or model.mtp_layers):
        rule = "has no layers that carry a state from token to token, or predict further tokens"
        yield Problem("causal", rule, model.causal, "layers of attention, and mtp_layers: 0")
    for name in ("masked_lm", "pooler", "sentence_pairs"):
        if model.causal and getattr(model, name):
            yield Problem(name, "is an encoder's, which sees tokens on both sides", hint="causal: false")
    if model.sentence_pairs and not model.pooler:
        yield Problem("sentence_pairs", "goes by the pooled first token", True, "pooler: true")
    if model.position_offset and model.position != "learned":
        yield Problem("position_offset", "is of learned positions", model.position_offset, "position: learned")
    if model.norm_position == "sum" and (model.parallel_residual or any(None in layer for layer in model.kinds)):
        rule = "norms the stream behind a mixer, then behind a feed-forward, which every layer has"
        yield Problem("norm_position", rule, "sum", "parallel_residual: false, and layers of both")


def _head_problems(model: ModelConfig) -> Iterator[Problem]:
    """Rules between the sizes of attention's heads."""
    heads = model.num_attention_heads
    if model.head_dim is None and model.mla is None and model.hidden_size % heads:
        yield Problem(
            "hidden_size",
            f"must be a multiple of num_attention_heads = {heads}",
            model.hidden_size,
            "or give head_dim",
        )
    if heads % model.kv_heads:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        yield Problem("num_kv_heads", f"must divide num_attention_heads = {heads}", model.kv_heads, f"one of {fits}")
    if model.position == "rope" and model.rotated_size % 2:
        where, value = ("rope.fraction", model.rope.fraction) if model.mla is None else ("mla", model.rotated_size)
        yield Problem(where, f"must rotate an even part of the head size {model.head_size}", value)
    for name, rope in (("rope", model.rope), ("local_rope", model.local_rope)):
        yield from _rope_problems(name, rope, model.rotated_size // 2) if rope else ()
    if model.mla and (model.qk_norm or model.kv_heads != heads or model.head_dim or model.attention_sinks):
        rule = "has its own head sizes and norms, a key and value for every head, and no sinks"
        yield Problem("mla", rule, hint="leave out head_dim, num_kv_heads, qk_norm and attention_sinks")
    if model.mla and (model.position != "rope" or model.rope.fraction != 1):
        rule = f"rotates {model.mla.qk_rope_head_dim} elements of each head, all of them"
        yield Problem("mla", rule, hint="position: rope, without rope.fraction")
    if model.mla and model.no_rope_layers:
        yield Problem("no_rope_layers", "a latent head has a part that is rotated", hint="leave it out")


def _layer_problems(model: ModelConfig) -> Iterator[Problem]:
    """Rules between the kinds of layer and the rest."""
    named = len(spelled(model.layers or []))
    if named not in (model.num_layers, model.num_layers + model.mtp_layers):
        further = f", and {model.mtp_layers} that predict further tokens" if model.mtp_layers else ""
        hint = "leave it out, it follows from layers" if not model.mtp_layers else ""
        yield Problem("num_layers", f"but layers names {named}{further}", model.num_layers, hint)
        return
    if model.moe and model.moe.layers is not None:
        yield Problem("moe.layers", "is said by layers too", hint="leave out one of them")
    if model.moe and not any(kind.feed == "moe" for kind in model.kinds):
        yield Problem("moe", "layers names none with experts", hint="name one, or leave out moe")
    given = {"mamba": model.mamba is not None, "delta": model.delta is not None, "moe": model.moe is not None}
    yield from section_problems(model.kinds, given)
    if model.parallel_residual and any(None in layer for layer in model.kinds):
        rule = "wants a mixer and a feed-forward in every layer"
        yield Problem("parallel_residual", rule, hint="layers of both, as attention+mlp")


def _rope_problems(name: str, rope: RopeConfig, pairs: int) -> Iterator[Problem]:
    if rope.scaling != "none" and rope.factor < 1:
        yield Problem(f"{name}.factor", "must be at least 1 to stretch the context", rope.factor)
    if rope.sections is not None and sum(rope.sections) != pairs:
        yield Problem(f"{name}.sections", f"must be {pairs} together, the pairs that are turned", rope.sections)
    if rope.sections is not None and rope.scaling in ("dynamic", "longrope"):
        yield Problem(f"{name}.sections", f"does not go with scaling {rope.scaling!r}, which asks for one position")
    if rope.scaling in ("llama3", "yarn", "longrope") and rope.original_max_position is None:
        yield Problem(f"{name}.original_max_position", f"required by rope scaling {rope.scaling!r}")
    for key in ("short_factor", "long_factor"):
        factors = getattr(rope, key)
        if rope.scaling == "longrope" and len(factors or ()) != pairs:
            yield Problem(f"{name}.{key}", f"rope scaling 'longrope' wants {pairs} numbers", factors)
