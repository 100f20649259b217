"""NF4 weights of QLoRA (arXiv:2305.14314), 4 bits each: bitsandbytes packs and unpacks them, on a CPU as on a GPU.

A number is the nearest of sixteen quantiles of a normal distribution, times the largest absolute value of its block of 64
neighbours. Blocks lie within rows, so that a rank's part of a matrix is packed as it is in the whole.
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
    """Interface of weight-only quantisation."""

    def pack_weight(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Pack [.., D], D a multiple of `BLOCK`, into uint8 [.., D/2] and scales fp32 [.., D/64]."""

    def unpack_weight(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [.., D] of a packed weight."""


class Nf4Quantizer:
    """`WeightQuantizer` by bitsandbytes.

    Raises:
        ConfigError: when that is not installed.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = import_module("bitsandbytes.functional")
        except ImportError as error:
            raise ConfigError(
                f"lora.quantize = nf4: bitsandbytes, which packs the weights, cannot be imported ({error})",
                hint="pip install 'packages/trainer[qlora]', or leave lora.quantize out",
            ) from error

    def pack_weight(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Pack a weight, see `WeightQuantizer.pack_weight`; fp64 is rounded to fp32 before."""
        flat = values.float() if values.dtype == torch.float64 else values
        packed, state = self._library.quantize_4bit(flat.contiguous(), blocksize=BLOCK, quant_type="nf4")
        rows = values.shape[:-1]
        return packed.view(*rows, -1), state.absmax.view(*rows, -1)

    def unpack_weight(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack a weight, see `WeightQuantizer.unpack_weight`; fp64 has the values of fp32."""
        state = self._library.QuantState(
            absmax=scales.view(-1),
            shape=torch.Size(unpacked_shape(packed.shape)),
            dtype=torch.float32 if dtype == torch.float64 else dtype,
            blocksize=BLOCK,
            quant_type="nf4",
        )
        values: Tensor = self._library.dequantize_4bit(packed.view(-1, 1), state)
        return values.to(dtype)


def unpacked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the values that are packed in `shape`."""
    return *shape[:-1], 2 * shape[-1]
