"""Bugs of encoder-decoders, for `mutations`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from parity.cases import VARIANTS, case
from torch import Tensor

from mega_trainer.data import micro_batch as batches
from mega_trainer.kernels.kernel_interface import RelativePositionBias
from mega_trainer.model import cross_attention, encoder_decoder, parameter_builder, relative_position_bias
from mega_trainer.model.cross_attention import CrossAttention
from mega_trainer.model.encoder_decoder import EncoderDecoderModel
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.verify.layout_case import LayoutCase

Patch = Callable[[], AbstractContextManager[Any]]
swap = mock.patch.object

PP = case("t5", 4, layers=4, parallel={"tp": 2, "sp": True, "pp": 2, "schedule": "zb-h1"}, micro=4)
EXCHANGED = case("t5", 2, parallel={"cp": 2, "cp_kind": "alltoall"})
RING = case("t5", 2, parallel={"cp": 2}, variant=VARIANTS["t5"][3])


def _without_gradient(method: str) -> Patch:
    """What a method is given in the second stage gets no gradient there."""

    def patch() -> AbstractContextManager[Any]:
        owner: Any = EncoderDecoderModel if hasattr(EncoderDecoderModel, method) else CrossAttention
        real = getattr(owner, method)
        return swap(
            owner,
            method,
            lambda self, *given: real(self, *given[:-1], given[-1].detach() if self.groups.pp.rank else given[-1]),
        )

    return patch


def _bucket_off_by_one() -> AbstractContextManager[Any]:
    real = relative_position_bias.bucket_distances

    def buckets(distances: Tensor, count: int, most: int, *, causal: bool) -> Tensor:
        return real(distances - 1 if causal else distances, count, most, causal=causal)

    return swap(relative_position_bias, "bucket_distances", buckets)


def _padding_seen() -> AbstractContextManager[Any]:
    real = batches.build_encoder_batch
    return swap(batches, "build_encoder_batch", lambda *args: replace(real(*args), attention_mask=None))


def _padding_in_order_of_tokens() -> AbstractContextManager[Any]:
    """Padding told in the order of the sequence, of keys in the order of the ranks."""

    def source(tokens: Any, lengths: Any, device: Any, context: Any) -> Any:
        alone = replace(context, ranks=(0,), rank=0)
        return replace(
            real(tokens, lengths, device, context), attention_mask=real(tokens, lengths, device, alone).attention_mask
        )

    real = batches.build_encoder_batch
    return swap(batches, "build_encoder_batch", source)


def _encoder_sees_before_alone() -> AbstractContextManager[Any]:
    return swap(encoder_decoder, "SequenceMask", lambda *args, causal: SequenceMask(*args))


def _bias_of_the_first_heads() -> AbstractContextManager[Any]:
    return swap(
        RelativePositionBias,
        "select_heads",
        lambda self, own: RelativePositionBias(self.values[: own.stop - own.start], self.zero),
    )


def _table_of_the_first_rank() -> AbstractContextManager[Any]:
    real = encoder_decoder.build_relative_position_bias_table

    def table(build: LayerBuilder, name: str) -> Any:
        groups = replace(build.groups, tp=replace(build.groups.tp, rank=0))
        return real(replace(build, groups=groups), name)

    return swap(encoder_decoder, "build_relative_position_bias_table", table)


def _gathered_without_sum() -> AbstractContextManager[Any]:
    """The gradient of gathered keys is that of this rank's queries alone."""
    real = cross_attention.gather_from_sequence_parallel_region

    def gathered(x: Tensor, group: Any, *, sp: bool) -> Tensor:
        parts = list(real(x.detach(), group, sp=sp).chunk(group.size, 1))
        parts[group.rank] = x
        return torch.cat(parts, 1)

    return swap(cross_attention, "gather_from_sequence_parallel_region", gathered)


def _norm_without_sync() -> AbstractContextManager[Any]:
    real = parameter_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        alone = pieces[0].name == "model.encoder_norm.weight"
        return real(shape, pieces, **(options | {"grad_sync": ()} if alone else options))

    return swap(parameter_builder, "make_parameter", make)


SOURCES: list[tuple[str, LayoutCase, Patch]] = [
    (
        "encoder-decoder: gradient of the tables in the second stage lost",
        PP, _without_gradient("split_encoder_decoder_contexts"),
    ),
    (
        "encoder-decoder: gradient of what the encoder made lost in the second stage",
        PP, _without_gradient("project_keys_values"),
    ),
    ("encoder-decoder: buckets of the causal side off by one", PP, _bucket_off_by_one),
    ("encoder-decoder: cross attention sees padding", PP, _padding_seen),
    ("encoder-decoder: the encoder sees only what is before", PP, _encoder_sees_before_alone),
    ("encoder-decoder: every rank has the first heads' table", PP, _table_of_the_first_rank),
    ("encoder-decoder: gradient of the encoder's norm not summed", PP, _norm_without_sync),
    ("encoder-decoder: exchanged heads have the first heads' table", EXCHANGED, _bias_of_the_first_heads),
    ("encoder-decoder: padding in the order of tokens, keys in that of ranks", RING, _padding_in_order_of_tokens),
    ("encoder-decoder: gradient of gathered keys not summed", RING, _gathered_without_sum),
]  # fmt: skip
