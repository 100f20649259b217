"""Keys and values in pages, and attention to them row by row: rows of any lengths are neither padded nor copied together.

All rows' new tokens of a step are one batch of N tokens for the layers' products; here each row's queries meet its keys.

Legend: N new tokens of all rows, S of one row, T tokens of a row so far, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor

from mega_eval.pages import PAGE
from mega_trainer.kernels.masks import ALL, Band
from mega_trainer.model.cached import Attend, CachedAttention, Recur

Memory = Mapping[int, tuple[Tensor, Tensor]]
Run = tuple[int, int]  # slots from the first to before the second


@dataclass(frozen=True)
class Span:
    """One row's part of a step.

    Attributes:
        tokens: which of the step's N tokens are the row's.
        total: T, of which these are the last.
        pages: where all of them are.
        place: where the row's states are among those of all rows.
        blocks: places of the row's images, of each all or none in the step, whose tokens see those of theirs behind them.
        memory: what each layer of a decoder asks of the row's encoded text, keys and values [1, E, K, d].
    """

    tokens: slice
    total: int
    pages: Sequence[int]
    place: int = 0
    blocks: Sequence[range] = ()
    memory: Memory = field(default_factory=dict)

    @property
    def count(self) -> int:
        """New tokens."""
        count: int = self.tokens.stop - self.tokens.start
        return count

    @property
    def stretches(self) -> Iterator[tuple[range, bool]]:
        """The places of the new tokens, cut where images begin and end, and whether they are an image's."""
        place = self.total - self.count
        for block in self.blocks:
            if place <= block.start < self.total:
                yield range(place, block.start), False
                yield block, True
                place = block.stop
        yield range(place, self.total), False

    @property
    def begins(self) -> bool:
        """Whether no token of the row was there before."""
        return self.count == self.total

    @property
    def new(self) -> list[int]:
        """The slots of the new tokens."""
        places = range(self.total - self.count, self.total)
        return [self.pages[place // PAGE] * PAGE + place % PAGE for place in places]

    @cached_property
    def runs(self) -> list[Run]:
        """The slots of all tokens in order, neighbouring pages as one run."""
        return _runs(self.pages, self.total)

    def seen(self, window: int | None) -> list[Run]:
        """The slots of the keys that some of the new tokens see."""
        return self.runs if window is None else _last(self.runs, window - 1 + self.count)


class PagedCache:
    """The layers' keys and values, or the latents that stand for both: tensors [slots, K, d], PAGE slots a page.

    Of a layer with a state it holds that of each row: tensors [rows, ..], as large however long the rows become.
    """

    def __init__(self, layers: int, pages: int, rows: int) -> None:
        self._slots, self._rows = pages * PAGE, rows
        self._held: list[tuple[Tensor, ...]] = [()] * layers
        self._by_head = list(self._held)  # the same memory, seen as attention wants it
        self._spans: list[Span] = []
        self._seen: dict[int | None, list[list[Run]]] = {}
        self._single = 0  # of the spans the first so many have one token
        self._new = torch.empty(0)

    def begin(self, spans: list[Span], device: torch.device) -> None:
        """Say whose tokens the next forward pass has: best those of rows that have one come first, which is less to do."""
        self._spans, self._seen = spans, {}
        self._single = sum(1 for _ in takewhile(lambda span: span.count == 1, spans))
        self._new = torch.tensor([slot for span in spans for slot in span.new], device=device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, window: int | None, attend: CachedAttention
    ) -> Tensor:
        """See `Cache.attend`; each of the N tokens stands in a batch row of its own: [N, 1, H or K, d]."""
        by_head = self._put(layer, k) if v is None else self._put(layer, k, v)
        if window not in self._seen:
            self._seen[window] = [span.seen(window) for span in self._spans]
        keys = [_joined(by_head[0], runs) for runs in self._seen[window]]
        values = keys if v is None else [_joined(by_head[1], runs) for runs in self._seen[window]]
        single = self._single
        if single == len(self._spans):
            return attend.rows(q.squeeze(1), keys, values).unsqueeze(1)
        rows = [attend.rows(q[:single, 0], keys[:single], values[:single]).unsqueeze(1)] if single else []
        left = None if window is None else window - 1
        for span, *kept in zip(self._spans[single:], keys[single:], values[single:], strict=True):
            for places, image in filter(lambda one: one[0], span.stretches):
                first, behind = places.start + span.tokens.stop - span.total, span.total - places.stop
                own, value = (part[:, :, : part.shape[2] - behind].transpose(1, 2) for part in kept)
                new = q[first : first + len(places)].transpose(0, 1)
                rows.append(attend(new, own, value, Band(left, None if image else 0)).transpose(0, 1))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def cross(self, layer: int, q: Tensor, attend: Attend) -> Tensor:
        """See `Cache.cross`; each of the N tokens stands in a batch row of its own: [N, 1, H, d]."""
        y = torch.empty_like(q)
        for span in self._spans:
            y[span.tokens] = attend(q[span.tokens].transpose(0, 1), *span.memory[layer], ALL).transpose(0, 1)
        return y

    def recur(self, layer: int, x: Tensor, step: Recur) -> Tensor:
        """See `Cache.recur`; each of the N tokens stands in a batch row of its own: [N, 1, c].

        Rows that have as many new tokens as each other are one batch, but for those that begin.
        """
        alike: dict[tuple[int, bool], list[Span]] = {}
        for span in self._spans:
            alike.setdefault((span.count, span.begins), []).append(span)
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
        """Keep tensors [N, 1, K, d]; returns all of the layer's, [1, K, slots, d]."""
        if not self._held[layer]:  # not touched before it is used: on a CPU it costs memory only then
            self._held[layer] = tuple(part.new_empty(self._slots, *part.shape[2:]) for part in new)
            self._by_head[layer] = tuple(held.transpose(0, 1).unsqueeze(0) for held in self._held[layer])
        for held, part in zip(self._held[layer], new, strict=True):
            held.index_copy_(0, self._new, part.squeeze(1))
        return self._by_head[layer]


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
    """What stands in these slots of [1, K, slots, d]: a view if they are one run."""
    parts = [held.narrow(2, start, stop - start) for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
