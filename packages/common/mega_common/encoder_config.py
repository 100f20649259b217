"""Sections of `ModelConfig` for encoder-decoder models: the encoder and T5's relative positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.strict_config import ConfigProblem, LayerCount, StrictConfig

if TYPE_CHECKING:
    from mega_common.model_config import ModelConfig

# What no encoder-decoder has here, by the value that says so.
_USUAL = {
    "moe": None, "mla": None, "mamba": None, "delta": None, "layers": None, "mtp_layers": 0, "sliding_window": None,
    "norm_position": "pre", "parallel_residual": False, "causal": True,
}  # fmt: skip


class EncoderConfig(StrictConfig):
    """Encoder of an encoder-decoder model (arXiv:1706.03762): the first layers of the model, with bidirectional
    attention over a sequence of their own. The other layers attend to its output by cross attention.
    """

    num_layers: LayerCount = Field(description="so many of the model's layers, the first ones, are the encoder's")
    start_token: NonNegativeInt = Field(0, description="what the decoder's text begins with; T5's padding")
    head_bias: bool = Field(False, description="a number for each token is added to the logits, as in Megatron's T5")


class RelativePositionConfig(StrictConfig):
    """Relative position bias of T5 (arXiv:1910.10683, section 2.1): a value added to each head's scores by the bucket
    of the distance between key and query. Half of the buckets hold one distance each, the others grow up to
    `max_distance`, the last holds all larger distances.
    """

    buckets: PositiveInt = Field(32, description="of each stack; the encoder has half of them for either side")
    max_distance: PositiveInt = 128
    every_layer: bool = Field(False, description="each layer has a table of its own, as in UMT5; else a stack has one")


def find_encoder_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with an encoder or with relative positions."""
    if model.position == "relative":
        if model.encoder is None:
            yield ConfigProblem(
                "position", "relative is for encoder-decoders", "relative", "set encoder, or position: rope"
            )
        if model.attention_softcap or model.attention_sinks:
            rule = "adds to scores, which are then neither capped nor have sinks"
            yield ConfigProblem("position", rule, "relative", "leave out attention_softcap and attention_sinks")
        if model.relative.buckets % 4 or model.relative.max_distance <= model.relative.buckets // 2:
            rule = "must be a multiple of 4, and twice max_distance more than that"
            yield ConfigProblem("relative.buckets", rule, model.relative.buckets)
    if model.encoder is None:
        return
    if model.encoder.num_layers >= model.num_layers:
        rule = f"counts among num_layers = {model.num_layers}, of which the decoder needs one"
        yield ConfigProblem("encoder.num_layers", rule, model.encoder.num_layers)
    for name, value in _USUAL.items():
        if getattr(model, name) != value:
            told = "leave it out" if value is None else f"{name}: {str(value).lower()}"
            yield ConfigProblem(name, "does not go with an encoder", hint=f"{told}, or leave out encoder")
