"""Counts that lists are made of have limits, so that a typing error is refused and does not eat all memory."""

from __future__ import annotations

import pytest

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig

SMALL = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_layers": 10**9}, {"vocab_size": 10**18}, {"hidden_size": 10**18}, {"ffn_hidden_size": 10**18},
        {"num_attention_heads": 10**18}, {"mtp_layers": 10**9},
        {"moe": {"num_experts": 10**9, "top_k": 1, "ffn_hidden_size": 8}},
        {"layers": [{"times": 10**9, "of": ["mlp"]}]},
        {"encoder": {"num_layers": 10**9}}, {"retro": {"encoder_layers": 10**9}},
    ],
)  # fmt: skip
def test_a_count_beyond_any_model_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="less than or equal to"):
        ModelConfig.parse(SMALL | wrong)
