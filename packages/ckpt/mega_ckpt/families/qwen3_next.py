"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the fourth, many small experts, a gated shared one.

On disk the four parts of a delta net's projection, and the two of its steps, lie one key head after another; so do a head's
query and gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.experts import Experts, InPattern, Section, SparseSteps, expert_rules
from mega_ckpt.families.hybrid import NO_WINDOW, TAPS, check_mixers, mixers_named, names_of
from mega_ckpt.families.keys import Entry, Fixed, Heads, Key, MismatchError, Only, Raw, layer_numbers
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_common.layers import DeltaConfig
from mega_common.model_config import ModelConfig

_LAYER = "model.layers.{i}"
_DELTA = f"{_LAYER}.linear_attn"
_SIZES = (
    Key("linear_num_key_heads", "num_key_heads", 16),
    Key("linear_num_value_heads", "num_value_heads", 32),
    Key("linear_key_head_dim", "key_head_dim", 128),
    Key("linear_value_head_dim", "value_head_dim", 128),
    Key("linear_conv_kernel_dim", "conv_kernel", 4),
)


@dataclass(frozen=True)
class Delta:
    """The section `delta`, whose norm has the model's epsilon; a model without such layers may lack it."""

    keys: frozenset[str] = frozenset().union(*(entry.keys for entry in _SIZES))
    fields: frozenset[str] = frozenset({"delta"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The section."""
        return {"delta": {name: value for entry in _SIZES for name, value in entry.read(raw).items()}}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The sizes."""
        delta = model.delta or DeltaConfig(num_key_heads=1, num_value_heads=1, key_head_dim=1, value_head_dim=1)
        if delta.norm_eps not in (None, model.norm_eps):
            raise MismatchError(f"delta.norm_eps must be norm_eps = {model.norm_eps}, not {delta.norm_eps}")
        return {key: value for entry in _SIZES for key, value in entry.write(delta).items()}


@dataclass(frozen=True)
class QwenLayers:
    """Kinds of layers: a list of mixers, every so many attention where it is absent, and the keys about experts.

    `feed` is what every layer has where the family has no keys about it.
    """

    feed: str = ""
    fields: frozenset[str] = frozenset({"layers"})

    @property
    def keys(self) -> frozenset[str]:
        """Those about mixers and about experts."""
        return frozenset({"layer_types", "full_attention_interval"}) | (SparseSteps().keys if not self.feed else set())

    def read(self, raw: Raw) -> dict[str, Any]:
        """The kind of each layer."""
        layers, every = layer_numbers(raw), raw.get("full_attention_interval", 4)
        usual = ["full_attention" if every and (layer + 1) % every == 0 else "linear_attention" for layer in layers]
        mixers = mixers_named(raw.get("layer_types") or usual, "delta", layers)
        return {"layers": [f"{one}+{feed}" for one, feed in zip(mixers, self._feeds(raw, layers), strict=True)]}

    def _feeds(self, raw: Raw, layers: Sequence[int]) -> list[str]:
        if self.feed:
            return [self.feed] * len(layers)
        sparse = SparseSteps().read(raw)
        return ["moe" if sparse is None or layer in sparse else "mlp" for layer in layers]

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The list, and which layers are dense."""
        out = {"layer_types": names_of(check_mixers(model, "delta"))}
        if not self.feed:
            return {**out, **SparseSteps().write(model)}
        if any(kind.feed != self.feed for kind in model.kinds):
            raise MismatchError(f"every layer must have {self.feed}")
        return out


def qwen_entries(kv_heads: int) -> tuple[Entry, ...]:
    """The keys that Qwen3-Next and Qwen3.5 share; `kv_heads` is what transformers takes where the key is absent."""
    return (
        Heads(kv_default=kv_heads, dim_default=256),
        Rope(fraction=0.25, partial=True),
        Delta(),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        *NO_WINDOW,
        Only({"attn_output_gate": (True,)}),
        Fixed({"mlp_bias": False, "qk_norm": True, "zero_centered_norm": True, "attention_gate": True}),
    )


def qwen_experts(top_k: int, experts: int, normalize: Section) -> Experts:
    """Their experts; `top_k` and `experts` are what transformers takes for absent keys."""
    return Experts(
        (
            Key("num_experts num_local_experts", "num_experts", experts),
            Key("num_experts_per_tok", "top_k", top_k),
            Key("moe_intermediate_size", "ffn_hidden_size", 512),
            Key("shared_expert_intermediate_size", "shared_ffn_hidden_size", 512),
            Key("router_aux_loss_coef", "aux_loss", 0.001),
            Fixed({"shared_gate": True}),
            normalize,
        ),
        InPattern(),
    )


def by_head(disk: str, *parts: str, by: str, kind: str = "weight") -> Rule:
    """A rule for parts of a layer that lie head by head."""
    return Rule(f"{_LAYER}.{disk}.{kind}", tuple(f"{_LAYER}.{part}.{kind}" for part in parts), by=by)


QWEN_RULES = (
    *(by_head("self_attn.q_proj", "self_attn.q_proj", "self_attn.g_proj", by="query", kind=kind) for kind in ("weight", "bias")),
    Rule(f"{_DELTA}.conv1d.weight", tuple(f"{_DELTA}.conv1d.{part}.weight" for part in "qkv"), TAPS),
)  # fmt: skip

QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    entries=(
        *decoder(),
        *qwen_entries(2),
        QwenLayers(),
        qwen_experts(10, 512, Key("norm_topk_prob", "normalize", True)),
    ),
    rules=(
        by_head("linear_attn.in_proj_qkvz", *(f"linear_attn.in_proj.{part}" for part in "qkvz"), by="delta"),
        by_head("linear_attn.in_proj_ba", *(f"linear_attn.in_proj.{part}" for part in "ba"), by="delta"),
        *QWEN_RULES,
        *expert_rules(f"{_LAYER}.mlp.experts"),
    ),
    buffers=r"mtp\..*",
)
