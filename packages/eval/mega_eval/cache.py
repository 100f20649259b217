"""Batched decoding with kept keys and values: rows of different lengths, padded on the left to end in one column.

Legend: B rows, S new columns, T columns so far, K key/value heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_trainer.model.decoder import Decoder

BLOCK = 256  # columns by which a cache grows


class KeyValueCache:
    """Keys and values of each layer, or latents, [B, capacity, K, d]; the capacity grows in blocks as columns come in."""

    def __init__(self, layers: int) -> None:
        self._held: list[tuple[Tensor, ...]] = [()] * layers
        self._columns = [0] * layers

    @property
    def columns(self) -> int:
        """T, after all layers have been updated."""
        return self._columns[-1]

    def update(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append tensors [B, S, K, d]; returns all of the layer's so far, [B, T, K, d], as views."""
        start = self._columns[layer]
        stop = self._columns[layer] = start + new[0].shape[1]
        held = self._held[layer] or tuple(part[:, :0] for part in new)
        if stop > held[0].shape[1]:
            held = self._held[layer] = tuple(_grown(buffer, start, stop) for buffer in held)
        for buffer, part in zip(held, new, strict=True):
            buffer[:, start:stop] = part
        return tuple(buffer[:, :stop] for buffer in held)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those, int64 [rows]."""
        self._held = [tuple(buffer[rows] for buffer in held) for held in self._held]


def _grown(buffer: Tensor, used: int, wanted: int) -> Tensor:
    """A copy of `buffer` [B, capacity, K, d] with room for `wanted` columns."""
    rows, _, *rest = buffer.shape
    grown = buffer.new_zeros((rows, -(-wanted // BLOCK) * BLOCK, *rest))
    grown[:, :used] = buffer[:, :used]
    return grown


class Batch:
    """Rows of tokens that grow by the same number of columns at a time.

    A padding token stands at position 0, is seen by no token of its row and sees only itself, so that what a row
    computes is what it would compute alone.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._cache = KeyValueCache(model.config.num_layers)
        self._padding = self._tokens = torch.empty(0)

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Take the prompts, none of them empty; logits [B, V] of what follows each."""
        longest, device = max(map(len, prompts)), self._model.head_weight.device
        self._padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._tokens = torch.empty((len(prompts), 0), dtype=torch.int64, device=device)
        return self.feed(torch.tensor(padded, device=device))

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        """Append tokens int64 [B, S]; logits [B, V] of what follows the last."""
        model, before = self._model, self._cache.columns
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        if before and self._outgrown(before):
            self._cache, tokens, before = KeyValueCache(model.config.num_layers), self._tokens, 0
        columns = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        positions = (columns - self._padding[:, None]).clamp(min=0)
        # A prompt that is alone needs no mask of its own: plain causal attention has the faster kernel.
        alone = not before and len(tokens) == 1
        sight = None if alone else Columns(columns, self._padding)
        context = model.context(positions, sight=sight, cache=self._cache)
        x = model(model.embed(tokens, positions), context)
        return model.logits(x[:, -1:])[:, 0]

    def _outgrown(self, before: int) -> bool:
        """Whether a row has become too long for the angles that its `before` first keys were turned by (LongRoPE)."""
        config, now = self._model.config, self._tokens.shape[1]
        ropes = [rope for rope in (config.rope, config.local_rope) if rope and rope.scaling == "longrope"]
        bounds = [self._padding + (rope.original_max_position or 0) for rope in ropes]
        return any(bool(((before <= bound) & (bound < now)).any()) for bound in bounds)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but those."""
        index = torch.tensor(rows, device=self._padding.device)
        self._padding, self._tokens = self._padding[index], self._tokens[index]
        self._cache.keep(index)


@dataclass(frozen=True)
class Columns:
    """Who sees whom among rows that are padded on the left: see `visible`, whose masks it makes once each."""

    columns: Tensor
    padding: Tensor
    _made: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """bool [B, 1, S, T]."""
        if window not in self._made:
            self._made[window] = visible(self.columns, self.padding, window)
        return self._made[window]


def visible(columns: Tensor, padding: Tensor, window: int | None) -> Tensor:
    """Which key columns the query `columns` int64 [S] see: bool [B, 1, S, T], T ending at the last of them.

    Args:
        columns: consecutive.
        padding: int64 [B], columns of padding before each row.
        window: keys a query sees, itself included.
    """
    keys = torch.arange(int(columns[-1]) + 1, device=columns.device)
    distance = columns[:, None] - keys
    near = (distance >= 0) & (distance < (window or len(keys)))
    real = keys >= padding[:, None, None]
    # Padding sees itself: the softmax over nothing is not a number, which no mask would stop further up.
    return ((near & real) | (distance == 0))[:, None]
