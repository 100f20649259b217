"""Context parallelism: the tokens of a sequence split over the ranks of a group, in three ways.

Under causal attention a token has the more to do the later it stands. So a sequence is cut in 2 N chunks, and rank r
holds the chunks r and 2 N - 1 - r: of the chunks' N (2 N + 1) visible pairs each rank computes as many. Where all see
all, each has as many in any order, and this one stays.

    ring        k and v go from rank to rank while each computes with those at hand; results are merged by their
                log-sum-exp, and dK and dV go around with k and v in the backward (arXiv:2310.01889)
    allgather   k and v of all ranks are gathered, dK and dV reduce-scattered; the backward gathers again
    alltoall    each rank gets all tokens of its share of the heads, and gives its results back (arXiv:2309.14509)

Legend: B batch, S sequence, N context ranks, s = S/N tokens of a rank, C = s/2 of a chunk, H query heads, K key/value
heads, d size of queries and keys, e of values; heads are those of one tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mega_trainer.comm import Group, Passing, all_gather_into, all_to_all, reduce_scatter_into, start_pass
from mega_trainer.kernels.base import Kernels, Scores
from mega_trainer.kernels.blocks import sinks_gradient, with_sinks
from mega_trainer.kernels.masks import ALL, CAUSAL, Mask, Part
from mega_trainer.parallel.tensor import sequence_part, whole_sequence

Kind = Literal["ring", "allgather", "alltoall"]
# Which keys at some places in the sequence the queries at others see.
See = Callable[[range, range], Sequence[Part]]
# Attention of whole sequences by some of a tensor rank's heads: q, k, v, what becomes of scores, number of the first head.
Whole = Callable[[Tensor, Tensor, Tensor, Scores, int], Tensor]


class ContextParallel(Protocol):
    """Attention of a rank's tokens to those of all ranks."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, how: Scores, see: See, whole: Whole) -> Tensor:
        """q [B, s, H, d], k [B, s, K, d], v [B, s, K, e] -> [B, s, H, e].

        Kinds that work block by block ask `see`; one that has whole sequences leaves the attention to `whole`.
        """


def context_parallel(kind: Kind, group: Group, kernels: Kernels) -> ContextParallel | None:
    """That kind of attention over `group`; None where a rank has whole sequences anyway."""
    if group.size == 1:
        return None
    if kind == "alltoall":
        return AllToAll(group)
    return Blockwise(Ring(group) if kind == "ring" else Gathered(group), group, kernels)


def chunks_of(rank: int, length: int, ranks: int) -> tuple[range, range]:
    """The places of the two chunks of a sequence of `length` tokens that a rank holds."""
    chunk = length // (2 * ranks)
    first, second = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return range(first, first + chunk), range(second, second + chunk)


def place_of_tokens(length: int, group: Group) -> Tensor:
    """Where each token that this rank holds stands in the sequence: int64 [s]."""
    return torch.cat([torch.arange(places.start, places.stop) for places in _ranges(length, group)])


