"""Layer kinds of a model: their names and patterns, their configuration sections, and Megatron's hybrid layer patterns.

A layer is a residual step by a token mixer, by a feed-forward block, or by both in this order: `attention+mlp`,
`mamba`, `moe`. `MambaConfig`, `Mamba1Config`, `MlaConfig`, `GatedDeltaConfig`, `KimiDeltaConfig`, `LightningConfig`,
`ShortConvolutionConfig`, `HybridConfig` and `CompressedAttentionConfig` are the sections of the mixers.

A hybrid layer pattern of Megatron-LM has one letter (`LETTERS`) per half layer, `|` between pipeline stages, and after
each `/` the layers of an MTP depth. Source: Megatron-LM, megatron/core/models/hybrid and megatron/core/ssm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mega_common.strict_config import ConfigProblem, LayerCount, StrictConfig

MixerKind = str  # one of MIXERS, or the name of an extension's mixer
FeedForwardKind = str  # one of FEEDS, or the name of an extension's feed-forward block
COMPRESSED_QUERIES = 512  # queries of compressed attention that attend at a time
COMPRESSED_MIXERS: tuple[MixerKind, ...] = ("swa", "csa", "hca")  # of DeepSeek-V4
MIXERS: tuple[MixerKind, ...] = (
    "attention", "mamba", "mamba1", "delta", "kda", "lightning", "conv", "hybrid", *COMPRESSED_MIXERS,
)  # fmt: skip
PARALLEL_MIXERS: dict[MixerKind, tuple[MixerKind, ...]] = {"hybrid": ("attention", "mamba")}  # side by side in a layer
FEEDS: tuple[FeedForwardKind, ...] = ("mlp", "moe")
LETTERS = {"M": "mamba", "G": "delta", "*": "attention", "-": "mlp", "E": "moe"}  # Megatron's letters of half layers


class LayerKind(NamedTuple):
    """Kind of a layer: the token mixer and the feed-forward block, at least one of which is set."""

    mixer: MixerKind | None
    feed_forward: FeedForwardKind | None

    @property
    def mixers(self) -> tuple[MixerKind, ...]:
        """Token mixers of the layer: none, one, or those of a hybrid mixer."""
        return () if self.mixer is None else PARALLEL_MIXERS.get(self.mixer, (self.mixer,))

    @classmethod
    def parse(cls, text: str, mixers: Iterable[MixerKind] = (), feeds: Iterable[FeedForwardKind] = ()) -> LayerKind:
        """Parse the text "mixer", "feed" or "mixer+feed", such as `mamba` or `attention+moe`.
        `mixers` and `feeds` are the names that extensions add.

        Raises:
            ValueError: if it is none of these.
        """
        halves = text.split("+")
        mixer = next((kind for kind in (*MIXERS, *mixers) if kind == halves[0]), None)
        feed = next((kind for kind in (*FEEDS, *feeds) if kind == halves[-1]), None)
        if len(halves) != (mixer is not None) + (feed is not None):
            raise ValueError(text)
        return cls(mixer, feed)


class RepeatedLayers(StrictConfig):
    """Item of a layer pattern: a sequence of layers that is repeated several times."""

    times: LayerCount
    of: list[str] = Field(min_length=1)


LayerPatternSpec = list[str | RepeatedLayers] | str


def expand_layer_pattern(pattern: LayerPatternSpec) -> list[str]:
    """Return the name of each layer's kind from a layer pattern, with repetitions expanded.
    In a string pattern each of Megatron's letters is one layer, and unknown letters stay unchanged.
    """
    if isinstance(pattern, str):
        return [LETTERS.get(letter, letter) for letter in pattern]
    return [name for item in pattern for name in ([item] if isinstance(item, str) else item.of * item.times)]


def validate_layer_pattern(
    pattern: LayerPatternSpec, mixers: Iterable[MixerKind] = (), feeds: Iterable[FeedForwardKind] = ()
) -> LayerPatternSpec:
    """Return `pattern` unchanged, after checking that every layer kind in it is known.
    `mixers` and `feeds` are the names that extensions add.

    Raises:
        ValueError: if it is empty or has an unknown layer kind.
    """
    kinds = (
        f"a mixer ({', '.join((*MIXERS, *mixers))}), a feed-forward block ({', '.join((*FEEDS, *feeds))}), or both, such as "
        "attention+mlp"
    )
    if isinstance(pattern, str):
        kinds = f"one of the letters {', '.join(f'{letter} ({kind})' for letter, kind in LETTERS.items())}"
    if not pattern:
        raise ValueError(f"must name at least one layer: {kinds}")
    for name in expand_layer_pattern(pattern):
        try:
            LayerKind.parse(name, mixers, feeds)
        except ValueError:
            raise ValueError(f"{name!r} is not a layer kind; use {kinds}") from None
    return pattern


class MambaConfig(StrictConfig):
    """Configuration of Mamba-2 layers (arXiv:2405.21060).
    Each head has `head_dim` x `state_size` states. The heads of a group share B and C.

    The step size is softplus(dt + bias), clamped to `dt_limit`. The bias is initialised so that the step size is
    log-uniform in `dt_init`, at least `dt_init_floor`. The norm before the output projection is over each group's
    channels.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    state_size: PositiveInt = 128
    num_groups: PositiveInt = 1
    conv_kernel: PositiveInt = Field(4, description="kernel size of the short convolution, in tokens")
    conv_bias: bool = True
    bias: bool = Field(False, description="bias of the input and output projections")
    chunk_size: PositiveInt = Field(
        256, description="tokens that are computed at once; the result does not depend on it"
    )
    dt_limit: tuple[NonNegativeFloat, PositiveFloat | None] = Field((0.0, None), description="null: no upper limit")
    dt_init: tuple[PositiveFloat, PositiveFloat] = (0.001, 0.1)
    dt_init_floor: PositiveFloat = 1e-4
    norm: Literal["gated", "before_gate", "none"] = Field(
        "gated", description="output norm: of y silu(z); before_gate: norm(y) silu(z); none: y silu(z) without a norm"
    )
    norm_eps: PositiveFloat | None = Field(None, description="epsilon of the output norm; default: the model's")

    @property
    def inner_size(self) -> int:
        """Number of channels of all Mamba-2 heads together: heads times head size."""
        return self.num_heads * self.head_dim

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules of the Mamba-2 settings.
        The groups must divide the number of heads, and lower limits must not be above upper limits.
        """
        if self.num_heads % self.num_groups:
            hint = f"num_groups: {find_largest_divisor(self.num_heads, self.num_groups)}"
            yield ConfigProblem("num_groups", f"must divide num_heads = {self.num_heads}", self.num_groups, hint)
        for name, (low, high) in (("dt_limit", self.dt_limit), ("dt_init", self.dt_init)):
            if high is not None and low > high:
                rule = "must be a lower and an upper limit, in this order"
                yield ConfigProblem(name, rule, [low, high], f"{name}: [{high}, {low}]")


class Mamba1Config(StrictConfig):
    """Configuration of Mamba-1 layers (arXiv:2312.00752).
    Each of `inner_size` channels has `state_size` states with decays of their own.

    A projection of rank `dt_rank` gives each channel its step size softplus(dt + bias). The bias is initialised so that the step
    size is log-uniform in `dt_init`, at least `dt_init_floor`.
    """

    inner_size: PositiveInt
    state_size: int = Field(16, ge=1, le=512)
    dt_rank: PositiveInt
    conv_kernel: PositiveInt = Field(4, description="kernel size of the short convolution, in tokens")
    conv_bias: bool = True
    bias: bool = Field(False, description="bias of the input and output projections")
    norms: Literal["none", "plain", "weight"] = Field(
        "none", description="RMSNorm of dt, B and C: plain has no weights, as in Falcon-Mamba; weight has, as in Jamba"
    )
    norm_eps: PositiveFloat | None = Field(None, description="epsilon of these norms; default: the model's")
    chunk_size: PositiveInt = Field(
        64, description="tokens of a chunk, all of which are computed at once; the result does not depend on it"
    )
    dt_init: tuple[PositiveFloat, PositiveFloat] = (0.001, 0.1)
    dt_init_floor: PositiveFloat = 1e-4

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules of the Mamba-1 settings: the lower limit of dt_init must not be above the upper one."""
        if self.dt_init[0] > self.dt_init[1]:
            rule, (high, low) = "must be a lower and an upper limit, in this order", self.dt_init
            yield ConfigProblem("dt_init", rule, list(self.dt_init), f"dt_init: [{low}, {high}]")


