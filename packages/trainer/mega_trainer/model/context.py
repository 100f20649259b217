"""What the layers of one forward pass share: positions, who may see whom, the cache, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from mega_trainer.comm import Group
from mega_trainer.device import to_device
from mega_trainer.kernels.base import Rotation
from mega_trainer.kernels.masks import Band, Mask, Packed, Part, rectangle
from mega_trainer.model.cached import Cache
from mega_trainer.model.relative import Relative
from mega_trainer.model.routing import Routes, Routing
from mega_trainer.model.vision.images import Block, ahead
from mega_trainer.parallel.context import place_of_tokens
from mega_trainer.rng import Dropout

if TYPE_CHECKING:
    from mega_trainer.model.cross import Source


class Sight(Protocol):
    """Who sees whom among the tokens at hand."""

    def mask(self, window: int | None) -> Tensor | Mask:
        """What a query sees, with `window` keys at most; a tensor is boolean, [B or 1, 1, S, T]."""


@dataclass(frozen=True)
class Sequences:
    """Whole sequences: a token sees itself and those before it, or all; where documents are closed only those of its own.

    Under context parallelism these are the sequences of all ranks, of which parts are asked for.

    Attributes:
        length: S.
        begins, blocks: as in `mega_trainer.batch.Outline`. What `mask` says is without the blocks, which `parts` adds.
    """

    length: int
    device: torch.device
    begins: np.ndarray | None = None
    causal: bool = True
    blocks: Sequence[Block] = ()
    _made: dict[tuple[range, int | None], Mask] = field(default_factory=dict)
    _reach: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Mask:
        """See `Sight`."""
        return self._square(range(self.length), window)

    def parts(self, queries: range, keys: range, window: int | None) -> list[Part]:
        """Which of the keys at some places the queries at the same places, or at others all before or behind, see."""
        if queries == keys:
            return [Part(slice(None), queries, keys, self._square(queries, window)), *ahead(self.blocks, queries, keys)]
        if self.causal and keys.start > queries.start:
            return ahead(self.blocks, queries, keys)
        band = self._band(window)
        if self.begins is None:
            found = [rectangle(slice(None), queries, keys, band)]
        else:
            early, late = sorted((queries, keys), key=lambda places: places.start)
            # of the documents that begin before the later ones, the last one alone may reach into them
            inside = (self.begins[:, late.start : late.stop] < early.stop).sum(1).tolist()
            first = self.begins[:, late.start].tolist()
            found = []
            for row, (n, start) in enumerate(zip(inside, first, strict=True)):
                parts = early[max(0, start - early.start) :], late[:n]
                here, there = parts if early is queries else parts[::-1]
                found += [rectangle(slice(row, row + 1), here, there, band)] if n else []
        return [part for part in found if part is not None]

    def _band(self, window: int | None) -> Band:
        """What a query sees of the sequence."""
        left = None if window is None else window - 1
        return Band(left, 0 if self.causal else left)

    def reach(self, group: Group) -> Tensor | None:
        """How many tokens of its document stand before each token that a rank of `group` holds: int64 [B, s].

        None where documents are open: then all before it.
        """
        if self.begins is None:
            return None
        share = group.size, group.rank  # layers that exchange heads have whole sequences, others parts
        if share not in self._reach:
            places = place_of_tokens(self.length, group)
            held = places - torch.from_numpy(self.begins)[:, places]
            self._reach[share] = to_device(held, self.device)
        return self._reach[share]

    @cached_property
    def starts(self) -> tuple[Tensor, Tensor] | None:
        """Where documents start, all rows behind one another, and their end: int64 [documents + 1], on the device and on the host.

        None where they are open.
        """
        if self.begins is None:
            return None
        new = np.flatnonzero(self.begins == np.arange(self.begins.shape[1]))
        host = torch.from_numpy(np.append(new, self.begins.size))
        return to_device(host, self.device), host

    def _square(self, places: range, window: int | None) -> Mask:
        """Of some tokens and themselves. Each is made once."""
        if (places, window) not in self._made:
            band = self._band(None if window is None or window >= len(places) else window)
            made: Mask = band
            if self.begins is not None:
                begins = np.maximum(self.begins[:, places.start : places.stop], places.start)
                starts = [np.flatnonzero(np.diff(row, prepend=-1)) for row in begins]
                lengths = np.concatenate([np.diff(row, append=len(places)) for row in starts])
                made = Packed.of(lengths.tolist(), band, self.device)
            self._made[places, window] = made
        return self._made[places, window]


@dataclass(frozen=True)
class Context:
    """Shared by all layers of one forward pass.

    Attributes:
        sight: who sees whom.
        rotation, local_rotation: rotary angles of layers without and with a sliding window, or None.
        cache: keys and values of earlier tokens, or None.
        dropout: the micro-batch's dropout, or None outside training.
        routing: what routers of experts need to know of the training step, or None outside training.
        relative: the table of relative positions that layers share.
        source: of a decoder with an encoder, what the encoder reads and makes.
        routes: experts that are chosen elsewhere, or to be told.
    """

    sight: Sight
    rotation: Rotation | None = None
    local_rotation: Rotation | None = None
    cache: Cache | None = None
    dropout: Dropout | None = None
    routing: Routing | None = None
    relative: Relative | None = None
    source: Source | None = None
    routes: Routes | None = None

    def rotation_within(self, window: int | None) -> Rotation | None:
        """The angles of a layer whose queries see `window` keys, or all."""
        return self.rotation if window is None else self.local_rotation
