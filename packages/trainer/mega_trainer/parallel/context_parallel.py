"""Context parallelism: the tokens of a sequence split over the ranks of a group, by ring, all-gather or all-to-all.

Under causal attention later tokens have more work. So a sequence is cut in 2 N chunks, and rank r holds the chunks r and
2 N - 1 - r: each rank computes the same number of the chunks' N (2 N + 1) visible pairs. Bidirectional attention is
balanced in any order, and uses the same one.

    ring        k and v move from rank to rank while each computes with its current part; results are merged by their
                log-sum-exp, and dK and dV move with k and v in the backward (arXiv:2310.01889)
    allgather   k and v of all ranks are gathered, dK and dV reduce-scattered; the backward gathers again
    alltoall    each rank receives all tokens of its share of the heads, and returns its results (arXiv:2309.14509)

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

from mega_trainer.distributed.comm import (
    CommGroup,
    RingTransfer,
    all_gather_into,
    all_to_all,
    reduce_scatter_into,
    start_ring_transfer,
)
from mega_trainer.kernels.attention_masks import ALL, CAUSAL, AttentionMaskBlock, AttentionMaskSpec
from mega_trainer.kernels.blockwise_attention import apply_attention_sinks, compute_attention_sinks_grad
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, Kernels
from mega_trainer.parallel.parallel_linear import ALONE
from mega_trainer.parallel.tensor_parallel import gather_from_sequence_parallel_region, local_sequence_slice

ContextParallelKind = Literal["ring", "allgather", "alltoall"]
# (query positions, key positions) -> mask of the visible pairs, in parts.
MaskPartsFunction = Callable[[range, range], Sequence[AttentionMaskBlock]]
# Attention of whole sequences by some of a tensor rank's heads: (q, k, v, score transform, number of the first head) -> y.
FullAttention = Callable[[Tensor, Tensor, Tensor, AttentionScoreTransform, int], Tensor]


class ContextParallelAttention(Protocol):
    """Interface of attention under context parallelism: this rank's queries attend to the keys of all context ranks."""

    def compute_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        how: AttentionScoreTransform,
        visible_parts: MaskPartsFunction,
        attend_whole: FullAttention,
    ) -> Tensor:
        """Compute attention of this rank's s tokens to the whole sequence under context parallelism.
        Shapes are q [B, s, H, d], k [B, s, K, d], v [B, s, K, e] -> [B, s, H, e].

        Blockwise kinds use `visible_parts`; the kind that exchanges heads has whole sequences, and uses `attend_whole`.
        """


def make_context_parallel_attention(
    kind: ContextParallelKind, group: CommGroup, kernels: Kernels
) -> ContextParallelAttention | None:
    """Return the context-parallel attention of `kind` (ring, allgather, alltoall), or None in a group of one rank."""
    if group.size == 1:
        return None
    if kind == "alltoall":
        return UlyssesAttention(group)
    return BlockwiseAttention(
        RingKeyValueExchange(group) if kind == "ring" else AllGatherKeyValueExchange(group), group, kernels
    )


def get_context_rank_chunks(rank: int, length: int, ranks: int) -> tuple[range, range]:
    """Return the index ranges of a context rank's chunks of a sequence: chunk `rank`, and its mirror from the end.
    The sequence has `length` tokens.
    """
    chunk = length // (2 * ranks)
    first, second = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return range(first, first + chunk), range(second, second + chunk)


def get_context_rank_token_indices(length: int, group: CommGroup) -> Tensor:
    """Return the index in the sequence of each token that this context rank has: int64 [s]."""
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in _rank_ranges(length, group)])


