"""Quantization of the weights of linear layers for HuggingFace folders, the inverse of `quantized_weights`.

A weight W [O, I] becomes codes q, and a scale s for each block of codes, so that W is about q * s, or (q - z) * s with a zero
point z for each block. Scales have the dtype of the weight. Rows are encoded independently, a few at a time. Codes are rounded
to the nearest, or by `calibrated_rounding` where the second moments of the layer's inputs are given.

    fp8         W.weight e4m3, W.weight_scale [O, 1]; servers also quantize activations to fp8, a scale for each token
    fp8-block   W.weight e4m3, W.weight_scale [O / 128, I / 128]; activations with a scale for 128 channels of a token
    int8        W.weight_packed: four codes in an int32, W.weight_scale [O, 1], W.weight_shape
    int4        W.weight_packed: eight codes in an int32, W.weight_scale [O, I / 32], W.weight_shape
    int4-asym   the same, and W.weight_zero_point: those of eight rows in an int32 [O / 8, I / 32]
    mxfp4       W.weight_packed: two e2m1 in a byte, W.weight_scale [O, I / 32]: exponent of a power of two, plus 127

These are compressed-tensors' float-quantized, pack-quantized and mxfp4-pack-quantized. MLX stores W = q * s + b for groups of
64, with unsigned q packed in uint32 (W.weight), and s and b [O, I / 64] (W.scales, W.biases).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats.calibrated_rounding import InputSecondMoments
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError

EncodedParts = dict[str, Tensor]  # tensors of some rows of a weight, by the ends of their names
PartLayouts = dict[str, tuple[torch.dtype, TensorShape]]

_E4M3, _E4M3_MAX = torch.float8_e4m3fn, 448.0
_FP8_BLOCK, _MX_BLOCK, _MLX_GROUP, _INT4_GROUP = 128, 32, 64, 32
_E2M1_MAX = 6.0
_E2M1_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between the numbers that e2m1 has
_EXTENTS = torch.linspace(1.1, 0.6, 11).tolist()  # shares of the extent of four-bit codes that are tried, 1 included
SHAPE = "weight_shape"  # part that no row determines


@dataclass(frozen=True)
class LinearQuantizer:
    """Quantization of the weights of linear layers.

    Attributes:
        description: codes and scales, for logs and model cards.
        rows: number of consecutive rows that share scales, or words of zero points.
        layouts: returns dtype and shape of each part of a weight, from its shape and dtype.
        encode: returns the parts of some rows [R, I] in fp32, except `weight_shape`; the second argument is the dtype of
            the scales, the third the moments of the layer's inputs, or None to round to the nearest.
        settings: returns the keys to add to config.json, from the names of the linear layers that are not quantized.
    """

    description: str
    rows: int
    layouts: Callable[[TensorShape, torch.dtype], PartLayouts]
    encode: Callable[[Tensor, torch.dtype, InputSecondMoments | None], EncodedParts]
    settings: Callable[[list[str]], dict[str, Any]]


def make_quantizer(name: str, shapes: Mapping[str, TensorShape]) -> LinearQuantizer:
    """Return the quantization called `name` for the linear layers with these weights, {name: [O, I]}.

    Raises:
        CheckpointError: when a width is not divisible by a block, naming the weight.
    """
    if name == "fp8":
        return _fp8((1, 0))
    if name == "fp8-block":
        _check_widths(shapes, _FP8_BLOCK, name, "use --quantize fp8")
        return _fp8((_FP8_BLOCK, _FP8_BLOCK))
    if name == "int8":
        return _packed_integers(8, None)
    if name in ("int4", "int4-asym"):
        _check_widths(shapes, _INT4_GROUP, name)
        return _packed_integers(4, _INT4_GROUP, symmetric=name == "int4")
    if name == "mxfp4":
        _check_widths(shapes, _MX_BLOCK, name)
        return _mxfp4()
    _check_widths(shapes, _MLX_GROUP, name.removeprefix("mlx-"), "leave out --quantize")
    return _mlx_integers(int(name.removeprefix("mlx-int")))


def _check_widths(shapes: Mapping[str, TensorShape], block: int, name: str, hint: str = "use --quantize int8") -> None:
    for weight, (_, width) in shapes.items():
        if width % block:
            raise CheckpointError(
                f"{weight} has {width} columns, but --quantize {name} requires a multiple of {block}", hint=hint
            )


def _compressed_settings(
    form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None, ignored: list[str]
) -> dict[str, Any]:
    """Return compressed-tensors' section of config.json."""
    common: dict[str, Any] = {
        "symmetric": True,
        "block_structure": None,
        "group_size": None,
        "actorder": None,
        "observer_kwargs": {},
    }
    arguments = [
        entry and {**common, "dynamic": dynamic, "observer": None if dynamic else "minmax", **entry}
        for entry, dynamic in ((weights, False), (activations, True))
    ]
    group = {
        "targets": ["Linear"], "weights": arguments[0], "input_activations": arguments[1], "output_activations": None,
        "format": form,
    }  # fmt: skip
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignored, "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
    }  # fmt: skip