class HybridConfig(StrictConfig):
    """Factors on inputs, outputs and projections of mixers with attention beside Mamba-2, as in Falcon-H1 (arXiv:2507.22448).

    Both read the normalised stream, and their outputs are added. Attention is that of other layers, Mamba-2 that of `mamba`.
    """

    attention_input: PositiveFloat = 1.0
    attention_output: PositiveFloat = 1.0
    keys: PositiveFloat = 1.0
    mamba_input: PositiveFloat = 1.0
    mamba_output: PositiveFloat = 1.0
    mamba_projections: tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat] = Field(
        (1.0, 1.0, 1.0, 1.0, 1.0), description="factors on the projections z, x, B, C and dt"
    )


class FullAttentionConfig(StrictConfig):
    """Attention heads of the layers without a sliding window, where they differ from the other layers' (Gemma 4)."""

    head_dim: PositiveInt
    num_kv_heads: PositiveInt
    num_attention_heads: PositiveInt | None = Field(None, description="query heads, as in Laguna; default: as others")
    attention_sinks: bool | None = Field(None, description="sinks, which MiMo-V2 has in windows; default: as others")
    keys_are_values: bool = Field(False, description="no value projection: values are the projected keys")


class HyperConnectionConfig(StrictConfig):
    """Configuration of manifold-constrained hyper-connections (mHC, arXiv:2512.24880).
    The residual has several streams, which learned weights mix around each mixer and feed-forward block.
    """

    streams: int = Field(4, ge=2, le=64)
    iterations: int = Field(20, ge=1, le=1000, description="iterations of Sinkhorn-Knopp")
    eps: PositiveFloat = 1e-6


