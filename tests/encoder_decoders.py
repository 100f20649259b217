"""Tiny random T5 folders, written by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

SIZES = {
    "vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
KINDS: Mapping[str, Mapping[str, Any]] = {
    "v1.0": {},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": None},
    "silu": {"feed_forward_proj": "gated-silu", "d_kv": 6, "layer_norm_epsilon": 1e-3},
}


def published(folder: Path, **more: Any) -> T5ForConditionalGeneration:
    """A random T5 with weights that matter, saved to `folder`; without tied matrices its head is another."""
    torch.manual_seed(5)
    model = T5ForConditionalGeneration(T5Config(**{**SIZES, **more})).eval()
    if more.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    model.save_pretrained(folder)
    return model
