"""Stand-ins for what a model computes with, of the same shapes and with nothing in them: kernels, exchanges, masks, groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mega_trainer.kernels import products
from mega_trainer.kernels.base import Factor, Scores
from mega_trainer.kernels.flash import Call
from mega_trainer.kernels.grouped import Rows
from mega_trainer.kernels.masks import Mask
from mega_trainer.kernels.nf4 import BLOCK, unpacked
from mega_trainer.kernels.torch import TorchKernels
from mega_trainer.mesh import GroupMaker
from mega_trainer.parallel.expert import AllToAll
from mega_trainer.rng import Dropout


class HollowKernels(TorchKernels):
    """What a GPU's kernels return, with nothing in it."""

    def grouped_linear(self, x: Tensor, weight: Factor, rows: Rows) -> Tensor:
        """See `Kernels.grouped_linear`."""
        return x.new_empty(len(x), weight.shape[1])

    def grouped_dx(self, dy: Tensor, weight: Factor, rows: Rows) -> Tensor:
        """See `Kernels.grouped_dx`."""
        return dy.new_empty(len(dy), weight.shape[2])

    def grouped_dw(self, dy: Tensor, x: Tensor, rows: Rows, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """See `Kernels.grouped_dw`."""
        sums = dy.new_empty(len(rows.ends), dy.shape[1], x.shape[1])
        return sums if out is None else products.put(out, sums, add=add)


class HollowPacking:
    """A `Packing` with nothing in it."""

    def pack(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Packing.pack`."""
        rows, width = values.shape[:-1], values.shape[-1]
        return (
            values.new_empty(*rows, width // 2, dtype=torch.uint8),
            values.new_empty(*rows, width // BLOCK, dtype=torch.float32),
        )

    def unpack(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Packing.unpack`."""
        return packed.new_empty(unpacked(packed.shape), dtype=dtype)


class FusedAttention:
    """A `Flash` that takes everything, as there is one for every kind of scores on a GPU."""

    def takes(self, q: Tensor, v: Tensor, mask: Mask, how: Scores) -> bool:
        """See `Flash.takes`."""
        return True

    def uneven(self, d: int, e: int) -> bool:
        """See `Flash.uneven`."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """See `Flash.forward`."""
        *rows, queries, heads, _ = q.shape
        lse = q.new_empty(*rows, heads, queries, dtype=torch.promote_types(q.dtype, torch.float32))
        return q.new_empty(*rows, queries, heads, v.shape[-1]), lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Flash.backward`."""
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class EvenAllToAll(AllToAll):
    """Every expert gets as many tokens, and no choice has to do with another."""

    def _capacity(self, tokens: int, choices: int) -> int:
        passed = math.comb(self.num_experts - self.own, choices) / math.comb(self.num_experts, choices)
        return math.ceil(tokens * (1 - passed))


class UndrawnDropout(Dropout):
    """Masks that hold nothing."""

    def _draw(self, x: Tensor, key: Sequence[int | str], shape: Sequence[int]) -> Tensor:
        return x.new_empty(tuple(shape), dtype=torch.float32)


class Nobody(GroupMaker):
    """Makes groups in which nobody is there."""

    def handle(self, ranks: Sequence[int]) -> None:
        """No process group."""


class Source(Function):
    """A tensor that an operation has made, not a parameter: nothing keeps it but who needs it."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of that shape."""
        return seed.new_empty(tuple(shape), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Nothing goes on from here."""
        return None, None, None
