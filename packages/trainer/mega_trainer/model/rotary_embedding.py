"""Rotary position embedding (RoPE, arXiv:2104.09864) and its scaling variants, in transformers' conventions.

The rotated part of a head is split in halves (x1, x2) and rotated: (x1 cos - x2 sin, x2 cos + x1 sin). Interleaved, the
input is pairs of neighbors and the output is halves, as in transformers: a common order of queries and keys does not
change their dot products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_common.model_config import ModelConfig, RopeConfig
from mega_trainer.distributed.device import to_host
from mega_trainer.kernels.kernel_interface import RotaryAngles


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotary position embedding of a model, or of only its sliding-window layers.

    Frequencies are cached on the device: a copy from host memory would wait for all pending work of the device.

    Attributes:
        size: width of a head, or of the part of it that may be rotated.
        max_position: longest sequence that the model supports.
    """

    rope: RopeConfig
    size: int
    max_position: int
    _cache: dict[tuple[int, torch.device], tuple[Tensor, float]] = field(default_factory=dict)

    @classmethod
    def from_model_config(cls, config: ModelConfig, rope: RopeConfig) -> RotaryEmbedding:
        """Return the rotary embedding of a model with the settings `rope`, which may be for only some of its layers."""
        return cls(rope, config.mla.qk_rope_head_dim if config.mla else config.query_key_head_dim, config.max_position)

    def compute_rotation(
        self, positions: Tensor, dtype: torch.dtype, lengths: Sequence[int] | None = None
    ) -> RotaryAngles:
        """Return cosine and sine of the rotary angles at integer `positions` [B or 1, S].
        The angles are computed in fp32, and cosine and sine cast to `dtype`.

        With `sections` (M-RoPE, arXiv:2409.12191) a token may have three positions, [3, B, S]; each rotates its section
        of the pairs, one section after the other or alternating.

        Scaling that depends on the sequence length uses the length of each row; `lengths` gives the lengths of whole
        rows if `positions` are only a part of them.
        """
        if self.rope.scaling not in ("dynamic", "longrope"):
            lengths = [0]
        elif lengths is None:
            lengths = to_host(positions.amax(-1) + 1).tolist()
        rows = [self._frequencies(length, positions.device) for length in lengths]
        frequency, scale = torch.stack([row for row, _ in rows]).unsqueeze(1), rows[0][1]
        angles = positions.float().unsqueeze(-1) * frequency
        if positions.dim() == 3:
            angles = self._select_sections(angles)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        sin = -sin if self.rope.clockwise else sin
        return RotaryAngles(cos.unsqueeze(2).to(dtype), sin.unsqueeze(2).to(dtype), self.rope.interleaved)

    def _select_sections(self, angles: Tensor) -> Tensor:
        """Return the angles [B, S, pairs] of pairs that are rotated by time, row or column, from all three angles of each
        pair [3, B, S, pairs].
        """
        assert self.rope.sections is not None
        if not self.rope.sections_interleaved:
            parts = torch.split(angles, list(self.rope.sections), -1)
            return torch.cat([part[number] for number, part in enumerate(parts)], -1)
        out = angles[0].clone()
        for axis in (1, 2):
            pairs = slice(axis, 3 * self.rope.sections[axis], 3)
            out[..., pairs] = angles[axis, ..., pairs]
        return out

    def _frequencies(self, length: int, device: torch.device) -> tuple[Tensor, float]:
        if (length, device) not in self._cache:
            row, scale = rotary_frequencies(self.rope, self.size, self.max_position, length)
            self._cache[length, device] = row.to(device), scale
        return self._cache[length, device]