class AltUpConfig(StrictConfig):
    """Configuration of alternating updates (AltUp, arXiv:2301.13310) with residuals of low rank (LAuReL, arXiv:2411.07501).
    The residual has several streams; each layer computes one, and predicts and corrects the others from it.
    """

    streams: int = Field(4, ge=2, le=64)
    active: NonNegativeInt = Field(0, description="stream that layers compute")
    coefficient_clip: PositiveFloat = Field(
        120.0, description="bound of the absolute values of the coefficients' weights in training"
    )
    laurel_rank: PositiveInt = 64


INDEXER = ".self_attn.indexer."  # in the names of the tensors of an indexer


class IndexerConfig(StrictConfig):
    """Configuration of the lightning indexer of DeepSeek's sparse attention (DSA, DeepSeek-V3.2).
    It scores the earlier tokens of each query; attention is over the `top_k` best.

    Selection has no gradient: the indexer is trained by its divergence from the attention that it selects for.
    """

    num_heads: PositiveInt = Field(64, description="index heads, whose weighted ReLU scores are summed")
    head_dim: PositiveInt = Field(128, description="size of index queries and of the index key that heads share")
    top_k: PositiveInt = Field(2048, description="earlier tokens that a query attends to, its own included")
    interleaved: bool = Field(False, description="rotate pairs of neighbors; default: halves, as in DeepSeek-V3.2")
    dense: bool = Field(
        False, description="attend to all tokens, and train the indexer on all: DeepSeek's warm-up of the indexer"
    )
    kl_loss: float = Field(
        0.0, ge=0, description="weight of the divergence of index scores from attention; 0: the indexer is not trained"
    )


