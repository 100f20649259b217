"""Kinds of layer: which mixer of tokens and which feed-forward each layer of a model has, and how a pattern says so.

A layer is a residual step by a mixer, by a feed-forward, or by the one and then the other: `attention+mlp`, `mamba`, `moe`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from mega_common.config import Config, Problem
from mega_common.counts import LayerCount

Mixer = Literal["attention", "mamba", "delta"]
Feed = Literal["mlp", "moe"]
MIXERS: tuple[Mixer, ...] = get_args(Mixer)
FEEDS: tuple[Feed, ...] = get_args(Feed)
LETTERS = {"M": "mamba", "G": "delta", "*": "attention", "-": "mlp", "E": "moe"}  # Megatron's, for one half a layer


class Layer(NamedTuple):
    """The halves of a layer; at least one is there."""

    mixer: Mixer | None
    feed: Feed | None

    @classmethod
    def parse(cls, text: str) -> Layer:
        """Of "mixer", "feed" or "mixer+feed".

        Raises:
            ValueError: if it is none of these.
        """
        halves = text.split("+")
        mixer = next((kind for kind in MIXERS if kind == halves[0]), None)
        feed = next((kind for kind in FEEDS if kind == halves[-1]), None)
        if len(halves) != (mixer is not None) + (feed is not None):
            raise ValueError(text)
        return cls(mixer, feed)


class Repeat(Config):
    """Several layers in a row, several times."""

    times: LayerCount
    of: list[str] = Field(min_length=1)


Pattern = list[str | Repeat] | str


def spelled(pattern: Pattern) -> list[str]:
    """One entry a layer; letters that are none of Megatron's stay as they are."""
    if isinstance(pattern, str):
        return [LETTERS.get(letter, letter) for letter in pattern]
    return [name for item in pattern for name in ([item] if isinstance(item, str) else item.of * item.times)]


def check_pattern(pattern: Pattern) -> Pattern:
    """The pattern.

    Raises:
        ValueError: if it names no layer, or what is no kind of layer.
    """
    kinds = f"a mixer ({', '.join(MIXERS)}), a feed-forward ({', '.join(FEEDS)}), or both, as attention+mlp"
    if isinstance(pattern, str):
        kinds = f"one of the letters {', '.join(f'{letter} ({kind})' for letter, kind in LETTERS.items())}"
    if not pattern:
        raise ValueError(f"names no layer; a layer is {kinds}")
    for name in spelled(pattern):
        try:
            Layer.parse(name)
        except ValueError:
            raise ValueError(f"{name!r} is no kind of layer, which is {kinds}") from None
    return pattern


class MambaConfig(Config):
    """Mamba-2 (arXiv:2405.21060): heads of `head_dim` x `state_size` states, whose B and C come from fewer groups.

    A step's length is softplus(dt + bias), kept within `dt_limit`; the bias starts so that it is log-uniform in
    `dt_init`, at least `dt_init_floor`. The norm before the output projection is over each group's channels.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    state_size: PositiveInt = 128
    num_groups: PositiveInt = 1
    conv_kernel: PositiveInt = Field(4, description="tokens that the short convolution sees, the newest included")
    conv_bias: bool = True
    bias: bool = Field(False, description="of the projections into and out of the layer")
    chunk_size: PositiveInt = Field(
        256, description="tokens that are computed at once; the result does not depend on it"
    )
    dt_limit: tuple[NonNegativeFloat, PositiveFloat | None] = Field((0.0, None), description="null: no upper limit")
    dt_init: tuple[PositiveFloat, PositiveFloat] = (0.001, 0.1)
    dt_init_floor: PositiveFloat = 1e-4
    norm_eps: PositiveFloat | None = Field(None, description="of the norm before the output; default: the model's")

    @property
    def inner_size(self) -> int:
        """Channels of all heads together."""
        return self.num_heads * self.head_dim

    def problems(self) -> Iterator[Problem]:
        """Rules between sizes and between limits."""
        if self.num_heads % self.num_groups:
            yield Problem("num_groups", f"must divide num_heads = {self.num_heads}", self.num_groups)
        for name, (low, high) in (("dt_limit", self.dt_limit), ("dt_init", self.dt_init)):
            if high is not None and low > high:
                yield Problem(name, "the lower limit is above the upper", [low, high])


class DeltaConfig(Config):
    """Gated delta net (arXiv:2412.06464): states of `key_head_dim` x `value_head_dim` for each value head."""

    num_key_heads: PositiveInt
    num_value_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    conv_kernel: PositiveInt = Field(4, description="tokens that the short convolution sees, the newest included")
    chunk_size: PositiveInt = Field(
        64, description="tokens that are computed at once; the result does not depend on it"
    )
    norm_eps: PositiveFloat | None = Field(None, description="of the norm of each head's output; default: the model's")

    def problems(self) -> Iterator[Problem]:
        """Rules between sizes."""
        if self.num_value_heads % self.num_key_heads:
            rule = f"must divide num_value_heads = {self.num_value_heads}"
            yield Problem("num_key_heads", rule, self.num_key_heads)


def section_problems(layers: Sequence[Layer], given: dict[str, bool]) -> Iterator[Problem]:
    """Kinds that some layer is of, but whose section is not given."""
    used = dict.fromkeys(half for layer in layers for half in layer)
    for kind, there in given.items():
        if kind in used and not there:
            yield Problem(kind, "required by layers, which names layers of that kind")
