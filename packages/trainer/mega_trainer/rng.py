"""Randomness by name. A draw is a function of what it is for, never of who draws it or of what was drawn before.

Weights are drawn from (seed, canonical name), dropout masks from (seed, sample, layer, site): every layout of ranks sees
the same values, a recomputed block replays its own masks, and a resumed run has no generator state to restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def generator(device: torch.device | str, *key: int | str) -> torch.Generator:
    """A generator whose stream is a function of `key`."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Dropout:
    """Dropout for one micro-batch, the same in every layout.

    Attributes:
        seed: the run's seed.
        samples: the global number of each sample of the micro-batch.
        length: full sequence length, in tokens.
        part: the places in the sequence of what this rank's residual stream holds: a slice, or int64 [S'].
    """

    seed: int
    samples: Sequence[int]
    length: int
    part: slice | Tensor = field(default_factory=lambda: slice(None))

    def residual(self, x: Tensor, p: float, layer: int, site: str) -> Tensor:
        """Drop elements of x [B, S', D]; each sample's mask is drawn whole and cut to the rank's part."""
        if p == 0.0:
            return x
        return x * self._scale(x, p, [(sample, layer, site) for sample in self.samples], (self.length, x.shape[-1]), 0)

    def scores(self, x: Tensor, p: float, layer: int, first_head: int) -> Tensor:
        """Drop attention probabilities x [B, H, S, S] of the heads from `first_head` on."""
        if p == 0.0:
            return x
        shape = (x.shape[-2], x.shape[-1])
        keys = [(s, layer, f"head{first_head + h}") for s in self.samples for h in range(x.shape[1])]
        return x * self._scale(x, p, keys, shape, None).view(x.shape)

    def _scale(
        self, x: Tensor, p: float, keys: Sequence[tuple[int, int, str]], shape: tuple[int, int], cut: int | None
    ) -> Tensor:
        part = slice(None) if cut is None else self.part
        draws = [
            torch.rand(shape, generator=generator(x.device, self.seed, *key), device=x.device)[part] for key in keys
        ]
        return (torch.stack(draws) >= p).to(x.dtype) / (1 - p)