def residual_stream_token_ranges(length: int, cp: CommGroup, tp: CommGroup, *, sp: bool) -> list[range]:
    """Return the index ranges of this rank's residual stream: its context rank's tokens, or its slice with `sp`."""
    part, before, out = range(length // cp.size)[local_sequence_slice(length // cp.size, tp, sp=sp)], 0, []
    for chunk in _rank_ranges(length, cp):
        out.append(chunk[max(0, part.start - before) : max(0, part.stop - before)])
        before += len(chunk)
    return [indices for indices in out if indices]


def _rank_ranges(length: int, group: CommGroup) -> tuple[range, ...]:
    return (range(length),) if group.size == 1 else get_context_rank_chunks(group.rank, length, group.size)


def gather_context_parallel_tokens(x: Tensor, group: CommGroup) -> Tensor:
    """Gather tokens x [B, s, w] of all context ranks to [B, S, w] in order; the backward sums all ranks' gradients."""
    if group.size == 1:
        return x
    return _sequence_order(
        torch.unflatten(gather_from_sequence_parallel_region(x, group, sp=True), 1, (group.size, -1)).movedim(1, 0)
    )


def gather_preceding_tokens(x: Tensor, count: int, group: CommGroup) -> Tensor:
    """Return the `count` tokens before each of this context rank's two chunks: [B, s, w] -> [B, 2, count, w].
    Tokens before the sequence's start are zeros.

    The ends of all chunks are gathered, since a chunk may be shorter than `count`; the backward sums their gradients.
    """
    ends = gather_context_parallel_tokens(torch.unflatten(x, 1, (2, -1))[:, :, -count:].flatten(1, 2), group)
    padded = functional.pad(ends, (0, 0, count, 0))
    chunks = get_context_rank_chunks(group.rank, ends.shape[1], group.size)
    return torch.stack([padded[:, chunk.start : chunk.start + count] for chunk in chunks], 1)


class KeyValueExchange(Protocol):
    """Interface of an exchange of keys and values between context-parallel ranks.
    Keys and values are packed in one flat tensor; with the exchange, every rank's queries can attend to all of them.
    """

    def visit_all_ranks(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """Call `work` with every context rank's number and packed keys and values, this rank's (`mine`) first."""

    def collect_gradients(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call `work` for the gradients of each rank's keys and values; return the sum of all ranks' gradients of `mine`.
        `work` is called with the rank's number and packed keys and values, this rank's (`mine`) first. It returns the
        gradient of those keys and values from this rank's queries, in at least fp32.
        """


@dataclass(frozen=True)
class RingKeyValueExchange:
    """Exchange of keys and values around a ring of context-parallel ranks (`KeyValueExchange`).
    The next rank's share is sent while `work` runs on the present one, and no rank has more than two shares in memory.
    """

    group: CommGroup

    def visit_all_ranks(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """Call `work` with every context rank's number and keys and values, passed around a ring, this rank's first."""
        for rank, coming in self._ring_steps():
            passing = start_ring_transfer(mine, self.group) if coming else None
            work(rank, mine)
            mine = passing.wait() if passing is not None else mine

    def collect_gradients(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call `work` with each rank's keys and values, passed around a ring; return the sum of all ranks' gradients of `mine`.
        The sum of the gradients that it returns follows one step behind, and a last step brings it to its rank.
        """
        following: RingTransfer | None = None
        for rank, coming in self._ring_steps():
            passing = start_ring_transfer(mine, self.group) if coming else None
            gradient = work(rank, mine)
            if following is not None:
                gradient += following.wait()
            following = start_ring_transfer(gradient, self.group)
            mine = passing.wait() if passing is not None else mine
        assert following is not None
        return following.wait()

    def _ring_steps(self) -> Iterator[tuple[int, bool]]:
        """Yield the rank whose keys and values are present, and whether more follow."""
        size = self.group.size
        for step in range(size):
            yield (self.group.rank - step) % size, step < size - 1


@dataclass(frozen=True)
class AllGatherKeyValueExchange:
    """Exchange of keys and values between context-parallel ranks by all-gather (`KeyValueExchange`).
    It overlaps with the caller's work on this rank's own keys and values.

    The backward gathers again, so that only a rank's own keys and values are saved.
    """

    group: CommGroup

    def visit_all_ranks(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """Call `work` with every context rank's number and keys and values, from an all-gather, this rank's first."""
        for rank, part in self._gather_parts(mine):
            work(rank, part)

    def collect_gradients(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call `work` with all-gathered keys and values of each rank; return the reduce-scattered gradient of `mine`."""
        wide = torch.promote_types(mine.dtype, torch.float32)
        gradients = mine.new_empty(self.group.size, mine.numel(), dtype=wide)
        for rank, part in self._gather_parts(mine):
            gradients[rank] = work(rank, part)
        reduce_scatter_into(out := torch.empty_like(mine, dtype=wide), gradients.view(-1), self.group)
        return out

    def _gather_parts(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank's part, this rank's first."""
        parts = mine.new_empty(self.group.size, mine.numel())
        gathering = all_gather_into(parts.view(-1), mine, self.group, async_op=True)
        yield self.group.rank, mine
        if gathering is not None:
            gathering.wait()
        yield from ((rank, part) for rank, part in enumerate(parts) if rank != self.group.rank)


@dataclass(frozen=True)
class BlockwiseAttention:
    """Context-parallel attention block by block (`ContextParallelAttention`).
    A block has one chunk of queries and one chunk of keys; blocks that the mask hides are skipped.
    """

    exchange: KeyValueExchange
    group: CommGroup
    kernels: Kernels

    def compute_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        how: AttentionScoreTransform,
        visible_parts: MaskPartsFunction,
        attend_whole: FullAttention | None = None,
    ) -> Tensor:
        """Compute attention of this rank's s tokens to the whole sequence, block by block over exchanged keys.
        Shapes are q [B, s, H, d], k [B, s, K, d], v [B, s, K, e] -> [B, s, H, e].
        """
        y: Tensor = _BlockwiseFunction.apply(q, k, v, how.sinks, how, visible_parts, self)  # type: ignore[no-untyped-call]
        return y

    def visible_blocks(self, length: int, rank: int, visible_parts: MaskPartsFunction) -> Iterator[QueryKeyBlock]:
        """Yield the blocks of this rank's queries and `rank`'s keys that have pairs visible under the mask.

        Blocks of equal chunks come first, so that every query then has attended to a key. Under causal attention a first
        chunk never attends to a second one. Adjacent chunks are merged into one block if possible.
        """
        own = get_context_rank_chunks(self.group.rank, length, self.group.size)
        peer = get_context_rank_chunks(rank, length, self.group.size)
        visible = {(i, j): list(visible_parts(own[i], peer[j])) for i, j in ((0, 0), (1, 1), (1, 0), (0, 1))}
        both, half = slice(0, 2 * len(own[0])), len(own[0])
        whole = tuple(_single_mask(parts, own[i], peer[j]) for (i, j), parts in visible.items())
        if whole == (CAUSAL, CAUSAL, ALL, None):
            yield QueryKeyBlock(slice(None), both, both, CAUSAL, first=True)
        elif whole == (ALL, None, ALL, None):
            yield QueryKeyBlock(slice(None), both, slice(0, half), ALL)
        elif whole == (None, ALL, ALL, None):
            yield QueryKeyBlock(slice(None), slice(half, 2 * half), both, ALL)
        elif whole == (ALL, ALL, ALL, ALL):
            yield QueryKeyBlock(slice(None), both, both, ALL, first=own == peer)
        else:
            for (i, j), parts in visible.items():
                for part in parts:
                    queries = _chunk_slice(part.queries, own[i], i * half)
                    keys = _chunk_slice(part.keys, peer[j], j * half)
                    yield QueryKeyBlock(part.rows, queries, keys, part.mask, first=part.queries == part.keys)


@dataclass(frozen=True)
class LocalKeyValueExchange:
    """Exchange of keys and values without communication, for sequences that are whole on this rank."""

    def visit_all_ranks(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """Call `work` once, with rank number and packed keys and values of this rank (`mine`)."""
        work(0, mine)

    def collect_gradients(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call `work` once, with this rank's keys and values (`mine`), and return the gradient that it returns."""
        return work(0, mine)


@dataclass(frozen=True)
class LocalBlockwiseAttention(BlockwiseAttention):
    """Blockwise attention of whole sequences on one rank, for a mask of several rectangles.
    No single `AttentionMaskSpec` describes such a mask.
    """

    @classmethod
    def on_one_rank(cls, kernels: Kernels) -> LocalBlockwiseAttention:
        """Return the attention by rectangles of the mask that uses `kernels`, without communication."""
        return cls(LocalKeyValueExchange(), ALONE, kernels)

    def visible_blocks(self, length: int, rank: int, visible_parts: MaskPartsFunction) -> Iterator[QueryKeyBlock]:
        """Yield one block of queries and keys for each rectangle of the mask, over the whole sequence."""
        for part in visible_parts(range(length), range(length)):
            queries, keys = (_chunk_slice(indices, range(length), 0) for indices in (part.queries, part.keys))
            yield QueryKeyBlock(part.rows, queries, keys, part.mask, first=part.queries == part.keys)


@dataclass(frozen=True)
class QueryKeyBlock:
    """Block of an attention computation: a range of queries and of keys in some batch rows.
    It has a slice of the batch rows, of the queries and of the keys, and the mask between them.

    `first`: queries and keys are the same tokens, none of which has attended to a key before.
    """

    rows: slice
    queries: slice
    keys: slice
    mask: AttentionMaskSpec
    first: bool = False


def _single_mask(
    parts: Sequence[AttentionMaskBlock], queries: range, keys: range
) -> AttentionMaskSpec | Literal["parts"] | None:
    """Return the one mask of all queries and keys, "parts" if there are several, None if no pair is visible."""
    if not parts:
        return None
    part = parts[0]
    is_whole = len(parts) == 1 and part.rows == slice(None) and (part.queries, part.keys) == (queries, keys)
    return part.mask if is_whole else "parts"


def _chunk_slice(indices: range, chunk: range, start: int) -> slice:
    """Return the slice of indices of a chunk among a rank's tokens; the chunk's tokens begin at `start`."""
    first = indices.start - chunk.start + start
    return slice(first, first + len(indices))


class _BlockwiseFunction(Function):
    """Autograd function of blockwise attention; saves q, k, v, y and the log-sum-exp, and no tensor of another rank."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        how: AttentionScoreTransform,
        visible_parts: MaskPartsFunction,
        kind: BlockwiseAttention,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        y = q.new_empty(*q.shape[:3], v.shape[-1], dtype=wide)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        length, packing = q.shape[1] * kind.group.size, _KeyValuePacking(k, v)

        def attend_to_rank(rank: int, packed: Tensor) -> None:
            k_rank, v_rank = packing.view_key_value(packed)
            for block in kind.visible_blocks(length, rank, visible_parts):
                queries, keys = (block.rows, block.queries), (block.rows, block.keys)
                part, part_lse = kind.kernels.attend_block(q[queries], k_rank[keys], v_rank[keys], block.mask, how)
                if block.first:
                    y[queries], lse[queries] = part, part_lse
                else:
                    _merge_block(y[queries], lse[queries], part.to(wide), part_lse)

        kind.exchange.visit_all_ranks(packing.pack_key_value(k, v), attend_to_rank)
        if sinks is not None:
            y, lse = apply_attention_sinks(y, lse, sinks)
        out = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.how, ctx.visible_parts, ctx.kind = how, visible_parts, kind
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, sinks = ctx.saved_tensors
        kind: BlockwiseAttention = ctx.kind
        length, packing = q.shape[1] * kind.group.size, _KeyValuePacking(k, v)
        dq = torch.empty_like(q, dtype=lse.dtype)

        def backward_of_rank(rank: int, packed: Tensor) -> Tensor:
            k_rank, v_rank = packing.view_key_value(packed)
            own = rank == kind.group.rank
            gradient = (torch.empty_like if own else torch.zeros_like)(packed, dtype=lse.dtype)
            dk, dv = packing.view_key_value(gradient)
            for block in kind.visible_blocks(length, rank, ctx.visible_parts):
                queries, keys = (block.rows, block.queries), (block.rows, block.keys)
                parts = kind.kernels.attend_block_backward(
                    dy[queries], q[queries], k_rank[keys], v_rank[keys], y[queries], lse[queries], block.mask, ctx.how
                )
                for whole, part in zip((dq[queries], dk[keys], dv[keys]), parts, strict=True):
                    (whole.copy_ if block.first else whole.add_)(part)
            return gradient

        # no name for the packed tensors: it would keep them in memory until the last rank's part
        dk, dv = packing.view_key_value(kind.exchange.collect_gradients(packing.pack_key_value(k, v), backward_of_rank))
        d_sinks = None if sinks is None else compute_attention_sinks_grad(sinks, dy, y, lse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None


def _merge_block(y: Tensor, lse: Tensor, block_y: Tensor, block_lse: Tensor) -> None:
    """Merge a block's result into the result of earlier blocks, in place, weighted by their sums of exponentials."""
    y.lerp_(block_y, torch.sigmoid(block_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


class _KeyValuePacking:
    """Packing of k and v of any sizes in one flat tensor, sent as one message, and the views of them."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.shapes = (k.shape, v.shape)

    def pack_key_value(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.flatten(), v.flatten()])

    def view_key_value(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        k, v = torch.split(packed, [shape.numel() for shape in self.shapes])
        return k.view(self.shapes[0]), v.view(self.shapes[1])


@dataclass(frozen=True)
class UlyssesAttention:
    """Context-parallel attention by all-to-all (Ulysses, `ContextParallelAttention`).
    Between two exchanges each of N ranks has all S tokens of H/N heads.

    If K < N, every key/value head is sent to the N/K ranks that have its query heads.
    """

    group: CommGroup

    def compute_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        how: AttentionScoreTransform,
        visible_parts: MaskPartsFunction,
        attend_whole: FullAttention,
    ) -> Tensor:
        """Compute attention of this rank's s tokens to the whole sequence by all-to-all.
        Exchange tokens for heads, attend over whole sequences, and exchange back: q [B, s, H, d], k [B, s, K, d], v [B,
        s, K, e] -> [B, s, H, e].
        """
        own = self.local_head_slice(q.shape[2])
        if how.sinks is not None:
            how = replace(how, sinks=how.sinks[own])
        if how.bias is not None:
            how = replace(how, bias=how.bias.select_heads(own))
        q, k, v = self.exchange_tokens_for_heads([q, k, v])
        return self.exchange_heads_for_tokens(attend_whole(q, k, v, how, own.start))

    def local_head_slice(self, heads: int) -> slice:
        """Return the slice of `heads` attention heads that this context rank computes for the whole sequence."""
        first = self.group.rank * heads // self.group.size
        return slice(first, first + max(1, heads // self.group.size))

    def exchange_tokens_for_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Exchange this rank's tokens of all heads for all tokens of its share of the heads, by all-to-all.
        Tensors [B, s, H_i, d_i] of this rank's tokens become [B, S, H_i/N (at least 1), d_i] of all tokens in order,
        with N ranks.
        """
        size, (rows, tokens) = self.group.size, parts[0].shape[:2]
        parts = [t.repeat_interleave(size // t.shape[2], dim=2) if t.shape[2] < size else t for t in parts]
        shares = [t.reshape(rows, tokens, size, -1) for t in parts]
        received = _sequence_order(self._exchange_ranks(torch.cat(shares, -1).movedim(2, 0)))
        split = torch.split(received, [share.shape[-1] for share in shares], -1)
        return [part.reshape(rows, size * tokens, -1, t.shape[-1]) for part, t in zip(split, parts, strict=True)]

    def exchange_heads_for_tokens(self, y: Tensor) -> Tensor:
        """Exchange [B, S, H/N, d] of all tokens for [B, s, H, d] of this rank's tokens, with N ranks."""
        mine = self._exchange_ranks(_rank_order(y.flatten(-2), self.group.size))
        return mine.movedim(0, 2).reshape(len(y), -1, self.group.size * y.shape[2], y.shape[3])

    def _exchange_ranks(self, x: Tensor) -> Tensor:
        """Exchange [N, ..]: x[r] is sent to rank r, and y[r] is received from rank r."""
        one_each = [1] * self.group.size
        return all_to_all(x, self.group, one_each, one_each)


def _sequence_order(parts: Tensor) -> Tensor:
    """Reorder [N, B, s, w] of the ranks' tokens -> [B, S, w] in sequence order."""
    first, second = parts.chunk(2, 2)
    return torch.cat([first, second.flip(0)]).movedim(0, 1).flatten(1, 2)


def _rank_order(x: Tensor, ranks: int) -> Tensor:
    """Reorder [B, S, w] -> [N, B, s, w], the inverse of `_sequence_order`."""
    first, second = x.view(x.shape[0], 2 * ranks, -1, x.shape[-1]).movedim(1, 0).chunk(2)
    return torch.cat([first, second.flip(0)], 2)
