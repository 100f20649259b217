"""GPT-BigCode: SantaCoder and StarCoder (arXiv:2305.06161), GPT-2 with one key and value for all queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.gpt2 import gpt2_entries, gpt2_rules
from mega_ckpt.families.keys import MismatchError, Only, Raw, check_head_dim, check_head_size
from mega_ckpt.families.layouts import PLAIN
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class MultiQuery:
    """One key and value for all queries, or for each its own."""

    keys: frozenset[str] = frozenset({"multi_query", "head_dim"})
    fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """One, or the default."""
        check_head_dim(raw)
        return {"num_kv_heads": 1 if raw.get("multi_query", True) else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The switch."""
        if model.kv_heads not in (1, model.num_attention_heads):
            raise MismatchError(f"num_kv_heads must be 1 or num_attention_heads, not {model.kv_heads}")
        check_head_size(model)
        return {"multi_query": model.kv_heads == 1}


GPT_BIGCODE = Family(
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    entries=(
        *gpt2_entries(activation="gelu_pytorch_tanh"),
        MultiQuery(),
        Only({"scale_attn_weights": (True,)}),
    ),
    rules=gpt2_rules(PLAIN, by="kv"),
    carried=frozenset(
        {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "classifier_dropout", "hidden_dropout"}
    ),
)
