"""Bugs of recurrent mixers, of delta rules above all, and of gated attention, for `mutations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from parity.cases import VARIANTS, case
from torch import Tensor

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.model import attention, kimi_delta_attention, parameter_builder, recurrent_mixer
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.model.gated_delta_net import GatedDeltaNet
from mega_trainer.model.kimi_delta_attention import KimiDeltaAttention
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.lightning_attention import LightningAttention
from mega_trainer.parallel import recurrent_state
from mega_trainer.verify.layout_case import LayoutCase

Patch = Callable[[], AbstractContextManager[Any]]
swap = mock.patch.object

GATED = VARIANTS["hybrid"][3] | {"layers": ["delta+mlp", "attention"], "moe": None}
TP = case("hybrid", 4, parallel={"tp": 4, "sp": True}, variant=GATED, length=16)
PASSED = case("hybrid", 2, parallel={"cp": 2}, variant=GATED)
CONVOLVED = case(
    "hybrid", 2, parallel={"cp": 2}, variant=VARIANTS["hybrid"][5] | {"layers": ["conv", "mlp"], "moe": None}
)
KDA = VARIANTS["hybrid"][6] | {"layers": ["kda+mlp", "attention"], "moe": None}
KDA_TP = case("hybrid", 2, parallel={"tp": 2}, variant=KDA, length=16)
KDA_PASSED = case("hybrid", 2, parallel={"cp": 2}, variant=KDA)
KDA_EXCHANGED = case("hybrid", 2, parallel={"cp": 2, "cp_kind": "alltoall"}, variant=KDA, length=16)
NEGATIVE = case(
    "hybrid",
    2,
    parallel={"tp": 2},
    variant=VARIANTS["hybrid"][12] | {"layers": ["delta+mlp", "attention+mlp"], "moe": None},
)
LIGHTNING = VARIANTS["hybrid"][8] | {"layers": ["lightning+mlp", "attention"], "moe": None, "residual_factors": {}}
LIGHTNING_TP = case("hybrid", 2, parallel={"tp": 2}, variant=LIGHTNING, length=16)
EXCHANGED = case("hybrid", 2, parallel={"cp": 2, "cp_kind": "alltoall"}, variant=GATED, length=16)


def _without_sync(part: str) -> Patch:
    """Gradients of the tensors with `part` in their names stay with the tensor rank."""
    real = parameter_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        return real(shape, pieces, **(options | {"grad_sync": ()} if part in pieces[0].name else options))

    return lambda: swap(parameter_builder, "make_parameter", make)


def _decay_across_documents() -> AbstractContextManager[Any]:
    return swap(
        SequenceChunks,
        "document_started_before_chunk",
        property(lambda self: None if self.chunk_document_starts is None else self.chunk_document_starts < self.size),
    )


def _taps_across_documents() -> AbstractContextManager[Any]:
    """The convolution of a context rank's tokens sees its neighbors', whatever document these are of."""
    real = SequenceMask.count_preceding_tokens
    told = lambda self, group: None if group.size > 1 else real(self, group)  # noqa: E731
    return swap(
        recurrent_mixer.ShortConvolution,
        "forward",
        _with(recurrent_mixer.ShortConvolution.forward, SequenceMask, "count_preceding_tokens", told),
    )


def _with(function: Any, owner: Any, name: str, value: Any) -> Any:
    """The function, in which alone something is another."""

    def run(*args: Any) -> Any:
        with swap(owner, name, value):
            return function(*args)

    return run


def _halo_of_own_tokens() -> AbstractContextManager[Any]:
    """The second chunk goes on where the rank's first one ended."""

    def before(x: Tensor, count: int, group: CommGroup) -> Tensor:
        first = x.unflatten(1, (2, -1))[:, 0, -count:]
        return torch.stack([torch.zeros_like(first), first], 1)

    return swap(recurrent_mixer, "gather_preceding_tokens", before)


def _halo_without_gradient() -> AbstractContextManager[Any]:
    real = recurrent_mixer.gather_preceding_tokens
    return swap(recurrent_mixer, "gather_preceding_tokens", lambda *args: real(*args).detach())


def _states_stay() -> AbstractContextManager[Any]:
    """Each rank begins with nothing, and its second chunk goes on behind its first."""
    real = recurrent_mixer.pass_recurrent_states
    return swap(recurrent_mixer, "pass_recurrent_states", lambda *args: real(*args[:3], CommGroup("alone")))


def _states_in_order_of_ranks() -> AbstractContextManager[Any]:
    real = recurrent_state._gather_spans

    def gathered(parts: Sequence[Tensor], group: CommGroup) -> list[Tensor]:
        return [torch.cat([one[:, :2], one[:, 2:].flip(1)], 1) for one in real(parts, group)]

    return swap(recurrent_state, "_gather_spans", gathered)


def _maps_of_the_last_chunk() -> AbstractContextManager[Any]:
    """What a stretch of tokens keeps of a state is taken from its last chunk alone."""
    real = recurrent_state.scan_affine_maps

    def fold(maps: Tensor, added: Tensor, first: Tensor) -> Tensor:
        whole = added.shape == maps.shape and not added.any()
        return torch.cat([first[:, None], maps], 1) if whole else real(maps, added, first)

    return swap(recurrent_state, "scan_affine_maps", fold)


