"""Section of `ModelConfig` for models with retrieval (Retro)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.strict_config import ConfigProblem, LayerCount, StrictConfig, find_changed_settings

if TYPE_CHECKING:
    from mega_common.model_config import ModelConfig

# Fields that are not supported with retrieval, with the required value.
_REQUIRED_VALUES = {
    "encoder": None, "vision": None, "moe": None, "mla": None, "compressed": None, "mamba": None, "mamba1": None, "hybrid": None, "delta": None, "kda": None, "lightning": None, "conv": None, "layers": None,
    "mtp_layers": 0, "norm_position": "pre", "parallel_residual": False, "causal": True, "score": False,
    "attention_sinks": False,
}  # fmt: skip


class RetroConfig(StrictConfig):
    """Configuration of retrieval (Retro, arXiv:2112.04426).

    Text is cut into chunks, each with retrieved neighbors (chunks with their continuation). An encoder reads the
    neighbors, and the decoder's tokens after a chunk attend to its output.
    """

    chunk_length: PositiveInt = Field(64, description="tokens of a chunk; a neighbor has twice as many")
    neighbors: PositiveInt = Field(2, description="number of neighbors of a chunk")
    encoder_layers: LayerCount = Field(2, description="layers of the neighbor encoder; the first attends to the chunk")
    layers: list[NonNegativeInt] | None = Field(
        None,
        description="layers that attend to neighbors; default: every third, from 5 for models of up to 15 layers, else from 8",
    )
    residual_dropout: float | None = Field(
        None, ge=0, lt=1, description="residual dropout of the neighbor encoder; default: the model's"
    )
    attention_dropout: float | None = Field(
        None, ge=0, lt=1, description="attention dropout of the neighbor encoder; default: the model's"
    )

    @property
    def neighbor_length(self) -> int:
        """Number of tokens of a retrieved neighbor: a chunk and its continuation."""
        return 2 * self.chunk_length

    def list_retrieval_layers(self, count: int) -> list[int]:
        """Return the sorted indices of those of `count` decoder layers that attend to retrieved neighbors."""
        return list(range(5 if count <= 15 else 8, count, 3)) if self.layers is None else sorted(set(self.layers))


def find_retro_config_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield the settings of `model` that conflict with its retrieval (`retro`) section."""
    if model.retro is None:
        return
    layers = model.retrieval_layers
    if not layers:
        rule = f"must name at least one of the {model.num_layers} layers"
        yield ConfigProblem("retro.layers", rule, model.retro.layers, "retro.layers: [0]")
    elif layers[-1] >= model.num_layers:
        hint = f"use numbers from 0 to {model.num_layers - 1}"
        yield ConfigProblem("retro.layers", f"must be layer numbers up to {model.num_layers - 1}", layers[-1], hint)
    yield from find_changed_settings(model, "retro", _REQUIRED_VALUES)
    if model.position == "learned" and model.retro.neighbor_length > model.max_position:
        rule = f"must be at most half of max_position = {model.max_position}, the length of a neighbor"
        hint = f"retro.chunk_length: {model.max_position // 2}"
        yield ConfigProblem("retro.chunk_length", rule, model.retro.chunk_length, hint)
