"""Decoding on a CUDA device: pages are read by torch's flash attention, for all rows at once, and the host waits once a step."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from engines import Numbers
from null_gpu.counts import KINDS

from mega_common.model_config import ModelConfig
from mega_eval.engine_requests import EngineRequest
from mega_eval.inference_engine import InferenceEngine
from mega_eval.sampling import Sampling
from mega_eval.text_stream import GenerationLimits
from mega_trainer.kernels.paged_attention import FLASH_PAGE
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder

CUDA, LAYERS = torch.device("cuda", 0), 3
DENSE = {
    "num_layers": LAYERS, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "num_kv_heads": 2,
    "vocab_size": 512, "max_position": 1024,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {}, "window": {"sliding_window": 40}, "sinks": {"attention_sinks": True}, "soft cap": {"attention_softcap": 20.0},
    "alibi": {"position": "alibi"},
}  # fmt: skip
SAMPLING = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1)


def waits() -> int:
    """Return the number of times that the host has waited for the device."""
    read = ctypes.CDLL(None).null_gpu_count
    read.restype = ctypes.c_long
    return int(read(KINDS.index("host waits")))


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_decodes_all_rows_at_once(name: str, sampling: Sampling) -> None:
    config = ModelConfig.parse({**DENSE, **MODELS[name]})
    model = Decoder(LayerBuilder(config, dtype=torch.bfloat16, device=CUDA)).eval().requires_grad_(False)
    engine = InferenceEngine(model, Numbers(), cache_tokens=4 * FLASH_PAGE, batch_size=4)
    for length in (5, 300, 17, 64):
        engine.add_request(EngineRequest([1] * length, GenerationLimits(8), sampling))
    for _ in range(3):
        engine.step()
    before = waits()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        events = engine.step()
    assert len(events) == 4
    calls = {one.key: one.count for one in profile.key_averages()}
    assert waits() - before == 1
    flash = calls.get("aten::_flash_attention_forward", 0)
    assert flash == (LAYERS if name in ("dense", "window", "sinks") else 0)
    assert flash + calls.get("aten::scaled_dot_product_attention", 0) == (0 if name == "soft cap" else LAYERS)