def places_of_residual(length: int, cp: Group, tp: Group, *, sp: bool) -> list[range]:
    """Where the tokens of a rank's residual stream stand in the sequence, in order: under `sp` a part of the rank's."""
    part, before, out = range(length // cp.size)[sequence_part(length // cp.size, tp, sp=sp)], 0, []
    for places in _ranges(length, cp):
        out.append(places[max(0, part.start - before) : max(0, part.stop - before)])
        before += len(places)
    return [places for places in out if places]


def _ranges(length: int, group: Group) -> tuple[range, ...]:
    return (range(length),) if group.size == 1 else chunks_of(group.rank, length, group.size)


def tokens_before(x: Tensor, count: int, group: Group) -> Tensor:
    """The tokens before each of a rank's two chunks, zeros before the sequence: [B, s, w] -> [B, 2, count, w].

    The ends of all chunks are gathered, for a chunk may be shorter than `count`; their gradients are summed back.
    """
    ends = torch.unflatten(x, 1, (2, -1))[:, :, -count:].flatten(1, 2)
    gathered = torch.unflatten(whole_sequence(ends, group, sp=True), 1, (group.size, -1)).movedim(1, 0)
    padded = functional.pad(_in_order(gathered), (0, 0, count, 0))
    chunks = chunks_of(group.rank, gathered.shape[2] * group.size, group.size)
    return torch.stack([padded[:, chunk.start : chunk.start + count] for chunk in chunks], 1)


class Passage(Protocol):
    """How keys and values, packed in one flat tensor, meet the queries of all ranks."""

    def visit(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """Call `work` with each rank's number and keys and values, this rank's first."""

    def collect(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Like `visit`; `work` returns a part of their gradient, in at least fp32; the sum of the parts of mine is returned."""


@dataclass(frozen=True)
class Ring:
    """From rank to rank: what comes next is on its way while `work` runs, and no rank ever holds more than two parts."""

    group: Group

    def visit(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """See `Passage.visit`."""
        for rank, coming in self._steps():
            passing = start_pass(mine, self.group) if coming else None
            work(rank, mine)
            mine = passing.wait() if passing is not None else mine

    def collect(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See `Passage.collect`: the sum follows its keys one step behind, and takes one more to come home."""
        following: Passing | None = None
        for rank, coming in self._steps():
            passing = start_pass(mine, self.group) if coming else None
            gradient = work(rank, mine)
            if following is not None:
                gradient += following.wait()
            following = start_pass(gradient, self.group)
            mine = passing.wait() if passing is not None else mine
        assert following is not None
        return following.wait()

    def _steps(self) -> Iterator[tuple[int, bool]]:
        """Whose keys and values are at hand, and whether there are more to come."""
        size = self.group.size
        for step in range(size):
            yield (self.group.rank - step) % size, step < size - 1


@dataclass(frozen=True)
class Gathered:
    """All at once, while `work` runs on what is at hand: in the forward and, so that only a rank's own keys and values are
    kept between them, again in the backward.
    """

    group: Group

    def visit(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """See `Passage.visit`."""
        for rank, part in self._parts(mine):
            work(rank, part)

    def collect(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See `Passage.collect`."""
        wide = torch.promote_types(mine.dtype, torch.float32)
        gradients = mine.new_empty(self.group.size, mine.numel(), dtype=wide)
        for rank, part in self._parts(mine):
            gradients[rank] = work(rank, part)
        reduce_scatter_into(out := torch.empty_like(mine, dtype=wide), gradients.view(-1), self.group)
        return out

    def _parts(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank's, this one's first."""
        parts = mine.new_empty(self.group.size, mine.numel())
        gathering = all_gather_into(parts.view(-1), mine, self.group, async_op=True)
        yield self.group.rank, mine
        if gathering is not None:
            gathering.wait()
        yield from ((rank, part) for rank, part in enumerate(parts) if rank != self.group.rank)


@dataclass(frozen=True)
class Blockwise:
    """Attention block by block of a chunk's queries and a chunk's keys; blocks that nobody sees into are skipped."""

    passage: Passage
    group: Group
    kernels: Kernels

    def attention(self, q: Tensor, k: Tensor, v: Tensor, how: Scores, see: See, whole: Whole | None = None) -> Tensor:
        """See `ContextParallel.attention`."""
        y: Tensor = _Blockwise.apply(q, k, v, how.sinks, how, see, self)  # type: ignore[no-untyped-call]
        return y

    def blocks(self, length: int, rank: int, see: See) -> Iterator[Block]:
        """The blocks of my queries and the keys of `rank` in which something is seen. My own chunks with themselves come
        first, so that every query sees some key from then on. Under causal attention a first chunk never sees a second
        one. Chunks that lie side by side are one block where they can.
        """
        mine = chunks_of(self.group.rank, length, self.group.size)
        theirs = chunks_of(rank, length, self.group.size)
        seen = {(i, j): list(see(mine[i], theirs[j])) for i, j in ((0, 0), (1, 1), (1, 0), (0, 1))}
        both, half = slice(0, 2 * len(mine[0])), len(mine[0])
        whole = tuple(_whole(parts, mine[i], theirs[j]) for (i, j), parts in seen.items())
        if whole == (CAUSAL, CAUSAL, ALL, None):
            yield Block(slice(None), both, both, CAUSAL, first=True)
        elif whole == (ALL, None, ALL, None):
            yield Block(slice(None), both, slice(0, half), ALL)
        elif whole == (None, ALL, ALL, None):
            yield Block(slice(None), slice(half, 2 * half), both, ALL)
        elif whole == (ALL, ALL, ALL, ALL):
            yield Block(slice(None), both, both, ALL, first=mine == theirs)
        else:
            for (i, j), parts in seen.items():
                for part in parts:
                    here, there = _within(part.queries, mine[i], i * half), _within(part.keys, theirs[j], j * half)
                    yield Block(part.rows, here, there, part.mask, first=part.queries == part.keys)


@dataclass(frozen=True)
class Alone:
    """Keys and values that no other rank has a part of."""

    def visit(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """See `Passage.visit`."""
        work(0, mine)

    def collect(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See `Passage.collect`."""
        return work(0, mine)


@dataclass(frozen=True)
class InParts(Blockwise):
    """Attention of whole sequences of which no one mask says what is seen."""

    @classmethod
    def by(cls, kernels: Kernels) -> InParts:
        """On one rank."""
        return cls(Alone(), Group("alone"), kernels)

    def blocks(self, length: int, rank: int, see: See) -> Iterator[Block]:
        """What is seen, part by part."""
        for part in see(range(length), range(length)):
            here, there = (_within(places, range(length), 0) for places in (part.queries, part.keys))
            yield Block(part.rows, here, there, part.mask, first=part.queries == part.keys)


@dataclass(frozen=True)
class Block:
    """Some rows' queries of a rank and keys of a rank, where they lie in the ranks' tokens; `first`: of the same tokens,
    none of which has seen a key before.
    """

    rows: slice
    queries: slice
    keys: slice
    mask: Mask
    first: bool = False


def _whole(parts: Sequence[Part], queries: range, keys: range) -> Mask | Literal["parts"] | None:
    """What is seen, if it is said of all queries and keys at once; None: nothing."""
    if not parts:
        return None
    part = parts[0]
    at_once = len(parts) == 1 and part.rows == slice(None) and (part.queries, part.keys) == (queries, keys)
    return part.mask if at_once else "parts"


def _within(places: range, chunk: range, start: int) -> slice:
    """Where places of a chunk lie among a rank's tokens, of which the chunk's begin at `start`."""
    first = places.start - chunk.start + start
    return slice(first, first + len(places))


class _Blockwise(Function):
    """Keeps q, k, v, y and a logarithm per query between forward and backward: nothing of any other rank."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Scores, see: See, kind: Blockwise
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        y = q.new_empty(*q.shape[:3], v.shape[-1], dtype=wide)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        length, split = q.shape[1] * kind.group.size, _Packing(k, v)

        def work(rank: int, packed: Tensor) -> None:
            keys, values = split.open(packed)
            for block in kind.blocks(length, rank, see):
                here, there = (block.rows, block.queries), (block.rows, block.keys)
                part, part_lse = kind.kernels.attend_block(q[here], keys[there], values[there], block.mask, how)
                if block.first:
                    y[here], lse[here] = part, part_lse
                else:
                    _merge(y[here], lse[here], part.to(wide), part_lse)

        kind.passage.visit(split.pack(k, v), work)
        if sinks is not None:
            y, lse = with_sinks(y, lse, sinks)
        out = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.how, ctx.see, ctx.kind = how, see, kind
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, sinks = ctx.saved_tensors
        kind: Blockwise = ctx.kind
        length, split = q.shape[1] * kind.group.size, _Packing(k, v)
        dq = torch.empty_like(q, dtype=lse.dtype)

        def work(rank: int, packed: Tensor) -> Tensor:
            keys, values = split.open(packed)
            own = rank == kind.group.rank
            gradient = (torch.empty_like if own else torch.zeros_like)(packed, dtype=lse.dtype)
            dk, dv = split.open(gradient)
            for block in kind.blocks(length, rank, ctx.see):
                here, there = (block.rows, block.queries), (block.rows, block.keys)
                parts = kind.kernels.attend_block_backward(
                    dy[here], q[here], keys[there], values[there], y[here], lse[here], block.mask, ctx.how
                )
                for whole, part in zip((dq[here], dk[there], dv[there]), parts, strict=True):
                    (whole.copy_ if block.first else whole.add_)(part)
            return gradient

        dk, dv = split.open(kind.passage.collect(split.pack(k, v), work))
        d_sinks = None if sinks is None else sinks_gradient(sinks, dy, y, lse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None


def _merge(y: Tensor, lse: Tensor, block_y: Tensor, block_lse: Tensor) -> None:
    """Add a block's result to what earlier blocks gave, in place: both become shares of the sum of exponentials."""
    y.lerp_(block_y, torch.sigmoid(block_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


class _Packing:
    """k and v of whatever sizes as one flat tensor, which is one message, and back without a copy."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.shapes = (k.shape, v.shape)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.flatten(), v.flatten()])

    def open(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        k, v = torch.split(packed, [shape.numel() for shape in self.shapes])
        return k.view(self.shapes[0]), v.view(self.shapes[1])


@dataclass(frozen=True)
class AllToAll:
    """Heads for sequence: between two exchanges each rank has all S tokens of H/N heads.

    With K < N every key/value head is sent to the N/K ranks that have its query heads.
    """

    group: Group

    def attention(self, q: Tensor, k: Tensor, v: Tensor, how: Scores, see: See, whole: Whole) -> Tensor:
        """See `ContextParallel.attention`."""
        own = self.share(q.shape[2])
        if how.sinks is not None:
            how = replace(how, sinks=how.sinks[own])
        if how.bias is not None:
            how = replace(how, bias=how.bias.heads(own))
        q, k, v = self.to_heads([q, k, v])
        return self.to_tokens(whole(q, k, v, how, own.start))

    def share(self, heads: int) -> slice:
        """Which of so many heads this rank has between the exchanges."""
        first = self.group.rank * heads // self.group.size
        return slice(first, first + max(1, heads // self.group.size))

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Several [B, s, H_i, d_i] of this rank's tokens -> [B, S, H_i/N or 1, d_i] of all tokens, in order."""
        size, (rows, tokens) = self.group.size, parts[0].shape[:2]
        parts = [t.repeat_interleave(size // t.shape[2], dim=2) if t.shape[2] < size else t for t in parts]
        shares = [t.reshape(rows, tokens, size, -1) for t in parts]
        received = _in_order(self._exchange(torch.cat(shares, -1).movedim(2, 0)))
        split = torch.split(received, [share.shape[-1] for share in shares], -1)
        return [part.reshape(rows, size * tokens, -1, t.shape[-1]) for part, t in zip(split, parts, strict=True)]

    def to_tokens(self, y: Tensor) -> Tensor:
        """[B, S, H/N, d] of all tokens -> [B, s, H, d] of this rank's."""
        mine = self._exchange(_by_rank(y.flatten(-2), self.group.size))
        return mine.movedim(0, 2).reshape(len(y), -1, self.group.size * y.shape[2], y.shape[3])

    def _exchange(self, x: Tensor) -> Tensor:
        """[N, ..]: x[r] goes to rank r, and what rank r sends comes to y[r]."""
        one_each = [1] * self.group.size
        return all_to_all(x, self.group, one_each, one_each)


def _in_order(parts: Tensor) -> Tensor:
    """[N, B, s, w] of the ranks' tokens -> [B, S, w], as they stand in the sequence."""
    first, second = parts.chunk(2, 2)
    return torch.cat([first, second.flip(0)]).movedim(0, 1).flatten(1, 2)


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """The inverse of `_in_order`: [B, S, w] -> [N, B, s, w]."""
    first, second = x.view(x.shape[0], 2 * ranks, -1, x.shape[-1]).movedim(1, 0).chunk(2)
    return torch.cat([first, second.flip(0)], 2)
