"""What an encoder-decoder has that a decoder has not: sections of `ModelConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.config import Config, Problem
from mega_common.counts import LayerCount

if TYPE_CHECKING:
    from mega_common.model_config import ModelConfig

# What no encoder-decoder has here, by the value that says so.
_USUAL = {
    "moe": None, "mla": None, "mamba": None, "delta": None, "layers": None, "mtp_layers": 0, "sliding_window": None,
    "norm_position": "pre", "parallel_residual": False, "causal": True,
}  # fmt: skip


class EncoderConfig(Config):
    """An encoder before the decoder (arXiv:1706.03762): the first layers of the model, which read a sequence of their own
    and see all of it; the others also see what those made of it, through an attention of its own ("cross attention").
    """

    num_layers: LayerCount = Field(description="so many of the model's layers, the first ones, are the encoder's")
    start_token: NonNegativeInt = Field(0, description="what the decoder's text begins with; T5's padding")
    head_bias: bool = Field(False, description="a number for each token is added to the logits, as in Megatron's T5")


class RelativeConfig(Config):
    """Positions as T5 has them (arXiv:1910.10683, section 2.1): an addend of each head's scores by the distance of key and
    query, in buckets: half of them for one distance each, the others ever wider up to `max_distance`, the last for all beyond.
    """

    buckets: PositiveInt = Field(32, description="of each stack; the encoder has half of them for either side")
    max_distance: PositiveInt = 128
    every_layer: bool = Field(False, description="each layer has a table of its own, as in UMT5; else a stack has one")


def encoder_problems(model: ModelConfig) -> Iterator[Problem]:
    """What does not go with an encoder, or with relative positions."""
    if model.position == "relative":
        if model.encoder is None:
            yield Problem("position", "relative is for encoder-decoders", "relative", "set encoder, or position: rope")
        if model.attention_softcap or model.attention_sinks:
            rule = "adds to scores, which are then neither capped nor have sinks"
            yield Problem("position", rule, "relative", "leave out attention_softcap and attention_sinks")
        if model.relative.buckets % 4 or model.relative.max_distance <= model.relative.buckets // 2:
            rule = "must be a multiple of 4, and twice max_distance more than that"
            yield Problem("relative.buckets", rule, model.relative.buckets)
    if model.encoder is None:
        return
    if model.encoder.num_layers >= model.num_layers:
        rule = f"counts among num_layers = {model.num_layers}, of which the decoder needs one"
        yield Problem("encoder.num_layers", rule, model.encoder.num_layers)
    for name, value in _USUAL.items():
        if getattr(model, name) != value:
            told = "leave it out" if value is None else f"{name}: {str(value).lower()}"
            yield Problem(name, "does not go with an encoder", hint=f"{told}, or leave out encoder")
