"""Engines in tests: texts that are numbers, and all that a run of requests brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mega_common.model_config import ModelConfig
from mega_eval.engine_requests import EngineRequest, GenerationEvent
from mega_eval.inference_engine import InferenceEngine
from mega_eval.paged_cache import PAGE
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import select_model_class
from mega_trainer.model.layer_builder import LayerBuilder


class Numbers:
    """A tokenizer whose texts are numbers: '3 5 8 '."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f"{token} " for token in ids)


def run(
    engine: InferenceEngine, requests: Sequence[EngineRequest] = (), *, every: int = 0
) -> dict[int, list[GenerationEvent]]:
    """The events of each request until all have finished; the next one is added after `every` so many steps."""
    found: dict[int, list[GenerationEvent]] = {}
    for request in requests:
        found[engine.add_request(request)] = []
        for _ in range(every):
            step(engine, found)
    while engine.num_waiting or engine.num_running:
        step(engine, found)
    return found


def step(engine: InferenceEngine, found: dict[int, list[GenerationEvent]]) -> None:
    """One step, its events behind those there are."""
    for event in engine.step():
        found[event.request].append(event)


def tokens_of(events: Sequence[GenerationEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    model = select_model_class(config)(LayerBuilder(config, dtype=dtype)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def engine_of(model: Decoder, **options: Any) -> InferenceEngine:
    return InferenceEngine(model, Numbers(), **{"cache_tokens": 8 * PAGE, "batch_size": 8, **options})
