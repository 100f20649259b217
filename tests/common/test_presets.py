from __future__ import annotations

import pytest

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.presets import PRESETS, preset

# In units of 1e9: as published with each model; those of GPT-3 for its published sizes and tied embeddings.
PUBLISHED = {
    "tiny": 0.000623, "tiny-10m": 0.01024,
    "llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.85,
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76,
    "mixtral-8x7b": 46.70,
    "gpt3-125m": 0.125, "gpt3-350m": 0.356, "gpt3-1.3b": 1.316, "gpt3-6.7b": 6.66, "gpt3-175b": 174.6,
}  # fmt: skip


def parameters(c: ModelConfig) -> int:
    """Parameters by the textbook: attention, feed-forward or experts, norms, embeddings."""
    query, key_value = c.num_attention_heads * c.head_size, c.kv_heads * c.head_size
    attention = c.hidden_size * (query + 2 * key_value) + query * c.hidden_size
    attention += (query + 2 * key_value) * c.qkv_bias + c.hidden_size * c.attention_out_bias
    attention += 2 * c.head_size * c.qk_norm
    matrices = 3 if c.gated else 2
    if c.moe:
        ffn = c.moe.num_experts * (matrices * c.hidden_size * c.moe.ffn_hidden_size + c.hidden_size)
    else:
        ffn = matrices * c.hidden_size * c.ffn_hidden_size
        ffn += ((matrices - 1) * c.ffn_hidden_size + c.hidden_size) * c.mlp_bias
    norm = c.hidden_size * (2 if c.norm == "layernorm" else 1)
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    positions = c.max_position * c.hidden_size * (c.position == "learned")
    return c.num_layers * (attention + ffn + 2 * norm) + norm + embeddings + positions


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    config = ModelConfig.parse(preset(name), source=name)
    assert parameters(config) == pytest.approx(PUBLISHED[name] * 1e9, rel=0.005)


def test_a_preset_is_a_copy() -> None:
    preset("llama3-8b")["rope"]["theta"] = 1.0
    assert preset("llama3-8b")["rope"]["theta"] == 500_000.0


def test_a_mistyped_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'") as caught:
        preset("llama-8b")
    assert "gpt3-175b" in str(caught.value)
