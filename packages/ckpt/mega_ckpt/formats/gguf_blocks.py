"""Encoding of tensors in GGUF types: those of the package `gguf`, and Q4_K, which it only decodes.

A block of Q4_K has 256 weights of a row in eight groups of 32, W = d * s * q - m * n: scales s and offsets n of six bits for
each group, d and m in fp16 for the block, codes q of four bits.

    fp16 d, fp16 m, 12 bytes of s and n, 128 bytes of q: 32 bytes hold two groups, the first in the low bits
    byte i < 4: s[i], and above it two bits of s[i + 4]; byte i + 4: n likewise; byte i + 8: four bits of s[i + 4], n[i + 4]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_CHUNK = 1 << 18  # elements that are encoded at once
_GROUPS, _GROUP = 8, 32
_STEPS = 21  # scales that are tried for a group
_TINY = 1e-30  # below every scale


def choose_gguf_type(quantize: str, name: str, shape: TensorShape) -> GGMLQuantizationType:
    """Return the type of the tensor `name` in a file that is quantized to `quantize`, as llama.cpp chooses it.

    Vectors and routers keep fp32. In files of four bits, embedding and output layer have eight. Rows that 256 does not
    divide are Q5_0 instead of Q4_K, and rows that 32 does not divide are F16.
    """
    from gguf import GGMLQuantizationType as Kind

    if len(shape) == 1 or "ffn_gate_inp" in name:
        return Kind.F32
    if quantize == "f16" or shape[-1] % _GROUP:
        return Kind.F16
    if quantize == "q8_0" or name in ("token_embd.weight", "output.weight"):
        return Kind.Q8_0
    if quantize == "q4_0":
        return Kind.Q4_0
    return Kind.Q5_0 if shape[-1] % (_GROUPS * _GROUP) else Kind.Q4_K


def encode_tensor_as_gguf(name: str, tensor: Tensor, kind: GGMLQuantizationType) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the bytes of a tensor in a GGUF type, a few rows at a time.

    Raises:
        CheckpointError: when a weight is not finite in the type.
    """
    from gguf import GGMLQuantizationType, quantize

    rows = tensor.reshape(-1, tensor.shape[-1])
    step = max(1, _CHUNK // rows.shape[1])
    for begin in range(0, len(rows), step):
        block = rows[begin : begin + step].float()
        if not block.isfinite().all() or (kind.name == "F16" and block.abs().max() > torch.finfo(torch.float16).max):
            raise CheckpointError(
                f"{name} has weights that {kind.name} cannot represent (infinite, NaN or above 65,504)",
                hint="check the source with mega ckpt verify --finite, or choose another --quantize",
            )
        if kind == GGMLQuantizationType.Q4_K:
            yield _encode_q4_k(block)
        else:
            yield quantize(block.numpy(), kind).view(np.uint8)


def _encode_q4_k(rows: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes [R, I / 256 * 144] of rows [R, I]."""
    groups = rows.reshape(-1, _GROUPS, _GROUP)
    scales, offsets = _fit_groups(groups)
    d, s = _round_to_six_bits(scales)
    m, n = _round_to_six_bits(offsets)
    step, offset = (d.float() * s).unsqueeze(-1), (m.float() * n).unsqueeze(-1)
    codes = ((groups + offset) / step.clamp_min(_TINY)).round().clamp(0, 15).to(torch.uint8)
    codes = torch.where(step > 0, codes, 0).view(-1, _GROUPS // 2, 2, _GROUP)
    s, n = s.to(torch.uint8), n.to(torch.uint8)
    packed = torch.cat(
        [
            d.view(torch.uint8), m.view(torch.uint8), s[:, :4] | s[:, 4:] >> 4 << 6, n[:, :4] | n[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | (n[:, 4:] & 15) << 4, (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1),
        ],
        dim=1,
    )  # fmt: skip
    return packed.view(len(rows), -1).numpy()


def _round_to_six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp16 units [N, 1] and integers [N, 8] up to 63, of which values [N, 8] are about the products."""
    unit = (values.amax(-1, keepdim=True) / 63).half()
    return unit, (values / unit.float().clamp_min(_TINY)).round().clamp(0, 63)


def _fit_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets, both [N, 8] and not negative, of groups [N, 8, 32] with a small squared error.

    For codes of several first scales, the best scale and offset follow by least squares, in which large weights count
    more: a weight's share is its size plus the root mean square of its group.
    """
    least = groups.amin(-1, keepdim=True).clamp_max(0)
    width = (groups.amax(-1, keepdim=True) - least).clamp_min(_TINY)
    share = groups.abs() + groups.square().mean(-1, keepdim=True).sqrt()
    total, first = share.sum(-1), (share * groups).sum(-1)
    best_scale, best_offset = width.squeeze(-1) / 15, -least.squeeze(-1)
    codes = ((groups - least) * (15 / width)).round().clamp(0, 15)
    best = _weighted_error(groups, share, codes, best_scale, best_offset)
    for top in torch.linspace(14, 16, _STEPS).tolist():
        codes = ((groups - least) * (top / width)).round().clamp(0, 15)
        by_code, square = (share * codes).sum(-1), (share * codes.square()).sum(-1)
        product = (share * codes * groups).sum(-1)
        determinant = (total * square - by_code.square()).clamp_min(_TINY)
        scale = (total * product - first * by_code) / determinant
        offset = (by_code * product - square * first) / determinant
        alone = product / square.clamp_min(_TINY)
        scale, offset = torch.where(offset < 0, alone, scale).clamp_min(0), offset.clamp_min(0)
        error = _weighted_error(groups, share, codes, scale, offset)
        better = error < best
        best = torch.where(better, error, best)
        best_scale, best_offset = (
            torch.where(better, new, old) for new, old in ((scale, best_scale), (offset, best_offset))
        )
    return best_scale, best_offset


def _weighted_error(groups: Tensor, share: Tensor, codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return (share * (scale.unsqueeze(-1) * codes - offset.unsqueeze(-1) - groups).square()).sum(-1)