def query_scale_by_position(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the factor of each token's query by its position, [B or 1, S, 1, 1], or None without scalable softmax.
    The factor is 1 + b ln(1 + floor(position / original length)) (arXiv:2501.19399, in Llama 4's form), from int64
    `positions` [B or 1, S]; None without `rope.query_scaling`. With `no_rope_scaling` the first position is 1.
    """
    if config.no_rope_scaling is not None:
        scaling, length = config.no_rope_scaling
        positions = positions + 1
    elif config.rope.query_scaling is not None:
        assert config.rope.original_max_position is not None
        scaling, length = config.rope.query_scaling, config.rope.original_max_position
    else:
        return None
    steps = torch.div(positions, length, rounding_mode="floor")
    return (1 + scaling * torch.log1p(steps.float()))[..., None, None].to(dtype)


def rotary_frequencies(rope: RopeConfig, head_size: int, max_position: int, length: int) -> tuple[Tensor, float]:
    """Return the rotary angle per position of each pair of elements, fp32, and the factor on cos and sin.
    The factor is 1 except for YaRN and LongRoPE.

    Args:
        rope: kind and parameters of the embedding.
        head_size: width of a head, or of the part of it that may be rotated; `rope.fraction` of it is rotated.
        max_position: longest sequence that the model supports.
        length: length of the sequence, for `dynamic` and `longrope`.
    """
    if rope.scaling == "proportional":
        return _proportional_frequencies(rope, head_size), 1.0
    size = int(head_size * rope.fraction)
    exponent = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    base = 1.0 / rope.theta**exponent
    match rope.scaling:
        case "none":
            return base, 1.0
        case "linear":
            return base / rope.factor, 1.0
        case "dynamic":  # NTK-aware: the base grows once the sequence is longer than the original length
            original = rope.original_max_position or max_position
            grown = (rope.factor * max(length, original) / original) - (rope.factor - 1)
            return 1.0 / (rope.theta * grown ** (size / (size - 2))) ** exponent, 1.0
        case "llama3":
            return _scale_llama3(rope, base), 1.0
        case "yarn":
            return _scale_yarn(rope, base, size), _yarn_attention_factor(rope)
        case "longrope":
            return _scale_longrope(rope, base, max_position, length)


def _proportional_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Return frequencies of the first `rope.fraction` of a head's pairs, by the size of the whole head; others are zero."""
    rotated = int(rope.fraction * head_size // 2)
    exponent = torch.arange(0, 2 * rotated, 2, dtype=torch.int64).float() / head_size
    return torch.cat([1.0 / rope.theta**exponent, torch.zeros(head_size // 2 - rotated)]) / rope.factor


def _scale_llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Scale frequencies as Llama 3: divide low ones by the factor, keep high ones, interpolate in between."""
    original = float(rope.original_max_position or 0)
    wavelength = 2 * math.pi / base
    low, high = original / rope.low_freq_factor, original / rope.high_freq_factor
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > low, base / rope.factor, base)
    between = (wavelength <= low) & (wavelength >= high)
    return torch.where(between, blended, scaled)


def _scale_yarn(rope: RopeConfig, base: Tensor, size: int) -> Tensor:
    """Scale frequencies as YaRN (arXiv:2309.00071): interpolate low ones, extrapolate high ones, a ramp in between."""
    original = rope.original_max_position or 0

    def rotation_dimension(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = rotation_dimension(rope.beta_fast), rotation_dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = ((torch.arange(size // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale_factor(rope, rope.mscale) / yarn_mscale_factor(rope, rope.mscale_all_dim)
    return yarn_mscale_factor(rope, 1.0)


def yarn_mscale_factor(rope: RopeConfig, weight: float) -> float:
    """Return YaRN's factor 0.1 weight ln(rope.factor) + 1 on queries and keys, or 1 without context extension."""
    return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _scale_longrope(rope: RopeConfig, base: Tensor, max_position: int, length: int) -> tuple[Tensor, float]:
    """Scale frequencies as LongRoPE (arXiv:2402.13753): factors from the short list up to the original length, or long."""
    original = rope.original_max_position or max_position
    factors = rope.long_factor if length > original else rope.short_factor
    stretch = rope.factor if rope.factor > 1 else max_position / original
    natural = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return base / torch.tensor(factors), natural if rope.attention_factor is None else rope.attention_factor
