"""The engine of `mega generate` and `mega serve` answers on a CUDA device, as far as a host can see, and waits for it little."""

from __future__ import annotations

import ctypes

import pytest
import torch
from engines import engine_of, model_of, run, step, tokens_of
from null_gpu.counts import KINDS
from tiny_models import VARIANTS, variant

from mega_common.model_config import ModelConfig
from mega_eval.drafters import NgramDrafter
from mega_eval.engine_requests import EngineRequest
from mega_eval.text_stream import GenerationLimits

PROMPTS = [list(range(1, 20)), [7], [60, 0, 0, 60, 1]]
DECODERS = [name for name in VARIANTS if variant(name).causal]


def requests(tokens: int) -> list[EngineRequest]:
    return [EngineRequest(prompt, GenerationLimits(tokens)) for prompt in PROMPTS]


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("name", DECODERS)
def test_prompts_are_answered(name: str, drafted: bool) -> None:
    model = model_of(variant(name), torch.bfloat16).to("cuda")
    engine = engine_of(model, chunk_tokens=7, drafter=NgramDrafter() if drafted else None)
    for events in run(engine, requests(4)).values():
        assert len(tokens_of(events)) == 4
    assert engine.num_free_pages == engine.num_pages


def test_host_waits_of_a_step_do_not_depend_on_the_rows() -> None:
    read = ctypes.CDLL(None).null_gpu_count
    read.restype = ctypes.c_long
    waits = KINDS.index("host waits")
    config = ModelConfig.parse({**variant("plain").model_dump(mode="json"), "num_layers": 4})

    def count(rows: int) -> int:
        engine = engine_of(model_of(config, torch.bfloat16).to("cuda"))
        found = {engine.add_request(request): [] for request in (requests(8) * rows)[:rows]}
        for _ in range(3):
            step(engine, found)
        before = read(waits)
        step(engine, found)
        return int(read(waits) - before)

    assert count(1) == count(8)