class MlaConfig(StrictConfig):
    """Configuration of multi-head latent attention (MLA, arXiv:2405.04434).
    Keys and values are projected from a narrow latent.

    The KV cache has only the latent. A head's query and key have `qk_nope_head_dim` elements without rotation and
    `qk_rope_head_dim` with rotation; the rotated part of the key is shared by all heads.
    """

    kv_lora_rank: PositiveInt
    q_lora_rank: PositiveInt | None = Field(None, description="width of the queries' latent; default: none")
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    norm_eps: float = Field(1e-6, gt=0, description="epsilon of the latents' norms, as in DeepSeek")
    latent_norm: bool = Field(True, description="RMSNorm of each latent; false as Megatron without --qk-layernorm")
    scaled_latents: bool = Field(
        False, description="normalised latents times sqrt(hidden_size / width), as in LongCat-Flash"
    )
    indexer: IndexerConfig | None = Field(None, description="sparse attention (DSA); default: over all tokens")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules of the indexer: its queries come from the queries' latent, and it has rotated parts."""
        if self.indexer is None:
            return
        if self.q_lora_rank is None:
            hint = "set q_lora_rank, or leave out indexer"
            yield ConfigProblem("q_lora_rank", "is required with indexer, whose queries come from it", hint=hint)
        if self.indexer.head_dim < self.qk_rope_head_dim:
            rule = f"must be at least qk_rope_head_dim = {self.qk_rope_head_dim}"
            hint = f"indexer.head_dim: {self.qk_rope_head_dim}"
            yield ConfigProblem("indexer.head_dim", rule, self.indexer.head_dim, hint)
        if self.scaled_latents:
            yield ConfigProblem("scaled_latents", "is not supported with indexer", True, "scaled_latents: false")


class CompressedAttentionConfig(StrictConfig):
    """Configuration of DeepSeek-V4's attention: a sliding window (`swa`), or also compressed entries (`csa`, `hca`).

    `head_dim` of the model is the size of a head; all heads share one, which is key and value. `rope` rotates layers with entries,
    `local_rope` the others. An entry of `csa` is from `csa_rate` tokens and as many before, and an indexer selects the `top_k`
    entries of each query; one of `hca` is from `hca_rate` tokens, and a query attends to all that have ended.
    """

    q_lora_rank: PositiveInt = Field(description="width of the queries' latent")
    window: PositiveInt = Field(128, description="keys of each query in the sliding window, its own included")
    output_groups: PositiveInt = Field(description="groups of heads that are projected to a latent each")
    output_rank: PositiveInt = Field(description="width of the latent of a group's output")
    csa_rate: PositiveInt = Field(4, description="tokens of an entry of csa layers")
    hca_rate: PositiveInt = Field(128, description="tokens of an entry of hca layers")
    indexer: IndexerConfig | None = Field(None, description="indexer of csa layers, which require it")


