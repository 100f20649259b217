"""NF4 weights of QLoRA (arXiv:2305.14314), 4 bits each, packed and unpacked by bitsandbytes on CPU and GPU.

A weight is the nearest of sixteen quantiles of a normal distribution, times the largest absolute value of its block of 64
consecutive weights. Blocks are within rows, so that a rank's part of a matrix is packed like the whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_common.errors import ConfigError

BLOCK = 64


class WeightQuantizer(Protocol):
    """Interface of weight-only 4-bit quantisation for frozen weights (QLoRA)."""

    def pack_weight(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise a weight [.., D] to 4 bits, uint8 [.., D/2], and scales fp32 [.., D/64].
        D must be a multiple of `BLOCK`.
        """

    def unpack_weight(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [.., D] of a weight packed by `pack_weight`, in `dtype`."""


class Nf4Quantizer:
    """Weight quantizer to the 4-bit format NF4, by bitsandbytes.

    Raises:
        ConfigError: when bitsandbytes cannot be imported.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = import_module("bitsandbytes.functional")
        except ImportError as error:
            raise ConfigError(
                f"lora.quantize = nf4 requires bitsandbytes, which cannot be imported ({error})",
                hint="pip install 'packages/trainer[qlora]', or remove lora.quantize",
            ) from error

    def pack_weight(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise a weight to NF4, and return packed elements and block scales; fp64 is rounded to fp32 first."""
        flat = values.float() if values.dtype == torch.float64 else values
        packed, state = self._library.quantize_4bit(flat.contiguous(), blocksize=BLOCK, quant_type="nf4")
        rows = values.shape[:-1]
        return packed.view(*rows, -1), state.absmax.view(*rows, -1)

    def unpack_weight(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of an NF4 weight; fp64 results are exact to fp32 only."""
        state = self._library.QuantState(
            absmax=scales.view(-1),
            shape=torch.Size(get_unpacked_4bit_shape(packed.shape)),
            dtype=torch.float32 if dtype == torch.float64 else dtype,
            blocksize=BLOCK,
            quant_type="nf4",
        )
        values: Tensor = self._library.dequantize_4bit(packed.view(-1, 1), state)
        return values.to(dtype)


def get_unpacked_4bit_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the values of a 4-bit packed tensor of `shape`: the last axis is twice as long."""
    return *shape[:-1], 2 * shape[-1]
