"""Layer patterns of Megatron's hybrid models: one letter per half layer, and the settings that belong to them.

A pattern has one letter per layer (`mega_common.layer_kinds.LETTERS`), `|` between pipeline stages, and after each `/`
the layers of an MTP depth. Source: Megatron-LM, megatron/core/models/hybrid and megatron/core/ssm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_common.layer_kinds import LETTERS, LayerKind

NORM_EPS = 1e-5  # of the norm inside Megatron's Mamba-2 layers, independent of the model's
MOST_LAYERS = 10_000  # layers of a model


@dataclass(frozen=True)
class HybridLayerPattern:
    """Parsed `hybrid_layer_pattern` of Megatron-LM: one letter per layer, pipeline stages and MTP depths.

    Attributes:
        letters: letters of all layers.
        stages: number of layers of each part between `|`.
        mtp_letters: letters of each MTP depth.
    """

    letters: str
    stages: tuple[int, ...]
    mtp_letters: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> HybridLayerPattern:
        """Parse the text of Megatron-LM's `hybrid_layer_pattern` flag, such as `M*M-|M*M-/*-`: one letter per layer,
        `|` between pipeline stages, `/` before each MTP depth.

        Raises:
            ValueError: for an unsupported letter, and for no or too many layers.
        """
        main, *depths = text.split("/")
        pattern = cls(main.replace("|", ""), tuple(map(len, main.split("|"))), tuple(depths))
        unknown = sorted(set(pattern.letters).union(*depths) - set(LETTERS))
        if unknown:
            known = ", ".join(f"{letter} {kind}" for letter, kind in LETTERS.items())
            raise ValueError(f"hybrid_layer_pattern: {unknown} is not supported (supported letters: {known})")
        if not 0 < len(pattern.letters) <= MOST_LAYERS:
            raise ValueError(f"hybrid_layer_pattern: must have 1 to {MOST_LAYERS} layers, not {len(pattern.letters)}")
        for letters in depths:
            _parse_mtp_depth(letters)
        return pattern

    @property
    def layer_kind_names(self) -> list[str]:
        """Names of the kinds of all layers, such as `mamba` or `attention+mlp`; each MTP depth counts as one layer with
        a mixer and a feed-forward block, as in DeepSeek-V3.
        """
        return [LETTERS[letter] for letter in self.letters] + [
            _parse_mtp_depth(letters) for letters in self.mtp_letters
        ]


def _parse_mtp_depth(letters: str) -> str:
    text = "+".join(LETTERS[letter] for letter in letters)
    try:
        LayerKind.parse(text)
    except ValueError:
        rule = "an MTP depth must have a mixer, a feed-forward block, or both"
        raise ValueError(f"hybrid_layer_pattern: /{letters} is not supported; {rule}") from None
    return text


def build_hybrid_pattern(raw: Mapping[str, Any]) -> HybridLayerPattern | None:
    """Return the hybrid layer pattern that Megatron-LM arguments `raw` give, either directly or by the ratios of
    attention and MLP layers; None if they give none.

    Raises:
        ValueError: for an unsupported pattern.
    """
    text = raw.get("hybrid_layer_pattern") or raw.get("hybrid_override_pattern")
    if text:
        depths, depth = raw.get("mtp_num_layers") or 0, raw.get("mtp_hybrid_override_pattern")
        return HybridLayerPattern.parse(text + (f"/{depth}" * depths if depth and "/" not in text else ""))
    shares = [float(raw.get(f"hybrid_{kind}_ratio") or 0.0) for kind in ("attention", "mlp")]
    if not raw.get("is_hybrid_model") and not any(shares):
        return None
    letters = distribute_layer_kinds(raw.get("num_layers") or 0, *shares)
    return HybridLayerPattern(letters, (len(letters),))


def distribute_layer_kinds(layers: int, attention: float, mlp: float) -> str:
    """Return one Megatron letter per layer for `layers` layers: the shares `attention` (*) and `mlp` (-), evenly
    spaced, all others Mamba-2 (M).
    """
    chosen = round(layers * attention)
    letters = _replace_evenly("M" * layers, "*", (layers - chosen) / (chosen + 1))
    chosen = round(layers * mlp)
    left = letters.count("M") - chosen
    return _replace_evenly(letters, "-", left / chosen) if chosen else letters


def _replace_evenly(letters: str, kind: str, between: float) -> str:
    """Replace an `M` by `kind` after every `between` others (not necessarily a whole number)."""
    out, left = "", between
    for letter in letters:
        if letter != "M":
            out += letter
        elif left < 0.5:
            out, left = out + kind, left + between
        else:
            out, left = out + letter, left - 1
    return out


def build_mamba_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `mamba` section of a model configuration from Megatron-LM arguments `raw`; by default all Mamba-2
    heads together are twice as wide as the model.
    """
    width = raw.get("mamba_head_dim") or 64
    return {
        "num_heads": raw.get("mamba_num_heads") or 2 * (raw.get("hidden_size") or 0) // width,
        "head_dim": width,
        "state_size": raw.get("mamba_state_dim") or 128,
        "num_groups": raw.get("mamba_num_groups") or 8,
        "chunk_size": 128,
        "norm_eps": NORM_EPS,
    }