def _fp8(block: tuple[int, int]) -> LinearQuantizer:
    """Return the quantization to e4m3 with a scale per block [height, width]; a width of 0 is the whole row."""
    height, blocks = block[0], block[1] > 0

    def grid(shape: TensorShape) -> TensorShape:
        return (math.ceil(shape[0] / height), math.ceil(shape[1] / block[1]) if blocks else 1)

    def layouts(shape: TensorShape, dtype: torch.dtype) -> PartLayouts:
        return {"weight": (_E4M3, shape), "weight_scale": (dtype, grid(shape))}

    def encode(rows: Tensor, dtype: torch.dtype, moments: InputSecondMoments | None) -> EncodedParts:
        (down, across), width = grid(tuple(rows.shape)), block[1] if blocks else rows.shape[1]
        padded = torch.nn.functional.pad(rows, (0, across * width - rows.shape[1], 0, down * height - rows.shape[0]))
        scale = _make_scales(padded.view(down, height, across, width).abs().amax((1, 3)) / _E4M3_MAX, dtype)
        scales = scale.float().repeat_interleave(height, 0).repeat_interleave(width, 1)[: len(rows), : rows.shape[1]]
        if moments is not None:
            rows = moments.compensate_rounding_error(
                rows, scales, lambda weights, scale: _e4m3_codes(weights, scale).float() * scale
            )
        return {"weight": _e4m3_codes(rows, scales), "weight_scale": scale}

    strategy = {"strategy": "block", "block_structure": list(block)} if blocks else {"strategy": "channel"}
    per_token = {"strategy": "group", "group_size": _FP8_BLOCK} if blocks else {"strategy": "token"}
    kind = {"type": "float", "num_bits": 8}
    return LinearQuantizer(
        f"fp8 (e4m3), a scale for {f'{height} x {block[1]} weights' if blocks else 'each row'}", height, layouts, encode,
        partial(_compressed_settings, "float-quantized", kind | strategy, kind | per_token),
    )  # fmt: skip


def _e4m3_codes(weights: Tensor, scales: Tensor) -> Tensor:
    return (weights / scales).clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3)


