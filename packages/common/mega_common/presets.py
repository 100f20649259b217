"""Architectures that people name: `model: {preset: llama3-8b}`. The figures are those of the published configurations."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from mega_common.errors import ConfigError


def _llama3(layers: int, width: int, ffn: int, heads: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_kv_heads": 8, "vocab_size": 128_256, "max_position": 8192, "rope": {"theta": 500_000.0},
    }  # fmt: skip


def _qwen3(layers: int, width: int, ffn: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_kv_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position": 40_960, "norm_eps": 1e-6,
        "qk_norm": True, "tie_embeddings": tied, "rope": {"theta": 1_000_000.0},
    }  # fmt: skip


def _gpt3(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": 4 * width, "num_attention_heads": heads,
        "vocab_size": 50_257, "max_position": 2048, "norm": "layernorm", "activation": "gelu_tanh",
        "position": "learned", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "tie_embeddings": True,
    }  # fmt: skip


def _tiny(layers: int, width: int, ffn: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_kv_heads": kv_heads, "vocab_size": 8192, "max_position": 1024, "tie_embeddings": True,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _tiny(2, 64, 192, 4, 2),
    "tiny-10m": _tiny(6, 320, 896, 5, 5),
    "llama3-8b": _llama3(32, 4096, 14_336, 32),
    "llama3-70b": _llama3(80, 8192, 28_672, 64),
    "llama3-405b": {**_llama3(126, 16_384, 53_248, 128)},
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12_288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17_408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25_600, 64),
    "mixtral-8x7b": {
        **_llama3(32, 4096, 14_336, 32), "vocab_size": 32_000, "max_position": 32_768, "rope": {"theta": 1_000_000.0},
        "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 14_336, "aux_loss": 0.02},
    },
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-175b": _gpt3(96, 12_288, 96),
}  # fmt: skip


def preset(name: str) -> dict[str, Any]:
    """The fields of a named architecture, to be updated and parsed as a `ModelConfig`.

    Raises:
        ConfigError: for a name that is not known, with the nearest one.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        raise ConfigError(
            f"model.preset = {name!r}: no such preset" + (f"; did you mean {near[0]!r}?" if near else ""),
            hint=f"known: {', '.join(PRESETS)}",
        )
    return copy.deepcopy(PRESETS[name])
