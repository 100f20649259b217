"""Granite 3 (IBM), dense and with experts: Llama with four factors, on embeddings, residuals, scores and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.experts import Everywhere, Experts, router
from mega_ckpt.families.keys import Entry, Fixed, Heads, Key, MismatchError, Raw
from mega_ckpt.families.layouts import Halves, Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow
from mega_common.model_config import ModelConfig

_MOE = "model.layers.{i}.block_sparse_moe"
_EXPERTS = "model.layers.{i}.mlp.experts"


@dataclass(frozen=True)
class Divisor:
    """`logits_scaling`, by which the logits are divided."""

    keys: frozenset[str] = frozenset({"logits_scaling"})
    fields: frozenset[str] = frozenset({"logit_scale"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Its inverse."""
        divisor = raw.get("logits_scaling", 1.0)
        if not divisor > 0:
            raise MismatchError(f"logits_scaling = {divisor!r} must be more than 0")
        return {"logit_scale": 1 / divisor}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The number whose inverse it is, a round one where there is one."""
        near = 1 / model.logit_scale
        return {
            "logits_scaling": next((n for n in (round(near), round(near, 6)) if n and 1 / n == model.logit_scale), near)
        }


@dataclass(frozen=True)
class ScoreFactor:
    """`attention_multiplier`, the factor on scores, which is 1 where it is not said."""

    keys: frozenset[str] = frozenset({"attention_multiplier"})
    fields: frozenset[str] = frozenset({"attention_scale"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The factor."""
        return {"attention_scale": raw.get("attention_multiplier", 1.0)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The factor, the usual one too."""
        return {"attention_multiplier": model.attention_scale or model.head_size**-0.5}


MULTIPLIERS: tuple[Entry, ...] = (
    Key("attention_bias", "qkv_bias attention_out_bias", False),
    Key("embedding_multiplier", "embedding_multiplier", 1.0),
    Key("residual_multiplier", "residual_multiplier", 1.0),
    ScoreFactor(),
    Divisor(),
)
MOE_RULES = (
    Rule(f"{_MOE}.router.layer.weight", ("model.layers.{i}.mlp.gate.weight",)),
    Rule(f"{_MOE}.input_linear.weight", (f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"), Halves()),
    Rule(f"{_MOE}.output_linear.weight", (f"{_EXPERTS}.down_proj.weight",), Halves()),
)
_SHARED: tuple[Entry, ...] = (
    *DECODER,
    Heads(explicit_dim=False),
    Rope(),
    *MULTIPLIERS,
    SameWindow(knows=False),
    Fixed({"qk_norm": False}),
)

GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    entries=(*_SHARED, Key("mlp_bias", "mlp_bias", False)),
)

GRANITE_MOE = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    entries=(
        *_SHARED,
        Experts(
            (
                *router("num_local_experts num_experts", top_k=2, normalize=True, experts=8),
                Key("intermediate_size", "ffn_hidden_size"),
            ),
            Everywhere(),
        ),
        Fixed({"mlp_bias": False}),
    ),
    rules=MOE_RULES,
)
