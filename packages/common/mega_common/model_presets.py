"""Named architectures for `model: {preset: llama3-8b}`, with the sizes of the published configurations."""

from __future__ import annotations

import copy
import difflib
import re
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


def _gemma(layers: int, width: int, ffn: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_kv_heads": kv_heads, "head_dim": 256, "norm_eps": 1e-6, "tie_embeddings": True, "activation": "geglu",
        "norm_position": "both", "zero_centered_norm": True, "scale_embeddings": True,
    }  # fmt: skip


def _gpt3(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": 4 * width, "num_attention_heads": heads,
        "vocab_size": 50_257, "max_position": 2048, "norm": "layernorm", "activation": "gelu_tanh",
        "position": "learned", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "tie_embeddings": True,
    }  # fmt: skip


def _t5(layers: int, width: int, ffn: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Return fields of T5 version 1.0, with equally many encoder and decoder layers."""
    return {
        "num_layers": 2 * layers, "encoder": {"num_layers": layers}, "hidden_size": width, "ffn_hidden_size": ffn,
        "num_attention_heads": heads, "head_dim": head_dim, "vocab_size": 32_128, "max_position": 512, "norm_eps": 1e-6,
        "tie_embeddings": True, "logit_scale": width**-0.5, "activation": "relu", "position": "relative",
        "attention_scale": 1.0,
    }  # fmt: skip


def _retro(layers: int, width: int, ffn: int, heads: int) -> dict[str, Any]:
    """Return fields of NVIDIA's Retro (arXiv:2310.07713): a GPT with retrieved neighbors."""
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads, "vocab_size": 256_000,
        "max_position": 4096, "norm": "layernorm", "zero_centered_norm": True, "rope": {"fraction": 0.5}, "retro": {},
    }  # fmt: skip


def _bert(layers: int, width: int, heads: int, vocab_size: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": 4 * width, "num_attention_heads": heads,
        "vocab_size": vocab_size, "max_position": 512, "causal": False, "norm": "layernorm", "norm_position": "sum",
        "embedding_norm": True, "activation": "gelu", "position": "learned", "qkv_bias": True, "attention_out_bias": True,
        "mlp_bias": True, "tie_embeddings": True, "masked_lm": {}, "scale_residual_init": False,
    }  # fmt: skip


def _nemotron_h(pattern: str, width: int, ffn: int, kv_heads: int, mamba_heads: int, length: int) -> dict[str, Any]:
    return {
        "layers": pattern, "num_layers": len(pattern), "hidden_size": width, "ffn_hidden_size": ffn,
        "num_attention_heads": 32, "num_kv_heads": kv_heads, "head_dim": 128, "vocab_size": 131_072,
        "max_position": length, "activation": "relu2", "position": "none",
        "mamba": {"num_heads": mamba_heads, "head_dim": 64, "state_size": 128, "num_groups": 8, "chunk_size": 128},
    }  # fmt: skip


def _granite4(
    width: int,
    heads: int,
    kv_heads: int,
    mamba_heads: int,
    experts: int,
    top_k: int,
    ffn: int,
    shared: int,
    divisor: int,
) -> dict[str, Any]:
    return {
        "layers": [{"times": 5, "of": ["mamba+moe"]}, "attention+moe", *3 * [{"times": 9, "of": ["mamba+moe"]}, "attention+moe"],
                   {"times": 4, "of": ["mamba+moe"]}],
        "num_layers": 40, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_kv_heads": kv_heads, "vocab_size": 100_352, "max_position": 131_072, "tie_embeddings": True,
        "position": "none", "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_scale": 1 / 128,
        "logit_scale": 1 / divisor,
        "mamba": {"num_heads": mamba_heads, "head_dim": 64, "state_size": 128, "num_groups": 1},
        "moe": {
            "num_experts": experts, "top_k": top_k, "ffn_hidden_size": ffn, "shared_ffn_hidden_size": shared, "aux_loss": 0.01,
        },
    }  # fmt: skip


def _tiny(layers: int, width: int, ffn: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_kv_heads": kv_heads, "vocab_size": 8192, "max_position": 1024, "tie_embeddings": True,
    }  # fmt: skip


def _llava(layers: int, width: int, ffn: int, heads: int) -> dict[str, Any]:
    """Return fields of LLaVA 1.5: Vicuna (Llama 2) behind CLIP's ViT-L/14 at 336 pixels."""
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "vocab_size": 32_064, "max_position": 4096,
        "vision": {
            "num_layers": 24, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 16, "image_token": 32_000,
        },
    }  # fmt: skip


