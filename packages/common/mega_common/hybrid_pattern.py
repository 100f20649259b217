"""Layer patterns of Megatron's hybrid models: one letter per half layer, and the settings that belong to them.

A pattern has a letter a layer (`mega_common.layer_kinds.LETTERS`), `|` between the stages of a pipeline, and behind `/` the layers
of each depth that predicts a further token. Facts: Megatron-LM, megatron/core/models/hybrid and megatron/core/ssm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_common.layer_kinds import LETTERS, LayerKind

NORM_EPS = 1e-5  # of the norm inside a Mamba-2 layer of Megatron's, whatever the model's is
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class HybridLayerPattern:
    """Parsed hybrid layer pattern.

    Attributes:
        letters: of the layers.
        stages: how many layers each part between `|` has; one part where there is none.
        mtp_letters: letters of the depths behind the last layer.
    """

    letters: str
    stages: tuple[int, ...]
    mtp_letters: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> HybridLayerPattern:
        """Parse the text of a `hybrid_layer_pattern` flag.

        Raises:
            ValueError: for a letter that stands for no kind of layer here.
        """
        main, *further = text.split("/")
        pattern = cls(main.replace("|", ""), tuple(map(len, main.split("|"))), tuple(further))
        strange = sorted(set(pattern.letters).union(*further) - set(LETTERS))
        if strange or not 0 < len(pattern.letters) <= MOST_LAYERS:
            known = ", ".join(f"{letter} {kind}" for letter, kind in LETTERS.items())
            raise ValueError(f"hybrid_layer_pattern: {strange or 'no layer'} is not supported (known: {known})")
        for letters in further:
            _parse_mtp_depth(letters)
        return pattern

    @property
    def layer_kind_names(self) -> list[str]:
        """Kinds of all layers; each MTP depth counts as one layer with a mixer and a feed-forward block, as in
        DeepSeek-V3.
        """
        return [LETTERS[letter] for letter in self.letters] + [
            _parse_mtp_depth(letters) for letters in self.mtp_letters
        ]


def _parse_mtp_depth(letters: str) -> str:
    text = "+".join(LETTERS[letter] for letter in letters)
    try:
        LayerKind.parse(text)
    except ValueError:
        rule = "a depth that predicts a further token has a mixer, a feed-forward, or both"
        raise ValueError(f"hybrid_layer_pattern: /{letters} is not supported ({rule})") from None
    return text


def build_hybrid_pattern(raw: Mapping[str, Any]) -> HybridLayerPattern | None:
    """Return the pattern given by the settings, either directly or by the ratios of attention and MLP layers; None if
    they give none.

    Raises:
        ValueError: for one that is not supported.
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
    """Return the letters of `layers` layers with these shares of attention and MLP layers, evenly spaced; the others
    are Mamba-2.
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
    """Return the sizes of Mamba-2; by default all heads together are twice as wide as the model."""
    width = raw.get("mamba_head_dim") or 64
    return {
        "num_heads": raw.get("mamba_num_heads") or 2 * (raw.get("hidden_size") or 0) // width,
        "head_dim": width,
        "state_size": raw.get("mamba_state_dim") or 128,
        "num_groups": raw.get("mamba_num_groups") or 8,
        "chunk_size": 128,
        "norm_eps": NORM_EPS,
    }
