"""T5 (arXiv:1910.10683), version 1.1 and FLAN-T5, mT5 (arXiv:2010.11934) and UMT5, whose layers have a table of positions each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.keys import Entry, Fixed, Key, MismatchError, Only, Raw
from mega_ckpt.families.layouts import DiskTensor, Rule
from mega_ckpt.names import EMBEDDING
from mega_common.model_config import ModelConfig

_STACKS = ("encoder", "decoder")
_ACTIVATIONS = {
    "relu": "relu", "gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu", "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}  # fmt: skip


@dataclass(frozen=True)
class Stacks:
    """Layers of the encoder, and of the decoder, as many where the file says nothing; and what the decoder begins with."""

    keys: frozenset[str] = frozenset(
        {"num_layers", "num_hidden_layers", "num_decoder_layers", "decoder_start_token_id", "is_encoder_decoder"}
    )
    fields: frozenset[str] = frozenset({"num_layers", "encoder"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Both, as one list of layers."""
        if not raw.get("is_encoder_decoder", True):
            raise MismatchError("is_encoder_decoder = False is not supported")
        encoder = Key("num_layers num_hidden_layers", "num_layers").read(raw)["num_layers"]
        decoder = raw.get("num_decoder_layers")
        section = {"num_layers": encoder, "start_token": raw.get("decoder_start_token_id") or 0}
        return {"num_layers": encoder + (encoder if decoder is None else decoder), "encoder": section}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The numbers."""
        if model.encoder is None:
            raise MismatchError("encoder must be given")
        if model.encoder.head_bias:
            raise MismatchError("encoder.head_bias must be False")
        encoder = model.encoder.num_layers
        return {
            "is_encoder_decoder": True, "decoder_start_token_id": model.encoder.start_token, "num_layers": encoder,
            "num_decoder_layers": model.num_layers - encoder,
        }  # fmt: skip


@dataclass(frozen=True)
class Positions:
    """The buckets of relative positions, in one table a stack or, with `every_layer`, in each layer's own."""

    every_layer: bool
    keys: frozenset[str] = frozenset({"relative_attention_num_buckets", "relative_attention_max_distance"})
    fields: frozenset[str] = frozenset({"position", "relative"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The section."""
        most, buckets = raw.get("relative_attention_max_distance", 128), raw.get("relative_attention_num_buckets", 32)
        section = {"buckets": buckets, "max_distance": most, "every_layer": self.every_layer}
        return {"position": "relative", "relative": section}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The two numbers."""
        if model.position != "relative" or model.relative.every_layer != self.every_layer:
            where = "each layer" if self.every_layer else "each stack"
            raise MismatchError(f"position must be relative, with a table of {where}")
        return {
            "relative_attention_num_buckets": model.relative.buckets,
            "relative_attention_max_distance": model.relative.max_distance,
        }


@dataclass(frozen=True)
class Output:
    """The output matrix, and what goes into it times hidden_size^-0.5: what T5 1.0, which ties it to the embedding, does, and
    1.1 does not.

    A config.json says the former with `tie_word_embeddings`, by which older versions of transformers know the latter too.
    From version 5 on transformers writes `true` there in any case, and `scale_decoder_outputs` beside it: whether the
    matrices are tied the tensors tell (`T5Family.as_held`). mT5, which is 1.1, is never `scaled`.
    """

    scaled: bool
    keys: frozenset[str] = frozenset({"tie_word_embeddings", "scale_decoder_outputs"})
    fields: frozenset[str] = frozenset({"tie_embeddings", "logit_scale"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Both fields."""
        tied = raw.get("tie_word_embeddings") is not False
        scaled = self.scaled and raw.get("scale_decoder_outputs", tied)
        width = raw.get("d_model") or raw.get("hidden_size") or 1  # which its own entry misses
        return {"tie_embeddings": tied, "logit_scale": width**-0.5 if scaled else 1.0}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both keys."""
        factors = {1.0: False, model.hidden_size**-0.5: True}
        if model.logit_scale not in factors or (factors[model.logit_scale] and not self.scaled):
            may = "1 or hidden_size^-0.5" if self.scaled else "1"
            raise MismatchError(f"logit_scale must be {may}, not {model.logit_scale}")
        return {"tie_word_embeddings": model.tie_embeddings, "scale_decoder_outputs": factors[model.logit_scale]}


@dataclass(frozen=True)
class HeadSize:
    """The width of a head, which has nothing to do with the model's."""

    keys: frozenset[str] = frozenset({"d_kv", "head_dim"})
    fields: frozenset[str] = frozenset({"head_dim", "num_kv_heads"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Every head has keys and values of its own."""
        return {"head_dim": raw.get("d_kv", raw.get("head_dim", 64)), "num_kv_heads": None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The width, told even where it follows from the others."""
        if model.kv_heads != model.num_attention_heads:
            raise MismatchError(f"num_kv_heads must be {model.num_attention_heads}, not {model.kv_heads}")
        return {"d_kv": model.head_size}


@dataclass(frozen=True)
class OneDropout:
    """One rate for all that is dropped."""

    keys: frozenset[str] = frozenset({"dropout_rate"})
    fields: frozenset[str] = frozenset({"embedding_dropout", "attention_dropout", "residual_dropout"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The rate in each field."""
        return dict.fromkeys(sorted(self.fields), raw.get("dropout_rate", 0.1))

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """That of what goes into the residual stream."""
        return {"dropout_rate": model.residual_dropout}


class T5Family(Family):
    """A family whose layers, `block.{i}` in its rules, are the encoder's or the decoder's, which counts from 0 again; the
    feed-forward is the last of their parts.
    """

    def table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """See `Family.table`. The embedding is written once, however often older versions of transformers did."""
        first = model.encoder.num_layers if model.encoder else 0

        def placed(match: re.Match[str]) -> str:
            layer, part = int(match[1]), match[2]
            stack, number, last = ("encoder", layer, "1") if layer < first else ("decoder", layer - first, "2")
            return f"{stack}.block.{number}.layer.{last if part == 'feed' else part}"

        found = [
            replace(disk, name=re.sub(r"^block\.(\d+)\.layer\.(\w+)", placed, name))
            for name, disk in super().table(model, names).items()
            if names is not None or not name.endswith(".embed_tokens.weight")
        ]
        return {disk.name: disk for disk in found}

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """See `Family.copies`: the embedding, in each stack."""
        return super().copies(model) | {f"{stack}.embed_tokens.weight": EMBEDDING for stack in _STACKS}

    def as_held(self, model: ModelConfig, names: Iterable[str]) -> ModelConfig:
        """See `Family.as_held`: a head that is there is the model's own, unless it is T5 1.0, which has none."""
        names = set(names)
        embedded = names & {"shared.weight", *(f"{stack}.embed_tokens.weight" for stack in _STACKS)}
        own = self.head in names and bool(embedded) and model.logit_scale == 1
        return model.model_copy(update={"tie_embeddings": False}) if own else model


def _entries(activation: str, *, every_layer: bool, scaled: bool) -> tuple[Entry, ...]:
    return (
        Key("vocab_size", "vocab_size"),
        Key("d_model hidden_size", "hidden_size"),
        Key("d_ff", "ffn_hidden_size"),
        Key("num_heads num_attention_heads", "num_attention_heads"),
        Key("layer_norm_epsilon", "norm_eps", 1e-6),
        Key("feed_forward_proj", "activation", activation, _ACTIVATIONS),
        Key("n_positions max_position_embeddings", "max_position", 512),
        HeadSize(), Stacks(), Positions(every_layer), Output(scaled), OneDropout(),
        Fixed({"norm": "rmsnorm", "attention_scale": 1.0, "mlp_bias": False}),
        Only({"sliding_window": (None,), "layer_types": (None,)}),
    )  # fmt: skip


def _weight(disk: str, name: str, *, beside: str = "", unless: str = "") -> Rule:
    return Rule(f"{disk}.weight", (f"{name}.weight",), beside=beside, unless=unless)


def _rules() -> tuple[Rule, ...]:
    block, layer = "block.{i}.layer", "model.layers.{i}"
    gate = f"{layer}.mlp.gate_proj.weight"
    table, feed = "SelfAttention.relative_attention_bias", f"{block}.feed"
    return (
        _weight("shared", "model.embed_tokens"),
        *(_weight(f"{stack}.block.0.layer.0.{table}", f"model.{stack}_relative_bias") for stack in _STACKS),
        _weight("encoder.final_layer_norm", "model.encoder_norm"),
        _weight("decoder.final_layer_norm", "model.norm"),
        *(_weight(f"{block}.0.SelfAttention.{x}", f"{layer}.self_attn.{x}_proj") for x in "qkvo"),
        _weight(f"{block}.0.{table}", f"{layer}.self_attn.relative_bias"),
        _weight(f"{block}.0.layer_norm", f"{layer}.input_layernorm"),
        *(_weight(f"{block}.1.EncDecAttention.{x}", f"{layer}.cross_attn.{x}_proj") for x in "qkvo"),
        _weight(f"{block}.1.layer_norm", f"{layer}.cross_attn_layernorm"),
        _weight(f"{feed}.DenseReluDense.wi", f"{layer}.mlp.up_proj", unless=gate),
        _weight(f"{feed}.DenseReluDense.wi_0", f"{layer}.mlp.gate_proj"),
        _weight(f"{feed}.DenseReluDense.wi_1", f"{layer}.mlp.up_proj", beside=gate),
        _weight(f"{feed}.DenseReluDense.wo", f"{layer}.mlp.down_proj"),
        _weight(f"{feed}.layer_norm", f"{layer}.post_attention_layernorm"),
    )


def _family(
    name: str, architecture: str, activation: str, *, every_layer: bool = False, scaled: bool = True
) -> T5Family:
    return T5Family(
        name=name, architecture=architecture, prefix="", entries=_entries(activation, every_layer=every_layer, scaled=scaled),
        rules=_rules(), carried=frozenset({"classifier_dropout", "output_past", "dense_act_fn", "is_gated_act"}),
    )  # fmt: skip


T5 = _family("t5", "T5ForConditionalGeneration", "relu")
UMT5 = _family("umt5", "UMT5ForConditionalGeneration", "gated-gelu", every_layer=True)
MT5 = _family("mt5", "MT5ForConditionalGeneration", "gated-gelu", scaled=False)
