"""Adapters of low rank beside parallel layers (LoRA, arXiv:2106.09685): Y += s (X A^T) B^T.

With magnitudes m (DoRA, arXiv:2402.09353) each output of that, its bias left out, is multiplied by m / |W + s B A|, the length
of its row, which counts as a constant in the backward (section 4.3 there).

What lies between the two products is narrow, so that is what ranks exchange; A and B are split as the layer beside them is:

    column   X [B, S or S/T, D]   A [r, D] whole   U = X A^T, gathered over S under sequence parallelism   B [N/T, r]
    row      X [B, S, D/T]        A [r, D/T]       U = sum_T X A^T, to [B, S or S/T, r]                    B [N, r] whole

Where one model serves several adapters, each batch row has one of them or none (`Selected`): those of an adapter are computed
together, beside one product of all rows with W.

Legend: B batch, S sequence, D input width, N output width, T tensor ranks, M rows of experts, G experts, r rank, R the sum
of the ranks of projections side by side, which share one product X A^T.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mega_trainer.kernels.grouped import Rows
from mega_trainer.parallel.linear import Linear
from mega_trainer.rng import Dropout


@dataclass(frozen=True)
class Update:
    """What an adapter adds to: columns [first, first + rows) of a layer's output, by an adapter of `rank`, times `scale`."""

    first: int
    rows: int
    rank: int
    scale: float


class Adapter(nn.Module):
    """The adapters of projections that one product makes.

    Args:
        linear: for both products.
        a: [R, D], or a part of its columns.
        b: of each adapter [rows, r].
        updates: what each adds to, in the order of a layer's columns.
        meet: makes of this rank's U what its B are to be multiplied with.
        drop: drops elements of the layer's input, one mask for all projections side by side.
        magnitudes: of each adapter [rows], or none.
        sum_squares: makes whole sums over a row [rows] of what this rank's columns give.
    """

    def __init__(
        self,
        linear: Linear,
        a: nn.Parameter,
        b: Sequence[nn.Parameter],
        updates: Sequence[Update],
        meet: Callable[[Tensor], Tensor],
        drop: Callable[[Dropout, Tensor], Tensor],
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
        dropout: Dropout | None = None,
        factors: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The layer's input and its output, made by `weight` and `bias`: the latter with the updates added.

        `factors` are those of this weight where the caller has them, from `self.factors`.
        """
        x = x if dropout is None else self.drop(dropout, x)
        narrow = torch.split(self.meet(self.linear(x, self.a)), self._ranks, -1)
        found: Sequence[Tensor | None] = (self.factors(weight) if factors is None else factors) or [None] * len(narrow)
        parts, done = [], 0
        for update, u, b, factor in zip(self.updates, narrow, self.b, found, strict=True):
            end = update.first + update.rows
            own, more = y[..., update.first : end], self.linear(u * update.scale, b)
            if factor is not None:
                plain = own if bias is None else own - bias[update.first : end]
                more = (factor - 1).to(y.dtype) * plain + factor.to(y.dtype) * more
            parts += [y[..., done : update.first], own + more]
            done = end
        return torch.cat([*parts, y[..., done:]], -1)

    def factors(self, weight: Tensor) -> list[Tensor]:
        """m / |W + s B A| of each adapter [rows], in at least fp32; the gradient goes to m alone. None without magnitudes."""
        if not self.magnitudes:
            return []
        wide, out = torch.promote_types(weight.dtype, torch.float32), []
        with torch.no_grad():
            for update, a, b in zip(self.updates, torch.split(self.a, self._ranks), self.b, strict=True):
                held = weight[update.first : update.first + update.rows].to(wide)
                squares = torch.addmm(held, b.to(wide), a.to(wide), alpha=update.scale).square().sum(1)
                out.append(self.sum_squares(squares).sqrt())
        return [m.to(wide) / length for m, length in zip(self.magnitudes, out, strict=True)]


class ExpertAdapter(nn.Module):
    """An adapter for each of this rank's experts: A [G, r, D] and B [G, N, r], or a part of D or N.

    A part of D makes a part of the sum over the ranks that share the experts, as the layer's own output is.
    """

    def __init__(self, linear: Callable[..., Tensor], a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.a, self.b = a, b

    def forward(self, x: Tensor, y: Tensor, rows: Rows) -> Tensor:
        """Rows sorted by expert [M, D] and the layer's output for them [M, N]: that, with the updates."""
        return y + self.linear(self.linear(x, self.a, rows) * self.scale, self.b, rows)


class Selection:
    """Which of some adapters each batch row of a forward pass has: told before the pass, asked by the layers.

    Attributes:
        names: of the adapters.
        rows: of each adapter that any row has the places of these rows, int64 [R].
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows: Mapping[str, Tensor] = {}

    def begin(self, chosen: Sequence[str | None], device: torch.device) -> None:
        """The next pass has so many batch rows, each with the adapter of that name, or with none."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for row, name in enumerate(chosen):
            if name is not None:
                found[name].append(row)
        self.rows = {name: torch.tensor(rows, device=device) for name, rows in found.items()}


class Selected(nn.Module):
    """Several adapters beside one layer, for inference; an adapter that `adapters` lacks is not beside this one.

    Neither they nor the layer's weight change once a pass has been made: what a magnitude multiplies is worked out then.
    """

    def __init__(self, selection: Selection, adapters: Mapping[str, Adapter]) -> None:
        super().__init__()
        self._factors: dict[str, list[Tensor]] = {}
        self.selection, self.names = selection, {name: place for place, name in enumerate(adapters)}
        self.adapters = nn.ModuleList(adapters.values())

    def of(self, name: str) -> Adapter | None:
        """The adapter of that name, if there is one."""
        place = self.names.get(name)
        if place is None:
            return None
        adapter = self.adapters[place]
        assert isinstance(adapter, Adapter)
        return adapter

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, dropout: Dropout | None = None
    ) -> Tensor:
        """As `Adapter`'s: input and output of the layer, each batch row of the latter with its update; the others as they were."""
        assert dropout is None
        for name, rows in self.selection.rows.items():
            adapter = self.of(name)
            if adapter is not None:
                if name not in self._factors:
                    self._factors[name] = adapter.factors(weight)
                y = y.index_copy(0, rows, adapter(x[rows], y[rows], weight, bias, factors=self._factors[name]))
        return y
