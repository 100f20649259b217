"""The engine of `mega generate` and `mega serve` answers on a CUDA device, as far as a host can see, and waits for it once a step."""

from __future__ import annotations

import ctypes

import pytest
import torch
from engines import engine_of, model_of, run, tokens_of
from null_gpu.counts import KINDS
from tiny_models import VARIANTS, variant

from mega_common.model_config import ModelConfig
from mega_eval.drafters import NgramDrafter
from mega_eval.engine_requests import EngineRequest
from mega_eval.sampling import Sampling
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


WIDE = {
    "num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "num_kv_heads": 2, "vocab_size": 61,
    "max_position": 512,
}  # fmt: skip
READ_IN_PLACE = {"dense": {}, "window": {"sliding_window": 40}, "sinks": {"attention_sinks": True}}
GATHERED = {"soft cap": {"attention_softcap": 20.0}, "alibi": {"position": "alibi"}}
SAMPLING = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*READ_IN_PLACE, *GATHERED])
def test_a_step_attends_once_a_layer_and_waits_once(name: str, sampling: Sampling) -> None:
    """The rows are of lengths that need one page or two of 256 tokens."""
    read = ctypes.CDLL(None).null_gpu_count
    read.restype = ctypes.c_long
    waits, config = (
        KINDS.index("host waits"),
        ModelConfig.parse({**WIDE, **READ_IN_PLACE.get(name, {}), **GATHERED.get(name, {})}),
    )
    engine = engine_of(model_of(config, torch.bfloat16).to("cuda"), cache_tokens=1024)
    for length in (5, 300, 17, 64):
        engine.add_request(EngineRequest([1] * length, GenerationLimits(8), sampling))
    for _ in range(3):
        engine.step()
    before = read(waits)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(engine.step()) == 4
    calls = {one.key: one.count for one in profile.key_averages()}
    assert int(read(waits) - before) == 1
    in_place, gathered = (calls.get(f"aten::{call}", 0) for call in ("_flash_attention_forward", "index_select"))
    assert in_place == (config.num_layers if name in READ_IN_PLACE else 0)
    assert gathered >= (2 * config.num_layers if name in GATHERED else 0)
