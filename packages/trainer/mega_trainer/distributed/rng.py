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

TOKENS = 1024  # per generator, whose start and kernel cost more than values that a rank draws and discards


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
        """Apply dropout with probability `p` to this rank's tokens of the residual stream, and return the result.
        x is [batch, this rank's tokens, D]; masks are drawn only for blocks of tokens that overlap this rank's.
        """
        if p == 0.0:
            return x
        return x * _keep_factors(self._draw_masks(x, (layer, site), self.residual_ranges, x.shape[-1]), p, x.dtype)

    def drop_projection_inputs(
        self, x: Tensor, p: float, site: str, width: int, *, first: int = 0, whole: bool = False
    ) -> Tensor:
        """Apply dropout with probability `p` to a slice of a projection's input, and return the result.
        x [B, tokens, columns] is the slice of the `width` columns of the input from column `first` on; `site` names the
        projection.

        Its tokens are the residual stream's, or with `whole` the gathered ones of all tensor ranks.
        """
        if p == 0.0:
            return x
        ranges = self.gathered_ranges if whole and self.gathered_ranges is not None else self.residual_ranges
        return x * _keep_factors(
            self._draw_masks(x, (site,), ranges, width)[..., first : first + x.shape[-1]], p, x.dtype
        )

    def drop_attention_probs(self, x: Tensor, p: float, layer: int, first_head: int) -> Tensor:
        """Apply dropout with probability `p` to attention probabilities, and return the result.
        x [B, H, S, S] are the probabilities of the heads from `first_head` on; each head's mask is drawn whole.
        """
        if p == 0.0:
            return x
        keys = [(s, layer, f"head{first_head + h}") for s in self.samples for h in range(x.shape[1])]
        draws = [self._draw(x, key, x.shape[-2:]) for key in keys]
        return x * _keep_factors(torch.stack(draws).view(x.shape), p, x.dtype)

    def _draw_masks(self, x: Tensor, key: Sequence[int | str], ranges: Sequence[range], width: int) -> Tensor:
        """Draw values for each sample's tokens in `ranges`: [B, tokens, width]."""
        draws = torch.empty(len(self.samples), sum(map(len, ranges)), width, device=x.device)
        for sample, rows in zip(self.samples, draws, strict=True):
            for token_range, part in zip(ranges, rows.split([len(one) for one in ranges]), strict=True):
                self._draw_rows(part, (sample, *key), token_range)
        return draws

    def _draw_rows(self, out: Tensor, key: Sequence[int | str], tokens: range) -> None:
        """Draw the values of a range of tokens into `out`, block by block."""
        for block in range(tokens.start // TOKENS, tokens[-1] // TOKENS + 1):
            first = block * TOKENS
            start, stop = max(tokens.start, first), min(tokens.stop, first + TOKENS)
            rows = out[start - tokens.start : stop - tokens.start]
            if len(rows) == TOKENS:
                self._draw(out, (*key, block), rows.shape, out=rows)
            else:
                whole = self._draw(out, (*key, block), (TOKENS, out.shape[1]))
                rows.copy_(whole[start - first : stop - first])

    def _draw(self, x: Tensor, key: Sequence[int | str], shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        generator = seeded_generator(x.device, self.seed, *key)
        return torch.rand(tuple(shape), generator=generator, device=x.device, out=out)


# Returns the dropout for sequences with a number of tokens on this rank, and a kind of sequence.
DropoutFactory = Callable[[int, int], SeededDropout | None]


def _keep_factors(draws: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return (draws >= p).to(dtype) / (1 - p)
