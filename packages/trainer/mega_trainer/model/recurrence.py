"""What recurrent mixers have in common: the short convolution, the chunks, and how a state comes through all context ranks.

Either each rank computes with its own tokens and is passed the states before them (`parallel.state`), or ranks exchange
tokens for heads, before the convolution and back after the recurrence: what is less.

Legend: B batch, S sequence, N context ranks, s = S/N tokens of a rank, c convolved channels of a tensor rank, H its heads of P
channels each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mega_trainer.comm import Group
from mega_trainer.kernels.chunks import Chunks
from mega_trainer.kernels.scan import Pass
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context, Sequences
from mega_trainer.model.short_conv import ShortConv
from mega_trainer.parallel.context import AllToAll
from mega_trainer.parallel.state import pass_states
from mega_trainer.parallel.tensor import Heads

ALONE = Group("alone")


class Rule(Protocol):
    """A recurrence of some of a tensor rank's heads."""

    def __call__(
        self, parts: Sequence[Tensor], steps: Sequence[Tensor], heads: slice, chunks: Chunks, states: Pass
    ) -> Tensor:
        """y [B, S, H, P], of each convolved block's heads [B, S, count, size] and of numbers for each head [B, S, H]."""


class Recurrence(nn.Module):
    """The convolution of some blocks of channels, and a recurrence of their heads over whole sequences.

    Args:
        build, layer: of the model, and of it.
        name: of the convolution's tensors.
        blocks: what is convolved, by heads that the tensor ranks share out, or share.
        taps, bias: of the convolution.
        chunk: tokens that are computed at once.
        heads: the recurrence's, of P channels.
        state: elements of a head's state, and of what says how a stretch of tokens changes it.
    """

    def __init__(
        self,
        build: Builder,
        layer: int,
        name: str,
        blocks: Sequence[Heads],
        taps: int,
        *,
        bias: bool,
        chunk: int,
        heads: Heads,
        state: int,
    ) -> None:
        super().__init__()
        tp = build.groups.tp
        self.cp, self.saved, self.chunk, self.state = build.groups.cp, build.saved, chunk, state
        self.layer, self.asked = layer, build.cp_kind == "alltoall"
        self.counts, self.sizes = [max(1, block.count // tp.size) for block in blocks], [block.size for block in blocks]
        self.heads, self.size = heads.count // tp.size, heads.size
        self.conv = ShortConv(build, name, blocks, taps, bias=bias)

    @property
    def channels(self) -> int:
        """c."""
        return sum(count * size for count, size in zip(self.counts, self.sizes, strict=True))

    def forward(self, rule: Rule, seen: Tensor, steps: Sequence[Tensor], context: Context) -> Tensor:
        """What `rule` makes of this rank's channels [B, s, c] and numbers for each head [B, s, H]: [B, s, H, P]."""
        if context.cache is not None:
            return context.cache.recur(self.layer, torch.cat([seen, *steps], -1), partial(self._continued, rule))
        mix = self._exchanged if self.cp.size > 1 and self._exchanges(seen, len(steps)) else self._passed
        y: Tensor = self.saved.whole("attention", mix, rule, seen, context, *steps)
        return y

    def _exchanges(self, seen: Tensor, steps: int) -> bool:
        """Whether to exchange heads: if that is asked for, or if they can be shared and it is fewer bytes than states."""
        size = self.cp.size
        shared = self.heads % size == 0 and all(n % size == 0 or size % n == 0 for n in self.counts)
        return self.asked or (shared and self.exchanged_bytes(seen, steps) < self.passed_bytes(seen))

    def passed_bytes(self, seen: Tensor) -> int:
        """What a forward gathers by passing states: those of two spans of each rank, and the ends that the convolution sees."""
        halo = (self.conv.taps - 1) * seen.shape[-1] * seen.itemsize
        return seen.shape[0] * 2 * self.cp.size * (self.heads * self.state * max(4, seen.itemsize) + halo)

    def exchanged_bytes(self, seen: Tensor, steps: int) -> int:
        """What it sends by exchanging heads: channels and the numbers of each head, and back y."""
        channels = sum(max(n, self.cp.size) * size for n, size in zip(self.counts, self.sizes, strict=True))
        return seen.shape[0] * seen.shape[1] * (channels + self.heads * (steps + self.size)) * seen.itemsize

    def _passed(self, rule: Rule, seen: Tensor, context: Context, *steps: Tensor) -> Tensor:
        """By this rank's tokens, and the states that others bring them."""
        parts = self._parts(self.conv(seen, context), self.counts)
        return rule(parts, steps, slice(None), self._chunks(seen, context, self.cp), partial(_states, self.cp))

    def _exchanged(self, rule: Rule, seen: Tensor, context: Context, *steps: Tensor) -> Tensor:
        """By all tokens of a share of the heads."""
        exchange = AllToAll(self.cp)
        received = exchange.to_heads([*self._parts(seen, self.counts), *(step.unsqueeze(-1) for step in steps)])
        parts, steps = received[: len(self.counts)], tuple(step.squeeze(-1) for step in received[len(self.counts) :])
        places = self._parts(torch.arange(seen.shape[-1], device=seen.device), self.counts)
        channels = torch.cat([place[exchange.share(len(place))].flatten() for place in places])
        joined = self.conv.of_sequences(torch.cat([part.flatten(-2) for part in parts], -1), context, channels)
        chunks = self._chunks(joined, context, ALONE)
        parts = self._parts(joined, [part.shape[2] for part in parts])
        y = rule(parts, steps, exchange.share(self.heads), chunks, partial(_states, ALONE))
        return exchange.to_tokens(y.to(seen.dtype))

    def _continued(self, rule: Rule, x: Tensor, state: Sequence[Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Channels and numbers for each head of sequences that go on, see `Recur`: with the convolution's tail and S."""
        seen, *steps = torch.split(
            x, [self.channels, *[self.heads] * ((x.shape[-1] - self.channels) // self.heads)], -1
        )
        tail, first = state or (seen.new_zeros(len(seen), self.conv.taps - 1, self.channels), None)
        convolved, tail = self.conv.step(seen, tail)
        carried = _Carried(first)
        chunks = Chunks(1, min(self.chunk, seen.shape[1]))
        y = rule(self._parts(convolved, self.counts), steps, slice(None), chunks, carried)
        assert carried.state is not None
        return y, (tail, carried.state)

    def _parts(self, seen: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The blocks of channels [.., c] by their heads: [.., count, size] each."""
        split = torch.split(seen, [count * size for count, size in zip(counts, self.sizes, strict=True)], -1)
        return [torch.unflatten(part, -1, (count, -1)) for part, count in zip(split, counts, strict=True)]

    def _chunks(self, x: Tensor, context: Context, group: Group) -> Chunks:
        """Those of the tokens that a rank of the group holds."""
        assert isinstance(context.sight, Sequences)
        spans, whole = (1, True) if group.size == 1 else (2, False)
        starts = context.sight.starts if whole else None
        return Chunks(spans, min(self.chunk, x.shape[1] // spans), context.sight.reach(group), whole, starts)


class _Carried:
    """A `Pass` that goes on from a state, zero at first, and keeps the last one."""

    def __init__(self, state: Tensor | None) -> None:
        self.state = state

    def __call__(self, maps: Tensor, added: Tensor) -> Tensor:
        before, self.state = pass_states(maps, added, self.state, ALONE)
        return before


def _states(group: Group, maps: Tensor, added: Tensor) -> Tensor:
    return pass_states(maps, added, None, group)[0]
