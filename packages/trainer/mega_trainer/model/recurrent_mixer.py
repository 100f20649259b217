"""Common part of recurrent mixers: short convolution, chunks, and exchange of states or heads between context ranks.

Either each rank computes with its own tokens and receives the states before them (`parallel.recurrent_state`), or ranks
exchange tokens for heads before the convolution, and back after the recurrence; the cheaper of the two is chosen.

Legend: B batch, S sequence, N context ranks, s = S/N tokens of a rank, c convolved channels of a tensor rank, H its heads
of P channels each, k taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.selective_scan import ScanPass
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.context_parallel import UlyssesAttention, gather_preceding_tokens
from mega_trainer.parallel.parallel_linear import ALONE
from mega_trainer.parallel.parameter_info import UniformInit
from mega_trainer.parallel.recurrent_state import pass_recurrent_states
from mega_trainer.parallel.tensor_parallel import SplitHeads, concat_parameters


def invert_softplus_of_steps(logarithms: Tensor, least: float) -> Tensor:
    """Return the inverse softplus of step sizes exp(`logarithms`), at least `least`: initial biases of step sizes."""
    steps = logarithms.exp().clamp(min=least)
    return steps + torch.log(-torch.expm1(-steps))


class ShortConvolution(nn.Module):
    """Depthwise causal convolution with k taps, with or without SiLU, within documents.
    It is b + weighted sum over the last k tokens of each channel.

    Args:
        build: builder of the model.
        name: prefix of the tensors `{name}.{block}.weight` [channels, k] and `.bias` [channels].
        blocks: channels in order, each block split by heads, or shared if it has fewer heads than there are ranks.
        taps: k.
        bias: add a bias.
        silu: return the silu of the sum.
    """

    def __init__(
        self,
        build: LayerBuilder,
        name: str,
        blocks: Sequence[SplitHeads],
        taps: int,
        *,
        bias: bool,
        silu: bool = True,
    ) -> None:
        super().__init__()
        self.cp, self.kernels, self.taps, self.silu = build.groups.cp, build.kernels, taps, silu
        uniform = UniformInit(-(taps**-0.5), taps**-0.5)

        def build_parameters(suffix: str, tail: tuple[int, ...]) -> nn.ParameterList:
            heads = [SplitHeads(f"{name}.{block.name}.{suffix}", block.count, block.size) for block in blocks]
            return nn.ParameterList(build.build_head_parameters(heads, tail, uniform=uniform))

        self.weights = build_parameters("weight", (taps,))
        self.biases = build_parameters("bias", ()) if bias else nn.ParameterList()

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Convolve this context rank's tokens [B, s, c] causally; tokens before its chunks come from other ranks."""
        assert isinstance(context.attention_mask, SequenceMask)
        preceding = context.attention_mask.count_preceding_tokens(self.cp)
        if self.cp.size == 1:
            return self._convolve(x, None, preceding)
        before = gather_preceding_tokens(x, self.taps - 1, self.cp).flatten(0, 1)
        chunks = torch.unflatten(x, 1, (2, -1)).flatten(0, 1)
        preceding = None if preceding is None else torch.unflatten(preceding, 1, (2, -1)).flatten(0, 1)
        return self._convolve(chunks, before, preceding).view_as(x)

    def convolve_channels(self, x: Tensor, context: ForwardContext, channels: Tensor) -> Tensor:
        """Convolve all tokens of some of this rank's channels, [B, S, c'], causally with k taps.
        `channels` are the numbers of the channels, int64 [c']; the result has the shape of x.
        """
        assert isinstance(context.attention_mask, SequenceMask)
        weight, bias = concat_parameters(self.weights), concat_parameters(self.biases)
        assert weight is not None
        preceding = context.attention_mask.count_preceding_tokens(ALONE)
        return self.kernels.short_convolution(
            x, None, weight[channels], None if bias is None else bias[channels], preceding, silu=self.silu
        )

    def convolve_step(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the next tokens x [B, S, c] in generation after `tail`, and return the result and the new tail.
        `tail` are the k - 1 tokens before x (zeros at first); each batch row is one document.
        """
        return self._convolve(x, tail, None), torch.cat([tail, x], 1)[:, x.shape[1] :]

    def _convolve(self, x: Tensor, before: Tensor | None, preceding_tokens: Tensor | None) -> Tensor:
        weight = concat_parameters(self.weights)
        assert weight is not None
        biases = concat_parameters(self.biases)
        return self.kernels.short_convolution(x, before, weight, biases, preceding_tokens, silu=self.silu)


class SiluActivation(nn.Module):
    """SiLU of each channel, in place of a short convolution in mixers without one."""

    taps = 1

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the SiLU of x [B, s, c]."""
        return F.silu(x)

    def convolve_channels(self, x: Tensor, context: ForwardContext, channels: Tensor) -> Tensor:
        """Return the SiLU of all tokens of some channels, x [B, S, c']."""
        return F.silu(x)

    def convolve_step(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Return the SiLU of the next tokens x [B, S, c] in generation, and the empty tail unchanged."""
        return F.silu(x), tail


class RecurrenceRule(Protocol):
    """Interface of a recurrence over the sequence, such as Mamba-2's scan or a gated delta rule, for some of a rank's heads."""

    def __call__(
        self, parts: Sequence[Tensor], steps: Sequence[Tensor], heads: slice, chunks: SequenceChunks, states: ScanPass
    ) -> Tensor:
        """Return outputs y [B, S, H, P] from the convolved blocks of some heads, and from their per-token numbers.
        Each of `parts` is [B, S, count, size], each of `steps` [B, S, H e], with e numbers for each head.
        """


class RecurrentMixer(nn.Module):
    """Token mixer of a short convolution and a recurrence over whole sequences, also under context parallelism.
    The convolution is of blocks of channels, and the recurrence is of their heads.

    Args:
        build, layer: builder of the model, and number of the layer.
        name: prefix of the convolution's tensors.
        blocks: convolved blocks, by heads that the tensor ranks split or share.
        taps, bias: of the convolution; taps None: SiLU without a convolution.
        chunk: tokens per chunk.
        heads: heads of the recurrence, of P channels.
        state: elements of a head's state and of its affine map, which context ranks exchange.
    """

    def __init__(
        self,
        build: LayerBuilder,
        layer: int,
        name: str,
        blocks: Sequence[SplitHeads],
        taps: int | None,
        *,
        bias: bool,
        chunk: int,
        heads: SplitHeads,
        state: int,
    ) -> None:
        super().__init__()
        tp = build.groups.tp
        self.cp, self.saved, self.chunk, self.state = build.groups.cp, build.saved, chunk, state
        self.layer, self.always_exchanges_heads = layer, build.cp_kind == "alltoall"
        self.counts, self.sizes = [max(1, block.count // tp.size) for block in blocks], [block.size for block in blocks]
        self.heads, self.size = heads.count // tp.size, heads.size
        self.conv = ShortConvolution(build, name, blocks, taps, bias=bias) if taps else SiluActivation()

    @property
    def convolved_channels(self) -> int:
        """Number of convolved channels of this tensor rank."""
        return sum(count * size for count, size in zip(self.counts, self.sizes, strict=True))

    def forward(
        self, rule: RecurrenceRule, conv_input: Tensor, steps: Sequence[Tensor], context: ForwardContext
    ) -> Tensor:
        """Convolve this rank's channels [B, s, c] and apply a recurrence: [B, s, H, P].
        `rule` is the recurrence, and `steps` [B, s, H e] are its per-token numbers for each head, e each.
        """
        widths = [step.shape[-1] for step in steps]
        if context.cache is not None:
            return context.cache.update_and_recur(
                self.layer, torch.cat([conv_input, *steps], -1), partial(self._continue_cached, rule, widths)
            )
        mix = (
            self._run_by_heads
            if self.cp.size > 1 and self._should_exchange_heads(conv_input, sum(widths) // self.heads)
            else self._run_by_states
        )
        y: Tensor = self.saved.checkpoint_module("attention", mix, rule, conv_input, context, *steps)
        return y

    def _should_exchange_heads(self, conv_input: Tensor, steps: int) -> bool:
        """Return whether to exchange heads: if configured, or if the heads divide evenly and fewer bytes are sent."""
        size = self.cp.size
        divisible = self.heads % size == 0 and all(n % size == 0 or size % n == 0 for n in self.counts)
        return self.always_exchanges_heads or (
            divisible and self.head_exchange_bytes(conv_input, steps) < self.state_passing_bytes(conv_input)
        )

    def state_passing_bytes(self, conv_input: Tensor) -> int:
        """Return the bytes that a forward gathers over context-parallel ranks to pass recurrent states.
        They are the states of the two chunks of each rank, and the convolution's preceding tokens.
        """
        halo = (self.conv.taps - 1) * conv_input.shape[-1] * conv_input.itemsize
        return conv_input.shape[0] * 2 * self.cp.size * (self.heads * self.state * max(4, conv_input.itemsize) + halo)

    def head_exchange_bytes(self, conv_input: Tensor, steps: int) -> int:
        """Return the bytes that a forward sends between context-parallel ranks to exchange tokens for heads.
        They are channels, numbers per head, and the outputs back.
        """
        channels = sum(max(n, self.cp.size) * size for n, size in zip(self.counts, self.sizes, strict=True))
        return (
            conv_input.shape[0]
            * conv_input.shape[1]
            * (channels + self.heads * (steps + self.size))
            * conv_input.itemsize
        )

    def _run_by_states(
        self, rule: RecurrenceRule, conv_input: Tensor, context: ForwardContext, *steps: Tensor
    ) -> Tensor:
        """Compute with this rank's tokens and the states passed from other ranks."""
        parts = self._split_blocks(self.conv(conv_input, context), self.counts)
        return rule(
            parts, steps, slice(None), self._make_chunks(conv_input, context, self.cp), partial(_pass_states, self.cp)
        )

    def _run_by_heads(
        self, rule: RecurrenceRule, conv_input: Tensor, context: ForwardContext, *steps: Tensor
    ) -> Tensor:
        """Compute with all tokens of a share of the heads."""
        exchange = UlyssesAttention(self.cp)
        received = exchange.exchange_tokens_for_heads(
            [
                *self._split_blocks(conv_input, self.counts),
                *(torch.unflatten(step, -1, (self.heads, -1)) for step in steps),
            ]
        )
        parts, steps = received[: len(self.counts)], tuple(step.flatten(-2) for step in received[len(self.counts) :])
        blocks = self._split_blocks(torch.arange(conv_input.shape[-1], device=conv_input.device), self.counts)
        channels = torch.cat([block[exchange.local_head_slice(len(block))].flatten() for block in blocks])
        joined = self.conv.convolve_channels(torch.cat([part.flatten(-2) for part in parts], -1), context, channels)
        chunks = self._make_chunks(joined, context, ALONE)
        parts = self._split_blocks(joined, [part.shape[2] for part in parts])
        y = rule(parts, steps, exchange.local_head_slice(self.heads), chunks, partial(_pass_states, ALONE))
        return exchange.exchange_heads_for_tokens(y.to(conv_input.dtype))

    def _continue_cached(
        self, rule: RecurrenceRule, widths: Sequence[int], x: Tensor, state: Sequence[Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Continue cached sequences from the convolution's tail and the state S; see `RecurrenceFunction`.

        The columns of x are channels, then the numbers per head, of these `widths`.
        """
        conv_input, *steps = torch.split(x, [self.convolved_channels, *widths], -1)
        zeros = conv_input.new_zeros(len(conv_input), self.conv.taps - 1, self.convolved_channels)
        tail, first = state or (zeros, None)
        convolved, tail = self.conv.convolve_step(conv_input, tail)
        carried = _CarriedState(first)
        chunks = SequenceChunks(1, min(self.chunk, conv_input.shape[1]))
        y = rule(self._split_blocks(convolved, self.counts), steps, slice(None), chunks, carried)
        assert carried.state is not None
        return y, (tail, carried.state)

    def _split_blocks(self, conv_input: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Split the channels [.., c] into blocks by heads: [.., count, size] each."""
        split = torch.split(conv_input, [count * size for count, size in zip(counts, self.sizes, strict=True)], -1)
        return [torch.unflatten(part, -1, (count, -1)) for part, count in zip(split, counts, strict=True)]

    def _make_chunks(self, x: Tensor, context: ForwardContext, group: CommGroup) -> SequenceChunks:
        """Return the chunks of the tokens of a rank in `group`."""
        assert isinstance(context.attention_mask, SequenceMask)
        spans, whole = (1, True) if group.size == 1 else (2, False)
        starts = context.attention_mask.cu_seqlens if whole else None
        return SequenceChunks(
            spans,
            min(self.chunk, x.shape[1] // spans),
            context.attention_mask.count_preceding_tokens(group),
            whole,
            starts,
        )


class _CarriedState:
    """`ScanPass` that starts from a given state, zero by default, and keeps the final state."""

    def __init__(self, state: Tensor | None) -> None:
        self.state = state

    def __call__(self, maps: Tensor, added: Tensor) -> Tensor:
        before, self.state = pass_recurrent_states(maps, added, self.state, ALONE)
        return before


def _pass_states(group: CommGroup, maps: Tensor, added: Tensor) -> Tensor:
    return pass_recurrent_states(maps, added, None, group)[0]
