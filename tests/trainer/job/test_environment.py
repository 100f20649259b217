from __future__ import annotations

from typing import Any

import pytest

from mega_trainer.config.run_config import RunConfig
from mega_trainer.job.environment import format_environment, get_library_environment


def config(**settings: Any) -> RunConfig:
    model = {
        "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 37,
    }  # fmt: skip
    return RunConfig.parse({"model": model, "data": {"train": ["none"], "seq_length": 8}, **settings})


@pytest.mark.parametrize(
    ("parallel", "connections"),
    [({}, None), ({"tp": 2}, "1"), ({"cp": 2}, "1"), ({"zero": 3}, None), ({"tp": 2, "zero": 3}, None)],
)
def test_launches_keep_their_order_where_collectives_run_beside_products(
    parallel: dict[str, int], connections: str | None
) -> None:
    chosen = get_library_environment(config(parallel=parallel))
    assert chosen.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    assert chosen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_deterministic_asks_the_libraries_too() -> None:
    assert "CUBLAS_WORKSPACE_CONFIG" not in get_library_environment(config())
    assert get_library_environment(config(deterministic=True))["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_what_a_user_has_set_otherwise_is_told() -> None:
    line = format_environment(
        config(parallel={"tp": 2}), {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCH_GLOO_LAZY_INIT": "1"}
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8 (not 1)" in line
    assert "TORCH_GLOO_LAZY_INIT=1," in line
    assert "PYTORCH_CUDA_ALLOC_CONF=(not set)" in line