class GatedDeltaConfig(StrictConfig):
    """Configuration of gated delta net layers (arXiv:2412.06464).
    There is a state of `key_head_dim` x `value_head_dim` for each value head.
    """

    num_key_heads: PositiveInt
    num_value_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    conv_kernel: PositiveInt = Field(4, description="kernel size of the short convolution, in tokens")
    chunk_size: PositiveInt = Field(
        64, description="tokens that are computed at once; the result does not depend on it"
    )
    norm_eps: PositiveFloat | None = Field(
        None, description="epsilon of the per-head output norm; default: the model's"
    )
    negative_eigenvalues: bool = Field(
        False, description="write strengths between 0 and 2 instead of 1, as in OLMo Hybrid (arXiv:2411.12537)"
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules between the head counts of gated delta net layers."""
        if self.num_value_heads % self.num_key_heads:
            rule = f"must divide num_value_heads = {self.num_value_heads}"
            hint = f"num_key_heads: {find_largest_divisor(self.num_value_heads, self.num_key_heads)}"
            yield ConfigProblem("num_key_heads", rule, self.num_key_heads, hint)


class KimiDeltaConfig(StrictConfig):
    """Configuration of Kimi Delta Attention layers (KDA, arXiv:2510.26692).
    Each head has a state of `head_dim` x `head_dim`, whose key channels decay separately.

    The decays are exp(-exp(A) softplus(f + bias)), or with `gate_floor` exp(gate_floor sigmoid(exp(A) (f + bias))).
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    conv_kernel: PositiveInt = Field(4, description="kernel size of the short convolution, in tokens")
    chunk_size: PositiveInt = Field(
        64, description="tokens that are computed at once; the result does not depend on it"
    )
    norm_eps: PositiveFloat | None = Field(
        None, description="epsilon of the per-head output norm; default: the model's"
    )
    low_rank_gates: bool = Field(
        True,
        description="the forget gate f and the output gate are projections of rank head_dim; false: full, as in Ling 3",
    )
    gate_floor: float | None = Field(
        None, lt=0, description="lower bound of the decays' logarithms, as in Ling 3; default: unbounded"
    )

    @property
    def inner_size(self) -> int:
        """Number of channels of all heads together: heads times head size."""
        return self.num_heads * self.head_dim


class LightningConfig(StrictConfig):
    """Configuration of lightning attention layers (arXiv:2401.04658), linear attention with a fixed decay per head.

    The decay of head h = 1, 2, .. of H in layer l of L is exp(-2^(-8h/H) (1 - l/(L - 1))), as in MiniMax-Text-01.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    chunk_size: PositiveInt = Field(
        256, description="tokens that are computed at once; the result does not depend on it"
    )
    norm_eps: PositiveFloat = Field(1e-6, description="epsilon of the norm over all heads, as in MiniMax-Text-01")

    @property
    def inner_size(self) -> int:
        """Number of channels of all heads together: heads times head size."""
        return self.num_heads * self.head_dim


class ShortConvolutionConfig(StrictConfig):
    """Configuration of gated short convolutions as token mixers, as in LFM2 (arXiv:2511.23404).

    A mixer computes out(c * conv(b * x)) from three projections b, c and x of the stream, each as wide as the model; the
    convolution is causal, over the last `kernel` tokens of each channel.
    """

    kernel: PositiveInt = Field(3, description="tokens that the convolution reads, its own included")
    bias: bool = Field(False, description="bias of the projections and of the convolution")


def find_missing_sections(layers: Sequence[LayerKind], given: dict[str, bool]) -> Iterator[ConfigProblem]:
    """Yield a problem for each layer kind in use whose section of the model configuration is missing.
    Layer kinds are used by `layers`; `given` is {kind: True if the section is present}.
    """
    used = dict.fromkeys(half for layer in layers for half in (*layer, *layer.mixers))
    for kind, is_given in given.items():
        if kind in used and not is_given:
            hint = f"give the section {kind}, or leave these layers out of layers"
            yield ConfigProblem(kind, "is required: layers names layers of this kind", hint=hint)


def find_largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


NORM_EPS = 1e-5  # of the norm inside Megatron's Mamba-2 layers, independent of the model's
MOST_LAYERS = 10_000  # layers of a model


@dataclass(frozen=True)
class HybridLayerPattern:
    """Parsed `hybrid_layer_pattern` of Megatron-LM: letters of layers, sizes of pipeline stages, and letters of MTP depths.
    The pattern has one letter per layer.

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
        """Parse the text of Megatron-LM's `hybrid_layer_pattern` flag, such as `M*M-|M*M-/*-`.
        It has one letter per layer, `|` between pipeline stages, and `/` before each multi-token prediction (MTP)
        depth.

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
        """Names of the kinds of all layers, such as `mamba` or `attention+mlp`, MTP depths last.
        Each multi-token prediction (MTP) depth counts as one layer with a mixer and a feed-forward block, as in
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
        rule = "an MTP depth must have a mixer, a feed-forward block, or both"
        raise ValueError(f"hybrid_layer_pattern: /{letters} is not supported; {rule}") from None
    return text


def build_hybrid_pattern(raw: Mapping[str, Any]) -> HybridLayerPattern | None:
    """Return the hybrid layer pattern that Megatron-LM arguments give; None if they give none.
    The arguments `raw` give it either directly or by the ratios of attention and MLP layers.

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
    """Return one Megatron letter per layer, with evenly spaced attention (*) and MLP (-) layers in given shares (0 to 1).
    All other layers are Mamba-2 (M).
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
    """Return the `mamba` section of a model configuration from Megatron-LM arguments.
    By default all Mamba-2 heads together are twice as wide as the model.
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
