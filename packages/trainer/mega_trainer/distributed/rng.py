"""Randomness seeded by name: a draw depends on its purpose, not on the rank that draws it or on earlier draws.

Weights are drawn from (seed, canonical name), dropout masks from (seed, sample, layer, site): every layout of ranks draws
the same values, a recomputed block replays its own masks, and a resumed run has no generator state to restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = 64  # per generator: its cost is small, and ranks discard few of the drawn values


def seeded_generator(device: torch.device | str, *key: int | str, number: int = 0) -> torch.Generator:
    """Return a random generator on `device` whose stream depends only on `key` and a non-negative `number`.

    Streams of different numbers differ. Streams of different keys can collide, as a CPU generator uses only 32 bits of a
    seed.
    """
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed((int.from_bytes(digest, "little") >> 1) + number)


@dataclass(frozen=True)
class SeededDropout:
    """Dropout for one micro-batch, with masks that are equal in every parallel layout.

    Attributes:
        seed: the run's seed.
        samples: the global number of each sample of the micro-batch.
        residual_ranges: positions of the tokens of this rank's residual stream, in order.
        gathered_ranges: positions of the tokens of all tensor ranks under sequence parallelism.
    """

    seed: int
    samples: Sequence[int]
    residual_ranges: Sequence[range]
    gathered_ranges: Sequence[range] | None = None

    def drop_residual(self, x: Tensor, p: float, layer: int, site: str) -> Tensor:
        """Return x [batch, this rank's tokens, D] of the residual stream with elements dropped with probability `p`;
        masks are drawn only for blocks of tokens that overlap this rank's.
        """
        if p == 0.0:
            return x
        return x * _keep_factors(self._draw_masks(x, (layer, site), self.residual_ranges, x.shape[-1]), p, x.dtype)

    def drop_projection_inputs(
        self, x: Tensor, p: float, site: str, width: int, *, first: int = 0, whole: bool = False
    ) -> Tensor:
        """Return x [B, tokens, columns], a slice of the `width` columns of a projection's input from column `first` on,
        with elements dropped with probability `p`; `site` names the projection.

        Its tokens are the residual stream's, or with `whole` the gathered ones of all tensor ranks.
        """
        if p == 0.0:
            return x
        ranges = self.gathered_ranges if whole and self.gathered_ranges is not None else self.residual_ranges
        return x * _keep_factors(
            self._draw_masks(x, (site,), ranges, width)[..., first : first + x.shape[-1]], p, x.dtype
        )

    def drop_attention_probs(self, x: Tensor, p: float, layer: int, first_head: int) -> Tensor:
        """Return attention probabilities x [B, H, S, S] of the heads from `first_head` on with elements dropped with
        probability `p`; each head's mask is drawn whole.
        """
        if p == 0.0:
            return x
        keys = [(s, layer, f"head{first_head + h}") for s in self.samples for h in range(x.shape[1])]
        draws = [self._draw(x, key, x.shape[-2:]) for key in keys]
        return x * _keep_factors(torch.stack(draws).view(x.shape), p, x.dtype)

    def _draw_masks(self, x: Tensor, key: Sequence[int | str], ranges: Sequence[range], width: int) -> Tensor:
        rows = [torch.cat([self._draw_rows(x, (s, *key), part, width) for part in ranges]) for s in self.samples]
        return torch.stack(rows)

    def _draw_rows(self, x: Tensor, key: Sequence[int | str], token_range: range, width: int) -> Tensor:
        first, last = token_range.start // TOKENS, token_range[-1] // TOKENS
        draws = [self._draw(x, (*key, block), (TOKENS, width)) for block in range(first, last + 1)]
        return torch.cat(draws)[token_range.start - first * TOKENS : token_range.stop - first * TOKENS]

    def _draw(self, x: Tensor, key: Sequence[int | str], shape: Sequence[int]) -> Tensor:
        return torch.rand(tuple(shape), generator=seeded_generator(x.device, self.seed, *key), device=x.device)


# Returns the dropout for sequences with a number of tokens on this rank, and a kind of sequence.
DropoutFactory = Callable[[int, int], SeededDropout | None]


def _keep_factors(draws: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return (draws >= p).to(dtype) / (1 - p)
