"""Granite 4 (IBM): Mamba-2 in most layers and attention in a few, Granite's four factors, experts beside one for all tokens.

Without experts that one is the whole feed-forward block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.experts import Experts, InPattern, router
from mega_ckpt.families.granite import MOE_RULES, MULTIPLIERS
from mega_ckpt.families.hybrid import MAMBA, NO_WINDOW, RopeOrNone, check_mixers, mamba_rules, mixers_named, names_of
from mega_ckpt.families.keys import Entry, Fixed, Heads, Key, MismatchError, Raw, layer_numbers
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_common.model_config import ModelConfig

_LAYER = "model.layers.{i}"
_EXPERTS = Experts(
    (
        *router("num_local_experts", top_k=2, normalize=True, experts=8),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("shared_intermediate_size", "shared_ffn_hidden_size", 1024),
    ),
    InPattern(),
)


@dataclass(frozen=True)
class MixedLayers:
    """The mixers by a list of kinds, Mamba-2 where it is absent; experts in all layers, or in none if there are none."""

    keys: frozenset[str] = _EXPERTS.keys | {"layer_types", "layers_block_type"}
    fields: frozenset[str] = frozenset({"layers", "moe", "ffn_hidden_size"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The kinds and the widths of their feed-forward blocks."""
        layers = layer_numbers(raw)
        kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * len(layers)
        mixers = mixers_named(kinds, "mamba", layers)
        if raw.get("num_local_experts", 8) == 0:
            width = raw.get("shared_intermediate_size", 1024)
            return {"layers": [f"{mixer}+mlp" for mixer in mixers], "ffn_hidden_size": width}
        width = {"ffn_hidden_size": raw.get("intermediate_size")}
        return {"layers": [f"{mixer}+moe" for mixer in mixers], **width, **_EXPERTS.read(raw)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The list, and the widths; that of the experts, where there are none, is one that nothing reads."""
        out: dict[str, Any] = {"layer_types": names_of(check_mixers(model, "mamba"))}
        feeds = {kind.feed for kind in model.kinds}
        if feeds == {"mlp"}:
            width = model.ffn_hidden_size
            return {**out, "num_local_experts": 0, "intermediate_size": width, "shared_intermediate_size": width}
        if feeds != {"moe"} or model.moe is None or not model.moe.shared_ffn_hidden_size:
            raise MismatchError("every layer must have experts and one for all tokens, or none must")
        return {**out, **_EXPERTS.write(model)}


def _shared_mlp(module: str) -> tuple[Rule, ...]:
    parts = tuple(f"{_LAYER}.{module}.{name}_proj.weight" for name in ("gate", "up"))
    down = f"{_LAYER}.{module}.down_proj.weight"
    shared = f"{_LAYER}.shared_mlp"
    return Rule(f"{shared}.input_linear.weight", parts), Rule(f"{shared}.output_linear.weight", (down,))


_ENTRIES: tuple[Entry, ...] = tuple(
    entry for entry in DECODER if not entry.fields & {"ffn_hidden_size", "position"}
)  # which are said otherwise here

GRANITE_MOE_HYBRID = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    entries=(
        *_ENTRIES,
        Fixed({"norm": "rmsnorm"}),
        Heads(explicit_dim=False, derived=True),
        RopeOrNone(Rope()),
        *MULTIPLIERS,
        MixedLayers(),
        MAMBA,
        *NO_WINDOW,
        Fixed({"qk_norm": False, "mlp_bias": False}),
    ),
    rules=(*mamba_rules(f"{_LAYER}.mamba"), *MOE_RULES, *_shared_mlp("mlp"), *_shared_mlp("mlp.shared_expert")),
    carried=frozenset({"normalization_function", "init_method"}),
)