def _packed_integers(bits: int, group: int | None, *, symmetric: bool = True) -> LinearQuantizer:
    """Return the quantization to integers with a scale for `group` weights of a row, or for the whole row.
    Unless it is `symmetric`, groups also have zero points.
    """
    each = 32 // bits

    def layouts(shape: TensorShape, dtype: torch.dtype) -> PartLayouts:
        scales = 1 if group is None else shape[1] // group
        zeros = {} if symmetric else {"weight_zero_point": (torch.int32, (math.ceil(shape[0] / each), scales))}
        return {
            "weight_packed": (torch.int32, (shape[0], math.ceil(shape[1] / each))),
            "weight_scale": (dtype, (shape[0], scales)), **zeros, SHAPE: (torch.int64, (2,)),
        }  # fmt: skip

    def encode(rows: Tensor, dtype: torch.dtype, moments: InputSecondMoments | None) -> EncodedParts:
        groups = rows.reshape(len(rows), -1, group or rows.shape[1])
        if group is None:
            scale = _make_scales(groups.abs().amax(-1, keepdim=True) * (2 / ((1 << bits) - 1)), dtype)
            zero = torch.full_like(scale, 1 << bits - 1, dtype=torch.float32)
        else:
            importance = torch.ones(rows.shape[1]) if moments is None else moments.importance
            scale, zero = _search_scales(groups, bits, dtype, importance.view(groups.shape[1:]), symmetric=symmetric)
        codes = _find_codes(rows, groups, scale, -zero * scale, bits, moments)
        parts = {"weight_packed": _pack_words(codes, bits, torch.int32), "weight_scale": scale.squeeze(-1)}
        if not symmetric:
            parts["weight_zero_point"] = _pack_words(zero.squeeze(-1).T, bits, torch.int32).T.contiguous()
        return parts

    kind = {
        "type": "int", "num_bits": bits, "strategy": "channel" if group is None else "group", "group_size": group,
        "symmetric": symmetric,
    }  # fmt: skip
    covered = "each row" if group is None else f"{group} weights of a row"
    return LinearQuantizer(
        f"int{bits}, a scale {'' if symmetric else 'and a zero point '}for {covered}", 1 if symmetric else each, layouts, encode,
        partial(_compressed_settings, "pack-quantized", kind, None),
    )  # fmt: skip


