"""Sections of `ModelConfig` for models with an encoder: the encoder, its masked-LM head and T5's relative positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.strict_config import ConfigProblem, LayerCount, StrictConfig, find_changed_settings

if TYPE_CHECKING:
    from mega_common.model_config import ModelConfig

# Fields that are not supported with an encoder, with the required value.
_REQUIRED_VALUES = {
    "moe": None, "mla": None, "compressed": None, "mamba": None, "mamba1": None, "hybrid": None, "delta": None, "kda": None, "lightning": None, "conv": None, "layers": None, "mtp_layers": 0, "sliding_window": None,
    "norm_position": "pre", "parallel_residual": False, "causal": True,
}  # fmt: skip


class EncoderDecoderConfig(StrictConfig):
    """Split of a model's layers into an encoder, the first layers, and a decoder that attends to its output.

    The encoder has bidirectional attention over a separate sequence; the decoder attends to its output by cross
    attention.
    """

    num_layers: LayerCount = Field(description="number of the model's layers, from the first, that form the encoder")
    start_token: NonNegativeInt = Field(0, description="first token of the decoder; T5 uses padding")
    head_bias: bool = Field(False, description="add a bias per vocabulary token to the logits, as in Megatron's T5")


class MaskedLmConfig(StrictConfig):
    """Masked-LM head of an encoder such as BERT.
    It is norm(act(W x)) of each hidden state x, then the output matrix and a bias per vocabulary token.
    """

    dense: bool = Field(True, description="false: logits of x itself, without W, activation and norm, as in EuroBERT")
    activation: Literal["gelu", "gelu_tanh", "silu"] = "gelu"
    dense_bias: bool = Field(True, description="bias of W")
    bias: bool = Field(True, description="bias of each token's logit")


class TaskHeadConfig(StrictConfig):
    """Head in place of the output layer for tasks other than language modelling.
    It gives logits of labels for whole texts or for tokens; a model of text embeddings has none.
    """

    kind: Literal["sequence", "token", "embedding"] = Field(
        "sequence",
        description="sequence: labels of whole texts (classification, regression, reranking); token: labels of tokens; "
        "embedding: vectors of texts, without a head",
    )
    labels: PositiveInt = Field(2, description="number of labels; 1 for regression and reranking")
    names: list[str] = Field([], description="name of each label, for config.json; default: LABEL_0, LABEL_1, ...")
    pooling: Literal["first", "last", "mean"] | None = Field(
        None,
        description="token whose hidden state stands for a text, or their mean (embedding only); default: last for decoders, "
        "first for encoders, mean for embeddings of encoders",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield names that do not fit the number of labels, and a mean for labels."""
        if self.names and len(self.names) != self.labels:
            hint = f"labels: {len(self.names)}"
            yield ConfigProblem("names", f"must have one name per label (labels = {self.labels})", self.names, hint)
        if self.pooling == "mean" and self.kind != "embedding":
            yield ConfigProblem("pooling", "requires kind: embedding", "mean", "pooling: first")


class RelativePositionConfig(StrictConfig):
    """Configuration of T5's relative position bias of attention scores (arXiv:1910.10683, section 2.1).

    A value is added to each head's scores by the bucket of the distance between key and query. Half of the buckets have
    one distance each, the others grow up to `max_distance`, and the last has all larger distances.
    """

    buckets: PositiveInt = Field(32, description="buckets per stack; the encoder uses half of them for each direction")
    max_distance: PositiveInt = 128
    every_layer: bool = Field(False, description="one table per layer, as in UMT5; else one per stack")


def find_encoder_config_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield the settings of `model` that conflict with an encoder section or with relative position biases."""
    if model.position == "relative":
        if model.encoder is None:
            yield ConfigProblem("position", "requires an encoder-decoder model", "relative", "position: rope")
        if model.attention_softcap or model.attention_sinks:
            rule = "is not supported with attention_softcap or attention_sinks"
            yield ConfigProblem("position", rule, "relative", "leave out attention_softcap and attention_sinks")
        if model.relative.buckets % 4 or model.relative.max_distance <= model.relative.buckets // 2:
            rule = f"must be a multiple of 4 and less than twice max_distance = {model.relative.max_distance}"
            hint = "relative.buckets: 32, and relative.max_distance: 128"
            yield ConfigProblem("relative.buckets", rule, model.relative.buckets, hint)
    if model.encoder is None:
        return
    if model.encoder.num_layers >= model.num_layers:
        rule = f"must be less than num_layers = {model.num_layers}, which counts encoder and decoder layers"
        hint = f"num_layers: {model.num_layers + model.encoder.num_layers}"
        yield ConfigProblem("encoder.num_layers", rule, model.encoder.num_layers, hint)
    yield from find_changed_settings(model, "encoder", _REQUIRED_VALUES)
