from __future__ import annotations

import pytest

from mega_ckpt.canonical_tensors import count_model_parameters
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.model_presets import PRESETS, load_model_preset

# In units of 1e9: as published with each model; those of GPT-3 for its published sizes and tied embeddings.
PUBLISHED = {
    "tiny": 0.000623, "tiny-10m": 0.01024,
    "llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.85,
    "llava-1.5-7b": 7.063, "llava-1.5-13b": 13.351, "llava-1.6-mistral-7b": 7.567,
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76,
    "mixtral-8x7b": 46.70, "qwen3-30b-a3b": 30.532, "gpt-oss-20b": 20.915, "gemma2-2b": 2.614, "gemma3-1b": 0.9999,
    "gemma3-4b": 4.30008, "qwen2.5-vl-3b": 3.754622976, "qwen2.5-vl-7b": 8.292166656,
    "qwen3-vl-4b": 4.437815808, "qwen3-vl-8b": 8.767123696, "qwen3-vl-30b-a3b": 31.070754032,
    "deepseek-v3": 671.03 + 11.58,  # the model, and what its further predictor has of its own
    "nemotron-h-8b": 8.10, "nemotron-3-nano": 31.58, "granite-4-h-small": 32.21, "granite-4-h-tiny": 6.94, "qwen3-next-80b": 79.67,
    "retro-8b": 9.529,  # counted by hand of its shape, 8.523 of them the decoder's without neighbors
    "t5-base": 0.2229, "t5-11b": 11.307, "flan-t5-xl": 2.8498,
    "bert-large": 0.33623, "roberta-base": 0.1247, "modernbert-base": 0.14966,
    "gpt3-125m": 0.125, "gpt3-350m": 0.356, "gpt3-1.3b": 1.316, "gpt3-6.7b": 6.66, "gpt3-175b": 174.6,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    config = ModelConfig.parse(load_model_preset(name), source=name)
    assert count_model_parameters(config) == pytest.approx(PUBLISHED[name] * 1e9, rel=0.002)


def test_a_preset_is_a_copy() -> None:
    load_model_preset("llama3-8b")["rope"]["theta"] = 1.0
    assert load_model_preset("llama3-8b")["rope"]["theta"] == 500_000.0


def test_a_mistyped_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'") as caught:
        load_model_preset("llama-8b")
    assert "gpt3-175b" not in str(caught.value)
    with pytest.raises(ConfigError, match="presets: llama3-8b, "):  # the nearest text may be of another size
        load_model_preset("llama-7b")
    with pytest.raises(ConfigError, match=r"presets: .*gpt3-175b"):
        load_model_preset("?")
