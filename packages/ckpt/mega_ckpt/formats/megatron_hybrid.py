"""Megatron's settings of models whose layers are of several kinds, one half a layer: its `MambaModel` and `HybridModel`.

A pattern has a letter a layer (`mega_common.layers.LETTERS`), `|` between the stages of a pipeline, and behind `/` the layers
of each depth that predicts a further token. Facts: Megatron-LM, megatron/core/models/hybrid and megatron/core/ssm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import MOST_LAYERS, MismatchError, Raw
from mega_ckpt.formats.megatron_entries import Several
from mega_ckpt.formats.pickles import words
from mega_common.layers import LETTERS, Layer, MambaConfig
from mega_common.model_config import ModelConfig

NORM_EPS = 1e-5  # of the norm inside a Mamba-2 layer, whatever the model's is
_LETTER = {kind: letter for letter, kind in LETTERS.items()}


@dataclass(frozen=True)
class Pattern:
    """What a pattern says.

    Attributes:
        letters: of the layers.
        stages: how many layers each part between `|` has; one part where there is none.
        further: letters of the depths behind the last layer.
    """

    letters: str
    stages: tuple[int, ...]
    further: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Of the text of a flag.

        Raises:
            MismatchError: for a letter that stands for no kind of layer here.
        """
        main, *further = text.split("/")
        pattern = cls(main.replace("|", ""), tuple(map(len, main.split("|"))), tuple(further))
        strange = sorted(set(pattern.letters).union(*further) - set(LETTERS))
        if strange or not 0 < len(pattern.letters) <= MOST_LAYERS:
            known = ", ".join(f"{letter} {kind}" for letter, kind in LETTERS.items())
            raise MismatchError(f"hybrid_layer_pattern: {strange or 'no layer'} is not supported (known: {known})")
        for letters in further:
            _depth(letters)
        return pattern

    @property
    def layers(self) -> list[str]:
        """Kinds of all layers, each depth behind the last being one: its mixer and its feed-forward, as DeepSeek-V3's."""
        return [LETTERS[letter] for letter in self.letters] + [_depth(letters) for letters in self.further]


def _depth(letters: str) -> str:
    text = "+".join(LETTERS[letter] for letter in letters)
    try:
        Layer.parse(text)
    except ValueError:
        rule = "a depth that predicts a further token has a mixer, a feed-forward, or both"
        raise MismatchError(f"hybrid_layer_pattern: /{letters} is not supported ({rule})") from None
    return text


def pattern_of(raw: Raw) -> Pattern | None:
    """The pattern that settings give, by itself or by the shares of attention and MLPs; None where they give none.

    Raises:
        MismatchError: for one that is not supported.
    """
    text = raw.get("hybrid_layer_pattern") or raw.get("hybrid_override_pattern")
    if text:
        depths, depth = raw.get("mtp_num_layers") or 0, raw.get("mtp_hybrid_override_pattern")
        return Pattern.parse(text + (f"/{depth}" * depths if depth and "/" not in text else ""))
    shares = [float(raw.get(f"hybrid_{kind}_ratio") or 0.0) for kind in ("attention", "mlp")]
    if not raw.get("is_hybrid_model") and not any(shares):
        return None
    letters = spread(raw.get("num_layers") or 0, *shares)
    return Pattern(letters, (len(letters),))


def spread(layers: int, attention: float, mlp: float) -> str:
    """The letters of that many layers with these shares of attention and of MLPs, spread evenly, Mamba-2 else."""
    chosen = round(layers * attention)
    letters = _each("M" * layers, "*", (layers - chosen) / (chosen + 1))
    chosen = round(layers * mlp)
    left = letters.count("M") - chosen
    return _each(letters, "-", left / chosen) if chosen else letters


def _each(letters: str, kind: str, between: float) -> str:
    """With `kind` for an `M` after every so many others, which need not be a whole number."""
    out, left = "", between
    for letter in letters:
        if letter != "M":
            out += letter
        elif left < 0.5:
            out, left = out + kind, left + between
        else:
            out, left = out + letter, left - 1
    return out


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
        pattern = pattern_of(raw)
        if pattern is None:
            return {}
        if "G" in pattern.letters:
            raise MismatchError("hybrid_layer_pattern: G is not supported in checkpoints of Megatron")
        if pattern.further:
            raise MismatchError("hybrid_layer_pattern: further tokens of a hybrid are not supported in checkpoints")
        out: dict[str, Any] = {"num_layers": len(pattern.letters), "layers": pattern.layers}
        return {**out, "mamba": mamba_section(raw)} if "M" in pattern.letters else out

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The pattern, under the name that every version reads, and the sizes."""
        if model.layers is None:
            return {"is_hybrid_model": False}
        halves = [[half for half in kind if half] for kind in model.kinds[: model.num_layers]]
        if not all(len(half) == 1 for half in halves) or model.delta is not None:
            raise MismatchError("layers must each be mamba, attention, mlp or moe, and only one of them")
        if model.mtp_layers:
            raise MismatchError("mtp_layers of a hybrid must be 0")
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


def mamba_section(raw: Raw) -> dict[str, Any]:
    """Sizes of Mamba-2: by default all heads together are twice as wide as the model."""
    width = raw.get("mamba_head_dim") or 64
    return {
        "num_heads": raw.get("mamba_num_heads") or 2 * (raw.get("hidden_size") or 0) // width,
        "head_dim": width,
        "state_size": raw.get("mamba_state_dim") or 128,
        "num_groups": raw.get("mamba_num_groups") or 8,
        "chunk_size": 128,
        "norm_eps": NORM_EPS,
    }
