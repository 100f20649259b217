"""Section of `ModelConfig` for models with retrieval (Retro)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.strict_config import ConfigProblem, LayerCount, StrictConfig

if TYPE_CHECKING:
    from mega_common.model_config import ModelConfig

# What no Retro has here, by the value that says so.
_USUAL = {
    "encoder": None, "vision": None, "moe": None, "mla": None, "mamba": None, "delta": None, "layers": None,
    "mtp_layers": 0, "norm_position": "pre", "parallel_residual": False, "causal": True, "score": False,
    "attention_sinks": False,
}  # fmt: skip


class RetroConfig(StrictConfig):
    """Retrieval (arXiv:2112.04426): text is cut into chunks, each with retrieved neighbors (chunks with their
    continuation). An encoder reads the neighbors, and the decoder's tokens behind a chunk attend to its output.
    """

    chunk_length: PositiveInt = Field(64, description="tokens of a chunk; a neighbour has twice as many")
    neighbors: PositiveInt = Field(2, description="of a chunk")
    encoder_layers: LayerCount = Field(2, description="layers that read neighbours, the first with the chunk in sight")
    layers: list[NonNegativeInt] | None = Field(
        None,
        description="layers that attend to neighbours; default: every third, from 5 where there are at most 15, else from 8",
    )
    residual_dropout: float | None = Field(None, ge=0, lt=1, description="of the encoder; default: the model's")
    attention_dropout: float | None = Field(None, ge=0, lt=1, description="likewise")

    @property
    def neighbor_length(self) -> int:
        """Number of tokens of a neighbor: a chunk and its continuation."""
        return 2 * self.chunk_length

    def list_retrieval_layers(self, count: int) -> list[int]:
        """Return the indices of the layers, out of `count`, that attend to neighbors, in order."""
        return list(range(5 if count <= 15 else 8, count, 3)) if self.layers is None else sorted(set(self.layers))


def find_retro_problems(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with retrieval."""
    if model.retro is None:
        return
    layers = model.retrieval_layers
    if not layers:
        rule = f"names none of the {model.num_layers} layers"
        yield ConfigProblem("retro.layers", rule, model.retro.layers, "name layers, counted from 0")
    elif layers[-1] >= model.num_layers:
        yield ConfigProblem("retro.layers", f"names a layer past the last, {model.num_layers - 1}", layers[-1])
    for name, value in _USUAL.items():
        if getattr(model, name) != value:
            told = "leave it out" if value is None else f"{name}: {str(value).lower()}"
            yield ConfigProblem(name, "does not go with retro", hint=f"{told}, or leave out retro")
    if model.position == "learned" and model.retro.neighbor_length > model.max_position:
        rule = f"makes neighbours longer than max_position = {model.max_position}"
        yield ConfigProblem("retro.chunk_length", rule, model.retro.chunk_length)