def _search_scales(
    groups: Tensor, bits: int, dtype: torch.dtype, importance: Tensor, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [R, G, 1] of groups [R, G, N], by the smallest and the largest weight and zero.
    Scales have the smallest squared error among some that clip these weights more or less; the errors of columns are
    weighted by `importance` [G, N]. A `symmetric` zero point is the middle of the codes.
    """
    low, high, top = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), (1 << bits) - 1
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    extent = (high.clamp_min(0) - low.clamp_max(0)).clamp_min(torch.finfo(torch.float32).tiny)
    zero = torch.full_like(extent, 1 << bits - 1) if symmetric else (low.clamp_max(0) / extent * -top).round()
    best = _make_scales(extent / top, dtype)
    least = torch.full_like(best, math.inf, dtype=torch.float32)
    for factor in _EXTENTS:
        scale = _make_scales(extent * (factor / top), dtype)
        error = (_affine_values(groups, torch.stack((scale.float(), -zero * scale)), bits) - groups).square()
        error = (error * importance).sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best, zero


def _find_codes(
    rows: Tensor, groups: Tensor, scale: Tensor, offset: Tensor, bits: int, moments: InputSecondMoments | None
) -> Tensor:
    """Return unsigned codes q (int32) of weights [R, I], of about q * scale + offset.

    Args:
        groups: the weights by their groups [R, G, N].
        scale: scale of each group [R, G, 1].
        offset: offset of each group [R, G, 1].
    """
    affine = torch.stack([part.float().expand(groups.shape).flatten(1) for part in (scale, offset)])
    if moments is not None:
        rows = moments.compensate_rounding_error(rows, affine, partial(_affine_values, bits=bits))
    return _affine_codes(rows, affine, bits).int()


def _affine_codes(weights: Tensor, affine: Tensor, bits: int) -> Tensor:
    """Return the nearest codes of weights; `affine` has their scales and their offsets."""
    return ((weights - affine[1]) / affine[0]).round().clamp(0, (1 << bits) - 1)


def _affine_values(weights: Tensor, affine: Tensor, bits: int) -> Tensor:
    return _affine_codes(weights, affine, bits) * affine[0] + affine[1]


def _make_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in `dtype`, positive also for blocks of zeros."""
    return scale.to(dtype).clamp_min(torch.finfo(dtype).tiny)


def _pack_words(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return words of 32 bits [R, I * bits / 32] from unsigned codes [R, I], the first code in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).long().reshape(len(codes), -1, each)
    words = (padded << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(dtype)


def _mxfp4() -> LinearQuantizer:
    def layouts(shape: TensorShape, dtype: torch.dtype) -> PartLayouts:
        packed, scales = (shape[0], shape[1] // 2), (shape[0], shape[1] // _MX_BLOCK)
        return {"weight_packed": (torch.uint8, packed), "weight_scale": (torch.uint8, scales)}

    def encode(rows: Tensor, dtype: torch.dtype, moments: InputSecondMoments | None) -> EncodedParts:
        groups = rows.reshape(len(rows), -1, _MX_BLOCK)
        largest = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        exponent = largest.log2().floor() - 2  # the largest weight is 4 to 8, of which e2m1 has 4 and 6
        errors = [
            (_e2m1_values(groups, power) - groups).square().sum(-1, keepdim=True) for power in (exponent, exponent + 1)
        ]
        exponent = torch.where(errors[0] <= errors[1], exponent, exponent + 1).clamp(-127, 127)
        exponents = exponent.expand(groups.shape).flatten(1)
        if moments is not None:
            rows = moments.compensate_rounding_error(rows, exponents, _e2m1_values)
        codes = _e2m1_codes(rows, exponents)
        return {
            "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": (exponent + 127).to(torch.uint8).squeeze(-1),
        }

    kind = {
        "type": "float", "num_bits": 4, "strategy": "group", "group_size": _MX_BLOCK, "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }  # fmt: skip
    return LinearQuantizer(
        "mxfp4 (e2m1), a power of two for 32 weights of a row", 1, layouts, encode,
        partial(_compressed_settings, "mxfp4-pack-quantized", kind, None),
    )  # fmt: skip


def _e2m1_codes(weights: Tensor, exponent: Tensor) -> Tensor:
    """Return four-bit codes (uint8) of the nearest e2m1 numbers: three bits of magnitude, and the sign above."""
    scaled = weights * torch.exp2(-exponent)
    return (torch.bucketize(scaled.abs(), _E2M1_BOUNDS) + 8 * (scaled < 0)).to(torch.uint8)


def _e2m1_values(weights: Tensor, exponent: Tensor) -> Tensor:
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, _E2M1_MAX])
    codes = _e2m1_codes(weights, exponent).int()
    return magnitude[codes & 7] * (1 - 2 * (codes >> 3)) * exponent.exp2()


def _mlx_integers(bits: int) -> LinearQuantizer:
    def layouts(shape: TensorShape, dtype: torch.dtype) -> PartLayouts:
        grid = (shape[0], shape[1] // _MLX_GROUP)
        return {
            "weight": (torch.uint32, (shape[0], shape[1] * bits // 32)), "scales": (dtype, grid), "biases": (dtype, grid)
        }  # fmt: skip

    def encode(rows: Tensor, dtype: torch.dtype, moments: InputSecondMoments | None) -> EncodedParts:
        groups = rows.reshape(len(rows), -1, _MLX_GROUP)
        bias = groups.amin(-1, keepdim=True).to(dtype)
        extent = groups.amax(-1, keepdim=True) - bias.float()
        scale = _make_scales(extent / ((1 << bits) - 1), dtype)
        codes = _find_codes(rows, groups, scale, bias, bits, moments)
        return {
            "weight": _pack_words(codes, bits, torch.uint32), "scales": scale.squeeze(-1), "biases": bias.squeeze(-1)
        }  # fmt: skip

    def settings(_: list[str]) -> dict[str, Any]:
        section = {"group_size": _MLX_GROUP, "bits": bits, "mode": "affine"}
        return {"quantization": section, "quantization_config": section}

    return LinearQuantizer(
        f"int{bits}, a scale and an offset for {_MLX_GROUP} weights of a row", 1, layouts, encode, settings
    )
