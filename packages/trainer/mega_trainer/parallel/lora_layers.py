"""LoRA adapters of parallel layers (arXiv:2106.09685): Y += s (X A^T) B^T.

With magnitudes m (DoRA, arXiv:2402.09353) each output, without its bias, is multiplied by m / |W + s B A|, where the norm
is over the row and a constant in the backward (section 4.3 there).

U, between the two GEMMs, is narrow, so ranks exchange U; A and B are split like the adapted layer:

    column   X [B, S or S/T, D]   A [r, D] whole   U = X A^T, gathered over S under sequence parallelism   B [N/T, r]
    row      X [B, S, D/T]        A [r, D/T]       U = sum_T X A^T, to [B, S or S/T, r]                    B [N, r] whole

If one model serves several adapters, each batch row uses one of them or none (`PerRowAdapters`): the rows of an adapter are
computed together, after one GEMM of all rows with W.

Legend: B batch, S sequence, D input width, N output width, T tensor ranks, M rows of experts, G experts, r rank, R the sum
of the LoRA ranks of fused projections, which share one GEMM X A^T.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mega_ckpt.lora_tensors import AdaptedModule
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.parallel.parallel_linear import ParallelLinearFunction


@dataclass(frozen=True)
class LoraOutputColumns:
    """Columns of a linear layer's output that one LoRA adapter changes.
    They are [first, first + rows); the adapter adds an update of `rank`, times `scale`.
    """

    first: int
    rows: int
    rank: int
    scale: float


class LoraAdapterLayer(nn.Module):
    """LoRA adapters of the projections that one fused linear layer computes.

    Args:
        linear: linear function of both GEMMs.
        a: [R, D], or a part of its columns.
        b: [rows, r] of each adapter.
        updates: range of output columns of each adapter, in ascending order.
        meet: maps this rank's U to the input of B, by the collective of the layer's split.
        drop: dropout of the layer's input, with one mask for all fused projections.
        magnitudes: [rows] of each adapter, or none.
        sum_squares: sums partial row sums [rows] over the ranks that split the columns.
    """

    def __init__(
        self,
        linear: ParallelLinearFunction,
        a: nn.Parameter,
        b: Sequence[nn.Parameter],
        updates: Sequence[LoraOutputColumns],
        meet: Callable[[Tensor], Tensor],
        drop: Callable[[SeededDropout, Tensor], Tensor],
        magnitudes: Sequence[nn.Parameter],
        sum_squares: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.linear, self.updates, self.meet, self.drop = linear, tuple(updates), meet, drop
        self._ranks = [update.rank for update in updates]
        self.a, self.b, self.magnitudes = a, nn.ParameterList(b), nn.ParameterList(magnitudes)
        self.sum_squares = sum_squares

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        dropout: SeededDropout | None = None,
        factors: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return a linear layer's output with the updates of its LoRA adapters added.
        `y` is the output, computed from input `x` by `weight` and `bias`.

        `factors` are cached `compute_dora_factors` of this weight.
        """
        x = x if dropout is None else self.drop(dropout, x)
        narrow = torch.split(self.meet(self.linear(x, self.a)), self._ranks, -1)
        given = self.compute_dora_factors(weight) if factors is None else factors
        row_factors: Sequence[Tensor | None] = given or [None] * len(narrow)
        parts, done = [], 0
        for update, u, b, factor in zip(self.updates, narrow, self.b, row_factors, strict=True):
            end = update.first + update.rows
            own, delta = y[..., update.first : end], self.linear(u * update.scale, b)
            if factor is not None:
                plain = own if bias is None else own - bias[update.first : end]
                delta = (factor - 1).to(y.dtype) * plain + factor.to(y.dtype) * delta
            parts += [y[..., done : update.first], own + delta]
            done = end
        return torch.cat([*parts, y[..., done:]], -1)

    def compute_dora_factors(self, weight: Tensor) -> list[Tensor]:
        """Return DoRA's factor on the output rows of each adapter [rows], or [] if the adapters have no magnitudes.
        It is the magnitude m over the weight norm |W + s B A|, in at least fp32.

        Only m gets a gradient.
        """
        if not self.magnitudes:
            return []
        norms = []
        with torch.no_grad():
            for update, a, b in zip(self.updates, torch.split(self.a, self._ranks), self.b, strict=True):
                rows = upcast_to_fp32(weight[update.first : update.first + update.rows])
                squares = torch.addmm(rows, b.to(rows.dtype), a.to(rows.dtype), alpha=update.scale).square().sum(1)
                norms.append(self.sum_squares(squares).sqrt())
        return [m.to(norm.dtype) / norm for m, norm in zip(self.magnitudes, norms, strict=True)]


