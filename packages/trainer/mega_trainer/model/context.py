"""What the layers of one forward pass share: positions, who may see whom, the cache, dropout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mega_trainer.kernels.base import Seen
from mega_trainer.model.rope import Rotation
from mega_trainer.model.routing import Routing
from mega_trainer.rng import Dropout


class Cache(Protocol):
    """What attention needs of earlier tokens, for generation: their keys and values, or the latents of both."""

    def update(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append this call's tensors [B, S, K, d], as many each time; returns all of the layer's so far, [B, T, K, d]."""


class Sight(Protocol):
    """Who sees whom among the tokens at hand."""

    def mask(self, window: int | None) -> Tensor | None:
        """Boolean [B or 1, 1, S, T], True where a query sees a key, with `window` keys at most; None: plain causal."""


@dataclass(frozen=True)
class Outline:
    """What is known of whole sequences in host memory, for one who has parts of them: no device need be asked.

    Attributes:
        lengths: of each sequence, one more than its largest position.
        begins: int64 [B, S], where the document begins that a token belongs to, if attention is closed at its end.
    """

    lengths: list[int]
    begins: np.ndarray | None

    @classmethod
    def of(cls, positions: np.ndarray, documents: np.ndarray | None) -> Outline:
        """That of sequences with these positions and documents, int [B, S]."""
        begins = None
        if documents is not None:
            new = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
            begins = np.maximum.accumulate(np.where(new, np.arange(documents.shape[1]), 0), axis=1)
        return cls((positions.max(axis=1) + 1).tolist(), begins)


@dataclass(frozen=True)
class Sequences:
    """Whole sequences: a token sees itself and those before it, under `documents` int [B, S] only its document's.

    Under context parallelism these are the sequences of all ranks, whose masks are made block by block; their `outline`
    tells which blocks need one.
    """

    length: int
    documents: Tensor | None
    device: torch.device
    outline: Outline | None = None
    _made: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """See `Sight`; each is made once."""
        if window not in self._made:
            self._made[window] = attention_mask(
                self.length, window=window, documents=self.documents, device=self.device
            )
        return self._made[window]

    def block(self, queries: range, keys: range, window: int | None) -> Seen | None:
        """Which of the keys at some places the queries at others see; None: no query sees any."""
        nearest, farthest = queries.start - keys[-1], queries[-1] - keys.start
        if farthest < 0 or (window is not None and nearest >= window):
            return None
        documents = self.documents
        if self.outline is not None and self.outline.begins is not None:
            first, last = self.outline.begins[:, queries.start], self.outline.begins[:, queries[-1]]
            if first.min() >= keys.stop:
                return None
            documents = None if last.max() <= keys.start else documents
        if documents is None and (window is None or farthest < window):
            if nearest >= 0:
                return "all"
            if queries == keys:
                return "causal"
        return _mask(queries, keys, window=window, documents=documents, device=self.device)


@dataclass(frozen=True)
class Context:
    """Shared by all layers of one forward pass.

    Attributes:
        sight: who sees whom.
        rotation, local_rotation: rotary angles of layers without and with a sliding window, or None.
        cache: keys and values of earlier tokens, or None.
        dropout: the micro-batch's dropout, or None outside training.
        routing: what routers of experts need to know of the training step, or None outside training.
    """

    sight: Sight
    rotation: Rotation | None = None
    local_rotation: Rotation | None = None
    cache: Cache | None = None
    dropout: Dropout | None = None
    routing: Routing | None = None

    def rotation_within(self, window: int | None) -> Rotation | None:
        """The angles of a layer whose queries see `window` keys, or all."""
        return self.rotation if window is None else self.local_rotation


def attention_mask(length: int, *, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor | None:
    """The mask [B or 1, 1, S, S] of causal attention with a sliding window and closed documents; None if plain.

    Args:
        length: S, in tokens.
        window: keys a query sees, itself included.
        documents: int [B, S], the document each token belongs to; tokens see only their own.
    """
    if documents is None and (window is None or window >= length):
        return None
    return _mask(range(length), range(length), window=window, documents=documents, device=device)


def _mask(queries: range, keys: range, *, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor:
    """The rows of some queries and the columns of some keys of `attention_mask`: [B or 1, 1, S, T]."""
    distance = torch.arange(queries.start, queries.stop, device=device)[:, None] - torch.arange(
        keys.start, keys.stop, device=device
    )
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    mask = mask[None, None]
    if documents is not None:
        rows, columns = documents[:, queries.start : queries.stop], documents[:, keys.start : keys.stop]
        mask = mask & (rows[:, None, :, None] == columns[:, None, None, :])
    return mask