def _llava_next() -> dict[str, Any]:
    """Return fields of LLaVA 1.6 with Mistral 7B v0.2: images in up to four tiles of 336 pixels."""
    whole = _llava(32, 4096, 14_336, 32)
    tiles = {"pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]], "resize": "stretch"}
    text = {"num_kv_heads": 8, "max_position": 32_768, "rope": {"theta": 1e6}}
    return {**whole, **text, "vision": whole["vision"] | tiles}


def _qwen_vl(layers: int, width: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    """Return fields of Qwen2.5-VL: Qwen 2.5 with multimodal RoPE (time, row, column) and a native-resolution vision
    encoder.
    """
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads, "num_kv_heads": kv_heads,
        "vocab_size": vocab, "max_position": 128_000, "norm_eps": 1e-6, "qkv_bias": True,
        "rope": {"theta": 1_000_000.0, "sections": [16, 24, 24]},
        "vision": {
            "num_layers": 32, "hidden_size": 1280, "ffn_hidden_size": 3420, "num_attention_heads": 16, "activation": "swiglu",
            "norm_eps": 1e-6, "class_token": False, "pre_norm": False, "feature_layer": -1, "projector": "merger",
            "image_token": 151_655, "begin_token": 151_652, "end_token": 151_653, "native": {},
        },
    }  # fmt: skip


def _qwen3_vl(text: dict[str, Any], layers: int, width: int, ffn: int, stacked: list[int]) -> dict[str, Any]:
    """Return fields of Qwen3-VL: the text model with multimodal RoPE, a vision encoder of these sizes, and the encoder
    layers whose features are added to the outputs of the first decoder layers.
    """
    return {
        **text, "max_position": 262_144,
        "rope": {"theta": 5_000_000.0, "sections": [24, 20, 20], "sections_interleaved": True},
        "vision": {
            "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": 16, "image_size": 512,
            "patch_size": 16, "activation": "gelu_tanh", "norm_eps": 1e-6, "class_token": False, "patch_bias": True,
            "pre_norm": False, "feature_layer": -1, "projector": "merger", "image_token": 151_655, "begin_token": 151_652,
            "end_token": 151_653, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "native": {
                "norm": "layernorm", "window": None, "positions": 2304, "deepstack": stacked, "min_pixels": 65_536,
                "max_pixels": 16_777_216,
            },
        },
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _tiny(2, 64, 192, 4, 2),
    "tiny-10m": _tiny(6, 320, 896, 5, 5),
    "llava-1.5-7b": _llava(32, 4096, 11_008, 32),
    "llava-1.5-13b": _llava(40, 5120, 13_824, 40),
    "llava-1.6-mistral-7b": _llava_next(),
    "qwen2.5-vl-3b": {**_qwen_vl(36, 2048, 11_008, 16, 2, 151_936), "tie_embeddings": True},
    "qwen2.5-vl-7b": _qwen_vl(28, 3584, 18_944, 28, 4, 152_064),
    "qwen3-vl-4b": _qwen3_vl(_qwen3(36, 2560, 9728, 32, tied=True), 24, 1024, 4096, [5, 11, 17]),
    "qwen3-vl-8b": _qwen3_vl(_qwen3(36, 4096, 12_288, 32), 27, 1152, 4304, [8, 16, 24]),
    "qwen3-vl-30b-a3b": {
        **_qwen3_vl(_qwen3(48, 2048, 6144, 32), 27, 1152, 4304, [8, 16, 24]), "num_kv_heads": 4,
        "moe": {"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.001},
    },
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
    "qwen3-30b-a3b": {
        **_qwen3(48, 2048, 6144, 32), "num_kv_heads": 4,
        "moe": {"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.001},
    },
    "deepseek-v3": {
        "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18_432, "num_attention_heads": 128,
        "vocab_size": 129_280, "max_position": 163_840, "norm_eps": 1e-6, "mtp_layers": 1,
        "mla": {
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        "rope": {
            "interleaved": True, "scaling": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "moe": {
            "num_experts": 256, "top_k": 8, "ffn_hidden_size": 2048, "shared_ffn_hidden_size": 2048,
            "layers": list(range(3, 62)), "score": "sigmoid", "scaling": 2.5, "groups": 8, "top_groups": 4,
            "group_score": "top2", "selection_bias": True, "bias_rate": 0.001, "aux_loss": 0.0001,
        },
    },
    "gpt-oss-20b": {
        "num_layers": 24, "hidden_size": 2880, "ffn_hidden_size": 2880, "num_attention_heads": 64, "num_kv_heads": 8,
        "head_dim": 64, "vocab_size": 201_088, "max_position": 131_072, "qkv_bias": True, "attention_out_bias": True,
        "mlp_bias": True, "attention_sinks": True, "activation_limit": 7.0, "sliding_window": 128,
        "full_attention_layers": list(range(1, 24, 2)),
        "rope": {
            "theta": 150_000.0, "scaling": "yarn", "factor": 32.0, "original_max_position": 4096, "truncate": False,
        },
        "moe": {"num_experts": 32, "top_k": 4, "ffn_hidden_size": 2880, "router_bias": True},
    },
    "gemma2-2b": {
        **_gemma(26, 2304, 9216, 8, 4), "vocab_size": 256_000, "max_position": 8192, "sliding_window": 4096,
        "full_attention_layers": list(range(1, 26, 2)), "attention_softcap": 50.0, "logit_softcap": 30.0,
    },
    "gemma3-1b": {
        **_gemma(26, 1152, 6912, 4, 1), "vocab_size": 262_144, "max_position": 32_768, "sliding_window": 512,
        "full_attention_layers": list(range(5, 26, 6)), "qk_norm": True, "rope": {"theta": 1_000_000.0},
        "local_rope": {"theta": 10_000.0},
    },
    "gemma3-4b": {  # Gemma 3's sizes from here on see images
        **_gemma(34, 2560, 10_240, 8, 4), "vocab_size": 262_208, "max_position": 131_072, "sliding_window": 1024,
        "full_attention_layers": list(range(5, 34, 6)), "qk_norm": True,
        "rope": {"theta": 1_000_000.0, "scaling": "linear", "factor": 8.0}, "local_rope": {"theta": 10_000.0},
        "vision": {
            "num_layers": 27, "hidden_size": 1152, "ffn_hidden_size": 4304, "num_attention_heads": 16, "image_size": 896,
            "activation": "gelu_tanh", "norm_eps": 1e-6, "class_token": False, "patch_bias": True, "pre_norm": False,
            "feature_layer": -1, "feature_norm": True, "projector": "norm", "pool": 4, "image_token": 262_144,
            "begin_token": 255_999, "end_token": 256_000, "bidirectional": True, "resize": "stretch",
            "resample": "bilinear", "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5],
        },
    },
    "bert-large": {
        **_bert(24, 1024, 16, 30_522), "norm_eps": 1e-12, "token_types": 2, "pooler": True, "sentence_pairs": True,
    },
    "roberta-base": {**_bert(12, 768, 12, 50_265), "token_types": 1, "position_offset": 2},
    "modernbert-base": {
        "num_layers": 22, "hidden_size": 768, "ffn_hidden_size": 1152, "num_attention_heads": 12, "vocab_size": 50_368,
        "max_position": 8192, "causal": False, "norm": "layernorm", "norm_bias": False, "embedding_norm": True,
        "first_norm": False, "activation": "geglu_erf", "tie_embeddings": True, "masked_lm": {"dense_bias": False},
        "sliding_window": 65, "full_attention_layers": list(range(0, 22, 3)), "rope": {"theta": 160_000.0},
        "local_rope": {"theta": 10_000.0},
    },
    "nemotron-h-8b": _nemotron_h("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 21_504, 8, 128, 8192),
    "nemotron-3-nano": {
        **_nemotron_h("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 1856, 2, 64, 262_144),
        "moe": {
            "num_experts": 128, "top_k": 6, "ffn_hidden_size": 1856, "shared_ffn_hidden_size": 3712, "score": "sigmoid",
            "scaling": 2.5, "selection_bias": True, "bias_rate": 0.001, "aux_loss": 0.0001,
        },
    },
    "granite-4-h-small": _granite4(4096, 32, 8, 128, 72, 10, 768, 1536, 16),
    "granite-4-h-tiny": _granite4(1536, 12, 4, 48, 64, 6, 512, 1024, 6),
    "qwen3-next-80b": {
        "layers": [{"times": 12, "of": ["delta+moe", "delta+moe", "delta+moe", "attention+moe"]}], "num_layers": 48,
        "hidden_size": 2048, "ffn_hidden_size": 5120, "num_attention_heads": 16, "num_kv_heads": 2, "head_dim": 256,
        "vocab_size": 151_936, "max_position": 262_144, "norm_eps": 1e-6, "zero_centered_norm": True, "qk_norm": True,
        "attention_gate": True, "rope": {"theta": 10_000_000.0, "fraction": 0.25},
        "delta": {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128},
        "moe": {
            "num_experts": 512, "top_k": 10, "ffn_hidden_size": 512, "shared_ffn_hidden_size": 512, "shared_gate": True,
            "aux_loss": 0.001,
        },
    },
    "t5-base": _t5(12, 768, 3072, 12, 64),
    "t5-11b": _t5(24, 1024, 65_536, 128, 128),
    "flan-t5-xl": {
        **_t5(24, 2048, 5120, 32, 64), "activation": "geglu", "tie_embeddings": False, "logit_scale": 1.0,
    },
    # the feed-forward width is Megatron's for SwiGLU: 8/3 of the width, rounded to a multiple of 64
    "retro-8b": _retro(32, 4096, 10_880, 32),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-175b": _gpt3(96, 12_288, 96),
}  # fmt: skip


def load_model_preset(name: str) -> dict[str, Any]:
    """Return a copy of the `ModelConfig` fields of the preset `name`; a `ConfigError` for an unknown name.
    The caller may change them and then parse them as a `ModelConfig`.

    Raises:
        ConfigError: for an unknown name, with the nearest one.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        letters = re.sub("[^a-z].*", "", near[0]) if near else ""
        raise ConfigError(
            f"model.preset = {name!r}: no such preset" + (f"; did you mean {near[0]!r}?" if near else ""),
            hint=f"presets: {', '.join(preset for preset in PRESETS if preset.startswith(letters))}",
        )
    return copy.deepcopy(PRESETS[name])
