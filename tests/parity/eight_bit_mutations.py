"""Bugs of products in eight bits, for `mutations`: name, a layout in which it shows, the patch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from parity.eight_bits import case

from mega_trainer.kernels import fp8_kernels
from mega_trainer.kernels.fp8_kernels import E4M3, E5M2, Fp8Kernels, Fp8Matrix, Fp8MatrixWithTranspose
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.parameter_info import GemmOperandCache
from mega_trainer.verify.layout_case import LayoutCase

Patch = Callable[[], AbstractContextManager[Any]]
swap = mock.patch.object

TP = case("mxfp8", 2, {"tp": 2})
DP = case("mxfp8", 2, {"zero": 1})
PP = case("mxfp8", 2, {"pp": 2}, fp8={"recipe": "mxfp8", "bf16_first": 1})


def _scales(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """The second factor's scales are others."""
    real = fp8_kernels.scaled_gemm

    def product(a: Fp8Matrix, b: Fp8Matrix, *args: Any, **options: Any) -> torch.Tensor:
        return real(a, b._replace(scale=wrong(b.scale)), *args, **options)

    return lambda: swap(fp8_kernels, "scaled_gemm", product)


def _formats_swapped() -> AbstractContextManager[Any]:
    real, other = fp8_kernels.fusible_quantize, {E4M3: E5M2, E5M2: E4M3}
    return swap(fp8_kernels, "fusible_quantize", lambda x, rows, columns, dtype: real(x, rows, columns, other[dtype]))


def _weight_by_its_rows() -> AbstractContextManager[Any]:
    """A weight's scales for dX are laid out as those for Y."""
    real = Fp8Kernels.prepare_weight

    def prepare(self: Fp8Kernels, weight: torch.Tensor) -> Fp8MatrixWithTranspose:
        plain, turned = real(self, weight)
        return Fp8MatrixWithTranspose(plain, turned._replace(scale=turned.scale.t().reshape(turned.scale.shape)))

    return swap(Fp8Kernels, "prepare_weight", prepare)


def _weights_never_new() -> AbstractContextManager[Any]:
    """What was made of a weight is used after the update, too."""
    return swap(GemmOperandCache, "invalidate", lambda self: None)


def _layers_counted_in_the_stage() -> AbstractContextManager[Any]:
    """The first layers of every stage are left in bf16."""
    real = LayerBuilder.builder_for_layer
    return swap(LayerBuilder, "builder_for_layer", lambda self, _: real(self, 0))


EIGHT_BITS: list[tuple[str, LayoutCase, Patch]] = [
    ("fp8: scales left out", TP, _scales(torch.ones_like)),
    ("fp8: scales of other rows", DP, _scales(lambda scale: scale.roll(1, 0))),
    ("fp8: scales of a weight along the wrong axis", TP, _weight_by_its_rows),
    ("fp8: e4m3 and e5m2 swapped", DP, _formats_swapped),
    ("fp8: weights of the step before", replace(DP, steps=2), _weights_never_new),
    ("fp8: layers left in bf16 counted in the stage", PP, _layers_counted_in_the_stage),
]
