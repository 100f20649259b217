"""Megatron's settings of models whose layers are of several kinds, one half a layer: its `MambaModel` and `HybridModel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import MismatchError, Raw
from mega_ckpt.formats.megatron_entries import Several
from mega_ckpt.formats.pickles import words
from mega_common.layer_pattern import NORM_EPS, mamba_section, pattern_of
from mega_common.layers import LETTERS, MambaConfig
from mega_common.model_config import ModelConfig

_CORE = "Megatron-Core 0.16"  # whose checkpoints these are
_LETTER = {kind: letter for letter, kind in LETTERS.items()}


@dataclass(frozen=True)
class Hybrid(Several):
    """The kinds of layers and the sizes of those that are Mamba-2."""

    keys: frozenset[str] = words(
        """is_hybrid_model hybrid_layer_pattern hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads"""
    )
    fields: frozenset[str] = frozenset({"layers", "mamba"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Nothing for a model of transformer layers."""
        try:
            pattern = pattern_of(raw)
        except ValueError as error:
            raise MismatchError(str(error)) from None
        if pattern is None:
            return {}
        if "G" in pattern.letters:
            raise MismatchError(f"hybrid_layer_pattern: the MambaModel of {_CORE} has M, *, - and E, and no G")
        if pattern.further:
            raise MismatchError(f"hybrid_layer_pattern: no MambaModel of {_CORE} predicts further tokens (/)")
        out: dict[str, Any] = {"num_layers": len(pattern.letters), "layers": pattern.layers}
        return {**out, "mamba": mamba_section(raw)} if "M" in pattern.letters else out

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The pattern, under the name that every version reads, and the sizes."""
        if model.layers is None:
            return {"is_hybrid_model": False}
        halves = [[half for half in kind if half] for kind in model.kinds[: model.num_layers]]
        if not all(len(half) == 1 for half in halves) or model.delta is not None:
            raise MismatchError(
                f"layers must each be mamba, attention, mlp or moe, and only one of them: others are not in {_CORE}"
            )
        if model.mtp_layers:
            raise MismatchError(f"mtp_layers of a hybrid must be 0: {_CORE} has none")
        mamba = model.mamba or MambaConfig(num_heads=1, head_dim=64)
        usual = mamba.model_copy(update={"conv_kernel": 4, "conv_bias": True, "bias": False, "dt_limit": (0.0, None)})
        if mamba != usual or (mamba.norm_eps or model.norm_eps) != NORM_EPS:
            rule = "conv_kernel 4, conv_bias, no bias, no dt_limit and norm_eps 1e-5"
            raise MismatchError(f"mamba must have {rule}")
        return {
            "is_hybrid_model": True,
            "hybrid_override_pattern": "".join(_LETTER[half] for (half,) in halves),
            "hybrid_attention_ratio": 0.0,
            "hybrid_mlp_ratio": 0.0,
            "mamba_state_dim": mamba.state_size,
            "mamba_head_dim": mamba.head_dim,
            "mamba_num_groups": mamba.num_groups,
            "mamba_num_heads": mamba.num_heads,
        }
