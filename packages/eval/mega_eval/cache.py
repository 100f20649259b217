"""Keys and values in pages, and attention to them row by row: rows of any lengths are neither padded nor copied together.

All rows' new tokens of a step are one batch of N tokens for the layers' products; here each row's queries meet its keys.

Legend: N new tokens of all rows, S of one row, T tokens of a row so far, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_eval.pages import PAGE
from mega_trainer.kernels.masks import ALL, Band
from mega_trainer.model.context import Attend, Recur

Run = tuple[int, int]  # slots from the first to before the second


@dataclass(frozen=True)
class Span:
    """One row's part of a step.

    Attributes:
        tokens: which of the step's N tokens are the row's.
        runs: the slots of all T tokens of the row in order, the new ones last.
        place: where the row's states are among those of all rows.
    """

    tokens: slice
    runs: list[Run]
    place: int = 0

    @classmethod
    def of(cls, first: int, new: int, total: int, pages: Sequence[int], place: int = 0) -> Span:
        """Of a row of `total` tokens, the last `new` of which are the step's from the `first` on."""
        return cls(slice(first, first + new), _runs(pages, total), place)

    @property
    def begins(self) -> bool:
        """Whether no token of the row was there before."""
        return len(self.new) == sum(stop - start for start, stop in self.runs)

    @property
    def new(self) -> list[int]:
        """The slots of the new tokens."""
        runs = _last(self.runs, self.tokens.stop - self.tokens.start)
        return [slot for start, stop in runs for slot in range(start, stop)]

    def seen(self, window: int | None) -> list[Run]:
        """The slots of the keys that some of the new tokens see."""
        return self.runs if window is None else _last(self.runs, window - 1 + self.tokens.stop - self.tokens.start)


class PagedCache:
    """The layers' keys and values, or the latents that stand for both: tensors [slots, K, d], PAGE slots a page.

    Of a layer with a state it holds that of each row: tensors [rows, ..], as large however long the rows become.
    """

    def __init__(self, layers: int, pages: int, rows: int) -> None:
        self._slots, self._rows = pages * PAGE, rows
        self._held: list[tuple[Tensor, ...]] = [()] * layers
        self._spans: list[Span] = []
        self._seen: dict[int | None, list[tuple[slice, list[Run]]]] = {}
        self._new = torch.empty(0)

    def begin(self, spans: list[Span], device: torch.device) -> None:
        """Say whose tokens the next forward pass has."""
        self._spans, self._seen = spans, {}
        self._new = torch.tensor([slot for span in spans for slot in span.new], device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, window: int | None, attend: Attend) -> Tensor:
        """See `Cache.attend`; each of the N tokens stands in a batch row of its own: [N, 1, H or K, d]."""
        held = self._put(layer, k) if v is None else self._put(layer, k, v)
        if window not in self._seen:
            self._seen[window] = [(span.tokens, span.seen(window)) for span in self._spans]
        y = torch.empty_like(q)
        for tokens, runs in self._seen[window]:
            keys, values = (_joined(part, runs) for part in (held[0], held[-1]))
            one = tokens.stop - tokens.start == 1  # which sees all the keys of its window
            mask = ALL if one else Band(None if window is None else window - 1, right=0)
            y[tokens] = attend(q[tokens].transpose(0, 1), keys, values, mask).transpose(0, 1)
        return y

    def recur(self, layer: int, x: Tensor, step: Recur) -> Tensor:
        """See `Cache.recur`; each of the N tokens stands in a batch row of its own: [N, 1, c].

        Rows that have as many new tokens as each other are one batch, but for those that begin.
        """
        alike: dict[tuple[int, bool], list[Span]] = {}
        for span in self._spans:
            alike.setdefault((span.tokens.stop - span.tokens.start, span.begins), []).append(span)
        made, order = [], []
        for (count, begins), spans in alike.items():
            places = torch.tensor([span.place for span in spans], device=x.device)
            order += [token for span in spans for token in range(span.tokens.start, span.tokens.stop)]
            new = x[order[-count * len(spans) :]].view(len(spans), count, -1)
            y, states = step(new, None if begins else [held[places] for held in self._held[layer]])
            if not self._held[layer]:
                self._held[layer] = tuple(state.new_empty(self._rows, *state.shape[1:]) for state in states)
            for held, state in zip(self._held[layer], states, strict=True):
                held.index_copy_(0, places, state)
            made.append(y.flatten(0, 1))
        joined = torch.cat(made)
        return torch.empty_like(joined).index_copy_(0, torch.tensor(order, device=x.device), joined).unsqueeze(1)

    def _put(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Keep tensors [N, 1, K, d]; returns all of the layer's."""
        if not self._held[layer]:  # not touched before it is used: on a CPU it costs memory only then
            self._held[layer] = tuple(part.new_empty(self._slots, *part.shape[2:]) for part in new)
        for held, part in zip(self._held[layer], new, strict=True):
            held.index_copy_(0, self._new, part.squeeze(1))
        return self._held[layer]


def _runs(pages: Sequence[int], total: int) -> list[Run]:
    """The slots of the first `total` tokens of a row with these pages, neighbouring pages as one run."""
    runs: list[Run] = []
    for number, page in enumerate(pages[: -(-total // PAGE)]):
        start, stop = page * PAGE, page * PAGE + min(PAGE, total - number * PAGE)
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


def _last(runs: Sequence[Run], count: int) -> list[Run]:
    """The last `count` slots, or all."""
    found: list[Run] = []
    for start, stop in reversed(runs):
        found.insert(0, (max(start, stop - count), stop))
        count -= stop - start
        if count <= 0:
            break
    return found


def _joined(held: Tensor, runs: Sequence[Run]) -> Tensor:
    """What stands in these slots, [1, T, K, d]: a view if they are one run."""
    parts = [held[start:stop] for start, stop in runs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)