def _decays_of_the_first_heads(mixer: Any = GatedDeltaNet) -> AbstractContextManager[Any]:
    """The heads that are exchanged take the numbers of the first rank's."""
    real = mixer._apply_delta_rule

    def rule(self: Any, parts: Any, steps: Any, heads: slice, chunks: Any, states: Any) -> Tensor:
        return real(self, parts, steps, slice(0, parts[2].shape[2]), chunks, states)

    return swap(mixer, "_apply_delta_rule", rule)


def _weaker_on_one_rank() -> AbstractContextManager[Any]:
    """The delta net of rank 0 writes with half the strength."""
    real = GatedDeltaNet.__init__

    def build(self: Any, builder: LayerBuilder, layer: int) -> None:
        real(self, builder, layer)
        self.strength = self.strength if builder.groups.tp.rank else 1.0

    return swap(GatedDeltaNet, "__init__", build)


def _latents_without_sum() -> AbstractContextManager[Any]:
    """The gradient of the gates' latents is of this rank's heads alone."""
    return swap(kimi_delta_attention, "gather_from_sequence_parallel_region", lambda x, group, sp: x)


def _fixed_decays_of_the_first_rank() -> AbstractContextManager[Any]:
    real = LightningAttention._apply_scan

    def scan(self: Any, *given: Any) -> Tensor:
        self.first_head = 0
        return real(self, *given)

    return swap(LightningAttention, "_apply_scan", scan)


def _channels_of_the_first_rank() -> AbstractContextManager[Any]:
    """The convolution of exchanged heads takes the first rank's weights."""
    real = recurrent_mixer.ShortConvolution.convolve_channels

    def of_sequences(self: Any, x: Tensor, context: Any, channels: Tensor) -> Tensor:
        return real(self, x, context, channels - channels.min())

    return swap(recurrent_mixer.ShortConvolution, "convolve_channels", of_sequences)


def _no_tokens_of_other_ranks() -> AbstractContextManager[Any]:
    real = recurrent_mixer.gather_preceding_tokens
    return swap(recurrent_mixer, "gather_preceding_tokens", lambda *given: torch.zeros_like(real(*given)))


def _gate_of_another_head() -> AbstractContextManager[Any]:
    return swap(attention, "apply_sigmoid_gate", lambda y, gate: y * torch.sigmoid(gate.roll(1, -1)))


def first_of_shared(mixer: str) -> Patch:
    """Every tensor rank takes the first of the heads or groups that ranks share in a mixer of that name."""
    real = parameter_builder.get_fused_heads_layout

    def first(blocks: Any, tail: Any, group: CommGroup) -> Any:
        shared = mixer in blocks[0].name and blocks[0].count < group.size
        return real(blocks, tail, replace(group, rank=0) if shared else group)

    return lambda: swap(parameter_builder, "get_fused_heads_layout", first)


def _norms_centered() -> AbstractContextManager[Any]:
    """The norm before the output is centered around one as the others are, on every rank but the first."""
    real = LayerBuilder.build_replicated

    def replicated(self: LayerBuilder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        wrong = "linear_attn.norm" in name and self.groups.tp.rank > 0
        return real(self, name, shape, **(options | {"fill": 0.0} if wrong else options))

    return swap(LayerBuilder, "build_replicated", replicated)


RECURRENCES: list[tuple[str, LayoutCase, Patch]] = [
    ("delta: key heads' gradients not summed over the ranks that share one", TP, _without_sync("in_proj.q")),
    ("delta: gradient of a shared convolution not summed", TP, _without_sync("conv1d.q")),
    ("delta: gradient of the heads' norm not summed", TP, _without_sync("linear_attn.norm")),
    ("delta: every rank takes the first key head", TP, first_of_shared("linear_attn")),
    ("delta: another start of a norm on other ranks", TP, _norms_centered),
    ("delta: a state goes on into the next document", PASSED, _decay_across_documents),
    ("convolution: taps across documents", PASSED, _taps_across_documents),
    ("convolution: the tokens before a chunk are the rank's own", PASSED, _halo_of_own_tokens),
    ("convolution: tokens before a chunk get no gradient", PASSED, _halo_without_gradient),
    ("delta: states stay on their rank", PASSED, _states_stay),
    ("delta: states in the order of ranks", PASSED, _states_in_order_of_ranks),
    ("delta: a stretch of tokens has the map of its last chunk", PASSED, _maps_of_the_last_chunk),
    ("delta: exchanged heads decay as the first rank's", EXCHANGED, _decays_of_the_first_heads),
    ("convolution: exchanged heads have the first rank's weights", EXCHANGED, _channels_of_the_first_rank),
    ("short convolution: no tokens of other context ranks", CONVOLVED, _no_tokens_of_other_ranks),
    ("kda: gradient of the gates' latents not summed", KDA_TP, _latents_without_sum),
    ("kda: states stay on their rank", KDA_PASSED, _states_stay),
    (
        "kda: exchanged heads decay as the first rank's",
        KDA_EXCHANGED,
        lambda: _decays_of_the_first_heads(KimiDeltaAttention),
    ),
    ("delta: strengths of one rank's heads are at most 1", NEGATIVE, _weaker_on_one_rank),
    ("lightning: every rank has the decays of the first heads", LIGHTNING_TP, _fixed_decays_of_the_first_rank),
    ("attention: the gate of a neighboring channel", TP, _gate_of_another_head),
]
