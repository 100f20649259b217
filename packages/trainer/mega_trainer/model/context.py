"""What the layers of one forward pass share: positions, who may see whom, the cache, dropout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mega_trainer.model.rope import Rotation
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
class Sequences:
    """Whole sequences: a token sees itself and those before it, under `documents` int [B, S] only its document's."""

    length: int
    documents: Tensor | None
    device: torch.device
    _made: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """See `Sight`; each is made once."""
        if window not in self._made:
            self._made[window] = attention_mask(
                self.length, window=window, documents=self.documents, device=self.device
            )
        return self._made[window]


@dataclass(frozen=True)
class Context:
    """Shared by all layers of one forward pass.

    Attributes:
        sight: who sees whom.
        rotation, local_rotation: rotary angles of layers without and with a sliding window, or None.
        cache: keys and values of earlier tokens, or None.
        dropout: the micro-batch's dropout, or None outside training.
    """

    sight: Sight
    rotation: Rotation | None = None
    local_rotation: Rotation | None = None
    cache: Cache | None = None
    dropout: Dropout | None = None


def attention_mask(length: int, *, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor | None:
    """The mask [B or 1, 1, S, S] of causal attention with a sliding window and closed documents; None if plain.

    Args:
        length: S, in tokens.
        window: keys a query sees, itself included.
        documents: int [B, S], the document each token belongs to; tokens see only their own.
    """
    if documents is None and (window is None or window >= length):
        return None
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    mask = mask[None, None]
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask
