"""Bugs of encoders, for `mutations`: of attention to both sides, of segments and of the heads behind the layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from parity.cases import SHARED_BIAS, VARIANTS, case
from parity.recurrence_mutations import Patch
from torch import Tensor

from mega_trainer.kernels.attention_masks import BandMask
from mega_trainer.model import decoder
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.model.input_embeddings import PositionTypeEmbeddings
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.output_heads import SequencePooler
from mega_trainer.run import train_step
from mega_trainer.verify.layout_case import LayoutCase

swap = mock.patch.object
WINDOW = VARIANTS["encoder"][2]
TP, SP = (case("encoder", 2, parallel={"tp": 2, "sp": sp}) for sp in (False, True))
RING = case("encoder", 2, parallel={"cp": 2})
RING_WINDOW = case("encoder", 2, parallel={"cp": 2}, variant=WINDOW)
DP = case("encoder", 2, micro=2)
BIASED = case("encoder", 2, parallel={"tp": 2}, variant=SHARED_BIAS)
NARROW = case("encoder", 2, parallel={"tp": 2, "sp": True}, variant=VARIANTS["encoder"][4])


def _short_behind() -> AbstractContextManager[Any]:
    """A query sees one key fewer behind it than before it."""
    real = SequenceMask._band

    def band(self: SequenceMask, window: int | None) -> BandMask:
        whole = real(self, window)
        return whole if whole.right is None else replace(whole, right=whole.right - 1)

    return swap(SequenceMask, "_band", band)


def _parts(change: Callable[[SequenceMask], SequenceMask]) -> Patch:
    """What context ranks see of each other's tokens, of other sequences than they have."""
    real = SequenceMask.list_mask_blocks

    def parts(self: SequenceMask, queries: range, keys: range, window: int | None) -> Any:
        return real(self if queries == keys else change(self), queries, keys, window)

    return lambda: swap(SequenceMask, "list_mask_blocks", parts)


def _types_of_the_first_rank_alone() -> AbstractContextManager[Any]:
    real = PositionTypeEmbeddings.forward

    def forward(self: PositionTypeEmbeddings, x: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        return real(self, x, positions, None if self.tp.rank else types)

    return swap(PositionTypeEmbeddings, "forward", forward)


def _first_token_on_every_rank() -> AbstractContextManager[Any]:
    """Each takes the first of its tokens for that of the sample."""
    real = SequencePooler.segment_order_loss

    def loss(self: SequencePooler, x: Tensor, pairs: Any) -> Tensor:
        self.has_first = True
        return real(self, x, pairs)

    return swap(SequencePooler, "segment_order_loss", loss)


def _pair_head_summed() -> AbstractContextManager[Any]:
    """Tensor ranks that each have the whole gradient of the pair head add theirs up."""
    real = LayerBuilder.build_replicated

    def replicated(self: LayerBuilder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        parts = {"partial_grad": True} if name.startswith("pair_head") else {}
        return real(self, name, shape, **{**options, **parts})

    return swap(LayerBuilder, "build_replicated", replicated)


def _output_bias_of_the_first_rank() -> AbstractContextManager[Any]:
    """Each takes its part of the vocabulary's bias for the first rank's."""
    real = LayerBuilder.build_vocab_bias

    def vocabulary_bias(self: LayerBuilder, name: str) -> torch.nn.Parameter:
        first = replace(self, groups=replace(self.groups, tp=replace(self.groups.tp, rank=0)))
        return real(first, name)

    return swap(LayerBuilder, "build_vocab_bias", vocabulary_bias)


def _bias_of_the_first_heads() -> AbstractContextManager[Any]:
    """Each tensor rank takes the first rank's heads of the table."""
    real = decoder.build_relative_position_bias_table

    def table(build: LayerBuilder, name: str) -> torch.nn.Parameter:
        return real(replace(build, groups=replace(build.groups, tp=replace(build.groups.tp, rank=0))), name)

    return swap(decoder, "build_relative_position_bias_table", table)


def _projection_gradient_of_a_part() -> AbstractContextManager[Any]:
    """Tensor ranks that have parts of a sequence keep their part of the gradient of the embeddings' projection."""
    real = LayerBuilder.build_replicated

    def replicated(self: LayerBuilder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        return real(replace(self, sp=False) if name.startswith("model.embed_proj") else self, name, shape, **options)

    return swap(LayerBuilder, "build_replicated", replicated)


ENCODERS: list[tuple[str, LayoutCase, Patch]] = [
    ("encoder: a window one too short behind", RING_WINDOW, _short_behind),
    ("encoder: keys behind a chunk are not seen", RING, _parts(lambda it: replace(it, causal=True))),
    ("encoder: documents are open between chunks", RING, _parts(lambda it: replace(it, document_starts=None))),
    ("encoder: types of segments on the first rank alone", SP, _types_of_the_first_rank_alone),
    ("encoder: every sequence part has a first token", SP, _first_token_on_every_rank),
    ("encoder: every context part has a first token", RING, _first_token_on_every_rank),
    ("encoder: whole gradients of the pair head are summed", TP, _pair_head_summed),
    ("encoder: the output's bias is the first rank's", TP, _output_bias_of_the_first_rank),
    (
        "encoder: each rank projects its embeddings with its part of the gradient",
        NARROW,
        _projection_gradient_of_a_part,
    ),
    ("encoder: the shared bias of the first rank's heads", BIASED, _bias_of_the_first_heads),
    (
        "encoder: pairs weigh as tokens do",
        DP,
        lambda: swap(train_step, "normalize_auxiliary_loss_weights", lambda batches, tokens: batches),
    ),
]