class ExpertLoraAdapter(nn.Module):
    """LoRA adapters of this rank's G experts: A [G, r, D] and B [G, N, r], or a slice of D or N.

    With a part of D, the update is a partial sum over the ranks that share the experts, like the layer's own output.
    """

    def __init__(self, linear: Callable[..., Tensor], a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.a, self.b = a, b

    def forward(self, x: Tensor, y: Tensor, rows: GroupedRows) -> Tensor:
        """Return an expert layer's output [M, N] with the updates of its LoRA adapters added.
        `y` is the output for rows x [M, D] sorted by expert.
        """
        return y + self.linear(self.linear(x, self.a, rows) * self.scale, self.b, rows)


class PerRowAdapterSelection:
    """LoRA adapter of each batch row of a forward pass: set before the pass, read by the layers.

    Attributes:
        names: names of all adapters that are loaded.
        rows: batch rows of each selected adapter, int64 indices.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows: Mapping[str, Tensor] = {}

    def add_adapter_name(self, name: str) -> None:
        """Add the name of an adapter that was loaded into the layers."""
        self.names = (*self.names, name)

    def remove_adapter_name(self, name: str) -> None:
        """Remove an adapter's name; batch rows that selected it use no adapter."""
        self.names = tuple(other for other in self.names if other != name)
        self.rows = {other: rows for other, rows in self.rows.items() if other != name}

    def select_adapters(self, chosen: Sequence[str | None], device: torch.device) -> None:
        """Set the adapter that each batch row of the next forward pass uses, by name; None for no adapter."""
        by_name: defaultdict[str, list[int]] = defaultdict(list)
        for row, name in enumerate(chosen):
            if name is not None:
                by_name[name].append(row)
        self.rows = {name: torch.tensor(rows, device=device) for name, rows in by_name.items()}


class PerRowAdapters(nn.Module):
    """Several LoRA adapters of one layer, chosen per batch row, for inference.
    An adapter that is not in `adapters` does not change this layer.

    The weights of adapters and of the layer must not change after the first pass, which caches the magnitude factors.
    """

    def __init__(self, selection: PerRowAdapterSelection, adapters: Mapping[str, LoraAdapterLayer]) -> None:
        super().__init__()
        self._factors: dict[str, list[Tensor]] = {}
        self.selection, self.names = selection, {name: index for index, name in enumerate(adapters)}
        self.adapters = nn.ModuleList(adapters.values())

    def find_adapter(self, name: str) -> LoraAdapterLayer | None:
        """Return this layer's LoRA adapter of a name, or None if that adapter does not change the layer."""
        index = self.names.get(name)
        if index is None:
            return None
        adapter = self.adapters[index]
        assert isinstance(adapter, LoraAdapterLayer)
        return adapter

    def add_adapter(self, name: str, adapter: LoraAdapterLayer) -> None:
        """Add a LoRA adapter to this layer under a name; only between two forward passes."""
        self.names[name] = len(self.adapters)
        self.adapters.append(adapter)

    def remove_adapter(self, name: str) -> None:
        """Remove the LoRA adapter of a name from this layer, if it has one; only between two forward passes."""
        if name not in self.names:
            return
        kept = {other: self.adapters[index] for other, index in self.names.items() if other != name}
        self.names, self.adapters = {other: index for index, other in enumerate(kept)}, nn.ModuleList(kept.values())
        self._factors.pop(name, None)

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, dropout: SeededDropout | None = None
    ) -> Tensor:
        """Return the layer's output with each batch row's LoRA update; rows without an adapter are unchanged."""
        assert dropout is None
        for name, rows in self.selection.rows.items():
            adapter = self.find_adapter(name)
            if adapter is not None:
                if name not in self._factors:
                    self._factors[name] = adapter.compute_dora_factors(weight)
                y = y.index_copy(0, rows, adapter(x[rows], y[rows], weight, bias, factors=self._factors[name]))
        return y


@dataclass(frozen=True)
class LoraAdapterPool:
    """Selection of a LoRA adapter for each batch row, and the projections that each adapter changes.
    `adapts` has these projections by adapter name.
    """

    selection: PerRowAdapterSelection
    adapts: Mapping[str, Mapping[str, AdaptedModule]]
