"""Memory counting on the meta device: live tensor counter, and storage-free stand-ins for kernels, dispatch, dropout
and groups.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mega_trainer.distributed.process_groups import ProcessGroupCache
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels import gemm_accumulation
from mega_trainer.kernels.attention_masks import AttentionMaskSpec
from mega_trainer.kernels.flash_attention import FlashAttentionCall
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, GemmOperand
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.kernels.nf4_quantizer import BLOCK, get_unpacked_4bit_shape
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.parallel.expert_parallel import AllToAllDispatcher


class MetaKernels(TorchKernels):
    """Kernels for memory prediction that compute nothing: they return empty tensors with the shapes of a GPU's kernels."""

    def grouped_linear(self, x: Tensor, weight: GemmOperand, rows: GroupedRows) -> Tensor:
        """Return an uninitialised output tensor of a grouped linear layer."""
        return x.new_empty(len(x), weight.shape[1])

    def grouped_dgrad(self, dy: Tensor, weight: GemmOperand, rows: GroupedRows) -> Tensor:
        """Return an uninitialised input gradient of a grouped linear layer."""
        return dy.new_empty(len(dy), weight.shape[2])

    def grouped_wgrad(
        self, dy: Tensor, x: Tensor, rows: GroupedRows, out: Tensor | None = None, *, add: bool = False
    ) -> Tensor:
        """Return an empty tensor in place of a grouped linear layer's weight gradient, for memory prediction."""
        sums = dy.new_empty(len(rows.ends), dy.shape[1], x.shape[1])
        return sums if out is None else gemm_accumulation.write_or_add_values(out, sums, add=add)


class MetaWeightQuantizer:
    """Weight quantizer for memory prediction that returns empty tensors of the packed shapes."""

    def pack_weight(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return uninitialised packed values and scales for a weight."""
        rows, width = values.shape[:-1], values.shape[-1]
        return (
            values.new_empty(*rows, width // 2, dtype=torch.uint8),
            values.new_empty(*rows, width // BLOCK, dtype=torch.float32),
        )

    def unpack_weight(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight without values, as a 4-bit matrix would be unpacked, for memory prediction."""
        return packed.new_empty(get_unpacked_4bit_shape(packed.shape), dtype=dtype)


class MetaFusedAttention:
    """Flash attention for memory prediction that accepts every mask and score and returns empty tensors."""

    def supports_call(self, q: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform) -> bool:
        """Return True: every attention call is supported."""
        return True

    def supports_uneven_heads(self, d: int, e: int) -> bool:
        """Return True: head sizes of keys and values may differ."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
        """Return an uninitialised attention output and log-sum-exp of the shapes that a real kernel returns."""
        *rows, queries, heads, _ = q.shape
        lse = q.new_empty(*rows, heads, queries, dtype=torch.promote_types(q.dtype, torch.float32))
        return q.new_empty(*rows, queries, heads, v.shape[-1]), lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, call: FlashAttentionCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return uninitialised gradients of q, k and v."""
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class BalancedAllToAll(AllToAllDispatcher):
    """All-to-all expert dispatcher for memory prediction that assumes an equal load and independent choices of experts."""

    def _rank_capacity(self, tokens: int, choices: int) -> int:
        """Return the rows of a rank under an even load."""
        passed = math.comb(self.num_experts - self.experts_per_rank, choices) / math.comb(self.num_experts, choices)
        return math.ceil(tokens * (1 - passed))


class MetaDropout(SeededDropout):
    """Dropout for memory prediction whose masks are empty tensors."""

    def _draw(self, x: Tensor, key: Sequence[int | str], shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return an empty mask, or `out` as it is."""
        return x.new_empty(tuple(shape), dtype=torch.float32) if out is None else out


class FakeProcessGroupCache(ProcessGroupCache):
    """Process group cache for planning that creates no process groups, so that no other ranks need to exist."""

    def get_process_group(self, ranks: Sequence[int]) -> None:
        """Return None: no process group is created for `ranks`."""


class MetaActivation(Function):
    """Autograd function for memory prediction that creates an activation of a given shape.
    The activation is freed with its last reference.
    """

    @staticmethod
    def forward(ctx: Any, seed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised activation of this shape."""
        return seed.new_empty(tuple(shape), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Return None for every input: there are no gradients."""
        return None, None, None


P = ParamSpec("P")
R = TypeVar("R")


class LiveTensorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch dispatch mode that counts the bytes of live tensor storages, and the peak.
    A storage counts from its creation until it is freed.

    Attributes:
        now, peak: current bytes, and peak bytes since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._quiet = False

    def reset_peak(self) -> None:
        """Reset the peak to the current bytes of live storages."""
        self.peak = self.now

    @property
    def storage_sizes(self) -> list[int]:
        """Bytes of each live tensor storage."""
        return [size for _, size in self._held.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = set(_collect_storages((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        if not self._quiet:
            self._add_storages(storage for key, storage in _collect_storages(out).items() if key not in known)
        return out

    def run_as_one_kernel(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function as if it were one fused kernel: only the storages of its outputs are counted."""
        self._quiet, known = True, set(_collect_storages((args, kwargs)))
        out = function(*args, **kwargs)
        self._quiet = False
        self._add_storages(storage for key, storage in _collect_storages(out).items() if key not in known)
        return out

    def _add_storages(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Add new storages to the count and update the peak."""
        for storage in storages:
            key, size = storage._cdata, storage.nbytes()
            if key not in self._held:
                self._held[key] = weakref.ref(storage, partial(self._remove_storage, key)), size
                self.now += size
        self.peak = max(self.peak, self.now)

    def _remove_storage(self, key: int, reference: Any) -> None:
        """Remove a freed storage from the count."""
        self.now -= self._held.pop(key)[1]


def _collect_storages(tree: object) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in a tree, by address."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in found}


class FusedFunctionMemoryCounter(FusibleFunctionCompiler):
    """Stand-in for the compiler of elementwise functions to predict memory: they keep only inputs and outputs."""

    def __init__(self, live: LiveTensorCounter) -> None:
        super().__init__()
        self.live = live

    def __call__(self, leaf: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a fusible function as one kernel and return its result, as `FusibleFunctionCompiler` requires."""
        return self.live.run_as_one_kernel(leaf, *args, **kwargs)
