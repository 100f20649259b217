"""T5 (arXiv:1910.10683), version 1.1 and FLAN-T5, mT5 (arXiv:2010.11934), and UMT5, whose layers have a position table
each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.canonical_tensors import EMBEDDING
from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
)
from mega_ckpt.families.disk_layouts import LAYER, DiskTensor, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_common.model_config import ModelConfig

_STACKS = ("encoder", "decoder")
_ACTIVATIONS = {
    "relu": "relu", "gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu", "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}  # fmt: skip


@dataclass(frozen=True)
class T5LayerCountsConfigEntry:
    """Translation to and from config.json of T5's encoder and decoder layer counts and decoder start token.
    The counts are equal by default.
    """

    handled_config_keys: frozenset[str] = frozenset(
        {"num_layers", "num_hidden_layers", "num_decoder_layers", "decoder_start_token_id", "is_encoder_decoder"}
    )
    handled_model_fields: frozenset[str] = frozenset({"num_layers", "encoder"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields `num_layers` and `encoder` of an encoder-decoder from config.json.
        `num_layers` is the sum over encoder and decoder; `encoder` has the encoder's layers and the start token. Raises
        ConfigMismatchError for a decoder or encoder alone.
        """
        if not raw.get("is_encoder_decoder", True):
            raise ConfigMismatchError("is_encoder_decoder = False is not supported")
        encoder = KeyEntry("num_layers num_hidden_layers", "num_layers").fields_from_config(raw)["num_layers"]
        decoder = raw.get("num_decoder_layers")
        section = {"num_layers": encoder, "start_token": raw.get("decoder_start_token_id") or 0}
        return {"num_layers": encoder + (encoder if decoder is None else decoder), "encoder": section}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of the layers of an encoder-decoder and its start token.
        They are `num_layers` (encoder), `num_decoder_layers`, `decoder_start_token_id` and `is_encoder_decoder`. Raises
        ConfigMismatchError without an encoder, or with a bias of the output layer.
        """
        if model.encoder is None:
            raise ConfigMismatchError("encoder is missing")
        if model.encoder.head_bias:
            raise ConfigMismatchError("encoder.head_bias must be False")
        encoder = model.encoder.num_layers
        return {
            "is_encoder_decoder": True, "decoder_start_token_id": model.encoder.start_token, "num_layers": encoder,
            "num_decoder_layers": model.num_layers - encoder,
        }  # fmt: skip


@dataclass(frozen=True)
class RelativePositionsEntry:
    """Translation to and from config.json of T5's buckets of relative positions.
    The encoder and the decoder have one bias table each or, with `every_layer`, one per layer.
    """

    every_layer: bool
    handled_config_keys: frozenset[str] = frozenset(
        {"relative_attention_num_buckets", "relative_attention_max_distance"}
    )
    handled_model_fields: frozenset[str] = frozenset({"position", "relative"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `position` and the section `relative`."""
        most, buckets = raw.get("relative_attention_max_distance", 128), raw.get("relative_attention_num_buckets", 32)
        section = {"buckets": buckets, "max_distance": most, "every_layer": self.every_layer}
        return {"position": "relative", "relative": section}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of the number of relative position buckets and the maximum distance.
        Raises ConfigMismatchError for other positions.
        """
        if model.position != "relative" or model.relative.every_layer != self.every_layer:
            raise ConfigMismatchError(f"position must be relative, with relative.every_layer = {self.every_layer}")
        return {
            "relative_attention_num_buckets": model.relative.buckets,
            "relative_attention_max_distance": model.relative.max_distance,
        }


@dataclass(frozen=True)
class T5OutputScaleConfigEntry:
    """Translation to and from config.json of T5's output projection, and the scale hidden_size^-0.5 of its input.
    T5 1.0 uses the scale and ties the projection to the embedding; 1.1 does neither.

    Older versions of transformers derive both from `tie_word_embeddings`. Version 5 always writes true there, and adds
    `scale_decoder_outputs`; whether the matrices are tied follows from the tensors (`T5Family.restrict_to_stored`). mT5
    is a T5 1.1 and never `scaled`.

    UMT5 has no `scale_decoder_outputs` (`by_tie`). Version 4 of transformers scales if `tie_word_embeddings` is true, which
    UMT5's own checkpoints do not set; version 5 always ties and scales. So true with an output projection of its own is a
    scaled model of version 5. An unscaled one (false) has the logits of version 4, which are larger than those of version 5
    by hidden_size^0.5.
    """

    scaled: bool
    by_tie: bool = False
    handled_config_keys: frozenset[str] = frozenset({"tie_word_embeddings", "scale_decoder_outputs"})
    handled_model_fields: frozenset[str] = frozenset({"tie_embeddings", "logit_scale"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `tie_embeddings` and `logit_scale`."""
        tied = raw.get("tie_word_embeddings") is not False
        scaled = self.scaled and raw.get("scale_decoder_outputs", tied)
        width = raw.get("d_model") or raw.get("hidden_size") or 1  # another entry reports its absence
        return {"tie_embeddings": tied, "logit_scale": width**-0.5 if scaled else 1.0}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of T5's output projection and its input scale.
        They are `tie_word_embeddings` and `scale_decoder_outputs`, or only `tie_word_embeddings` with `by_tie`. Raises
        ConfigMismatchError for another factor on logits.
        """
        factors = {1.0: False, model.hidden_size**-0.5: True}
        if model.logit_scale not in factors or (factors[model.logit_scale] and not self.scaled):
            allowed = "1 or hidden_size^-0.5" if self.scaled else "1"
            raise ConfigMismatchError(f"logit_scale must be {allowed}, not {model.logit_scale}")
        if self.by_tie:
            if model.tie_embeddings and not factors[model.logit_scale]:
                raise ConfigMismatchError("logit_scale must be hidden_size^-0.5 for tied embeddings, not 1")
            return {"tie_word_embeddings": factors[model.logit_scale]}
        return {"tie_word_embeddings": model.tie_embeddings, "scale_decoder_outputs": factors[model.logit_scale]}


@dataclass(frozen=True)
class T5HeadSizeEntry:
    """Translation to and from config.json of T5's head dimension, which is independent of the model width."""

    handled_config_keys: frozenset[str] = frozenset({"d_kv", "head_dim"})
    handled_model_fields: frozenset[str] = frozenset({"head_dim", "num_kv_heads"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `head_dim` of a T5 from config.json, and `num_kv_heads` = None: every head has its own key and value."""
        return {"head_dim": raw.get("d_kv", raw.get("head_dim", 64)), "num_kv_heads": None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `d_kv`, the head dimension, even if it is the default; ConfigMismatchError for grouped queries."""
        if model.key_value_heads != model.num_attention_heads:
            raise ConfigMismatchError(f"num_kv_heads must be {model.num_attention_heads}, not {model.key_value_heads}")
        return {"d_kv": model.query_key_head_dim}


@dataclass(frozen=True)
class DropoutRateEntry:
    """Translation to and from config.json of T5's single dropout rate of embeddings, attention and residuals."""

    handled_config_keys: frozenset[str] = frozenset({"dropout_rate"})
    handled_model_fields: frozenset[str] = frozenset({"embedding_dropout", "attention_dropout", "residual_dropout"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of embedding, attention and residual dropout, all with the value of `dropout_rate`."""
        return dict.fromkeys(sorted(self.handled_model_fields), raw.get("dropout_rate", 0.1))

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `dropout_rate` with the value of `residual_dropout`; embedding and attention dropout are not written."""
        return {"dropout_rate": model.residual_dropout}


class T5Family(ModelFamily):
    """HuggingFace family of T5 models.
    In its tensor rules `block.{i}` is a layer of the encoder or the decoder, each counted from 0. The feed-forward
    block is the last part of a layer.
    """

    def disk_tensor_table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """Return {name on disk: DiskTensor} of the tensors of a T5 model.
        The embedding is written once; older versions of transformers repeat it in encoder and decoder.
        """
        first = model.encoder.num_layers if model.encoder else 0

        def to_stack_name(match: re.Match[str]) -> str:
            layer, part = int(match[1]), match[2]
            stack, number, last = ("encoder", layer, "1") if layer < first else ("decoder", layer - first, "2")
            return f"{stack}.block.{number}.layer.{last if part == 'feed' else part}"

        found = [
            replace(disk, name=re.sub(r"^block\.(\d+)\.layer\.(\w+)", to_stack_name, name))
            for name, disk in super().disk_tensor_table(model, names).items()
            if names is not None or not name.endswith(".embed_tokens.weight")
        ]
        return {disk.name: disk for disk in found}

    def duplicate_tensors(self, model: ModelConfig) -> dict[str, str]:
        """Return {disk name: canonical name} of the disk tensors of a T5 that repeat another one.
        The copy of the embedding in encoder and decoder is included.
        """
        return super().duplicate_tensors(model) | {f"{stack}.embed_tokens.weight": EMBEDDING for stack in _STACKS}

    def restrict_to_stored(self, model: ModelConfig, names: Iterable[str]) -> ModelConfig:
        """Return the T5 configuration `model` with untied embeddings if a folder stores an output projection.
        The folder's tensor `names` must have both embedding and output projection. T5 1.0 always ties them.
        """
        names = set(names)
        embedded = names & {"shared.weight", *(f"{stack}.embed_tokens.weight" for stack in _STACKS)}
        may_untie = model.logit_scale == 1 or model.relative.every_layer
        untied = self.head in names and bool(embedded) and may_untie
        return model.model_copy(update={"tie_embeddings": False}) if untied else model


def _entries(activation: str, *, every_layer: bool, scaled: bool) -> tuple[ConfigEntry, ...]:
    return (
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("d_model hidden_size", "hidden_size"),
        KeyEntry("d_ff", "ffn_hidden_size"),
        KeyEntry("num_heads num_attention_heads", "num_attention_heads"),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-6),
        KeyEntry("feed_forward_proj", "activation", activation, _ACTIVATIONS),
        KeyEntry("n_positions max_position_embeddings", "max_position", 512),
        T5HeadSizeEntry(), T5LayerCountsConfigEntry(), RelativePositionsEntry(every_layer), T5OutputScaleConfigEntry(scaled, by_tie=every_layer), DropoutRateEntry(),
        FixedFieldsEntry({"norm": "rmsnorm", "attention_scale": 1.0, "mlp_bias": False}),
        AllowedValuesEntry({"sliding_window": (None,), "layer_types": (None,)}),
    )  # fmt: skip


def _weight(disk: str, name: str, *, requires: str = "", unless: str = "") -> TensorRule:
    return TensorRule(f"{disk}.weight", (f"{name}.weight",), requires=requires, unless=unless)


def _rules() -> tuple[TensorRule, ...]:
    block, layer = "block.{i}.layer", LAYER
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
        _weight(f"{feed}.DenseReluDense.wi_1", f"{layer}.mlp.up_proj", requires=gate),
        _weight(f"{feed}.DenseReluDense.wo", f"{layer}.mlp.down_proj"),
        _weight(f"{feed}.layer_norm", f"{layer}.post_attention_layernorm"),
    )


def _t5_family(
    name: str, architecture: str, activation: str, *, every_layer: bool = False, scaled: bool = True
) -> T5Family:
    return T5Family(
        name=name, architecture=architecture, prefix="", entries=_entries(activation, every_layer=every_layer, scaled=scaled),
        rules=_rules(), carried=frozenset({"classifier_dropout", "output_past", "dense_act_fn", "is_gated_act"}),
    )  # fmt: skip


T5 = _t5_family("t5", "T5ForConditionalGeneration", "relu")
UMT5 = _t5_family("umt5", "UMT5ForConditionalGeneration", "gated-gelu", every_layer=True)
MT5 = _t5_family("mt5", "MT5ForConditionalGeneration", "gated-gelu", scaled=False)
