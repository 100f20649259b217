"""Bugs of Mamba-2, of its shared groups above all, for `mutations`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from parity.cases import VARIANTS, case
from parity.recurrence_mutations import (
    Patch,
    _decay_across_documents,
    _no_tokens_of_other_ranks,
    _states_stay,
    _without_sync,
    first_of_shared,
)
from torch import Tensor

from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model import mamba, mamba1
from mega_trainer.model.hybrid_mixer import ScaledProjection
from mega_trainer.model.mamba import MambaMixer
from mega_trainer.verify.layout_case import LayoutCase

swap = mock.patch.object
PLAIN: dict[str, Any] = {"layers": ["mamba+mlp", "attention"], "moe": None}
SHARED = case("hybrid", 4, parallel={"tp": 4, "sp": True}, variant=PLAIN, length=16)  # a group on every two ranks
PASSED = case("hybrid", 2, parallel={"cp": 2}, variant=PLAIN)
MAMBA1 = VARIANTS["hybrid"][9] | {"layers": ["mamba1+mlp", "attention"], "moe": None}
MAMBA1_TP = case("hybrid", 2, parallel={"tp": 2, "sp": True}, variant=MAMBA1, length=16)
HYBRID = VARIANTS["hybrid"][11] | {"layers": ["hybrid+mlp"], "moe": None, "mlp_multipliers": [0.7, 1.6]}
HYBRID_TP = case("hybrid", 2, parallel={"tp": 2}, variant=HYBRID, length=16)
MAMBA1_PASSED = case("hybrid", 2, parallel={"cp": 2}, variant=MAMBA1)
EXCHANGED = case("hybrid", 2, parallel={"cp": 2, "cp_kind": "alltoall"}, variant=PLAIN, length=16)


def _steps_of_the_first_heads() -> AbstractContextManager[Any]:
    """The heads that are exchanged take decays, biases and D of the first rank's."""
    real = MambaMixer._apply_scan

    def scanned(self: Any, parts: Any, steps: Any, heads: slice, chunks: Any, states: Any) -> Tensor:
        return real(self, parts, steps, slice(0, parts[0].shape[2]), chunks, states)

    return swap(MambaMixer, "_apply_scan", scanned)


def _padding_begins_a_document() -> AbstractContextManager[Any]:
    """What pads a span cuts off the state behind it."""
    real = SequenceChunks.chunk_document_starts.func  # type: ignore[attr-defined]

    def begins(self: SequenceChunks) -> Tensor | None:
        found: Tensor | None = real(self)
        if found is None or self.preceding_tokens is None:
            return found
        there = self.split_chunks(torch.ones_like(self.preceding_tokens))
        return torch.where(there > 0, found, torch.arange(self.size))

    return swap(SequenceChunks, "chunk_document_starts", property(begins))


def _no_state_behind_a_chunk() -> AbstractContextManager[Any]:
    """A token sees those of its chunk, and nothing before it."""
    real = TorchKernels.selective_scan
    nothing = lambda maps, added: 0 * added  # noqa: E731
    return swap(TorchKernels, "selective_scan", lambda self, steps, chunks, states: real(self, steps, chunks, nothing))


def _factors_of_the_next_rows() -> AbstractContextManager[Any]:
    """The rows of a projection have the factors of the part behind them."""
    real = ScaledProjection.__init__

    def build(self: Any, linear: Any, factors: Any) -> None:
        real(
            self,
            linear,
            [(width, factor) for (width, _), (_, factor) in zip(factors, factors[1:] + factors[:1], strict=True)],
        )

    return swap(ScaledProjection, "__init__", build)


MAMBAS: list[tuple[str, LayoutCase, Patch]] = [
    ("mamba: gradient of a shared group's projections not summed", SHARED, _without_sync("in_proj.B")),
    ("mamba: gradient of a shared group's convolution not summed", SHARED, _without_sync("conv1d.B")),
    (
        "mamba: norm over this rank's channels of a group alone",
        SHARED,
        lambda: swap(mamba, "sum_partial_results", lambda x, group, sp: x * group.size),
    ),
    (
        "mamba: gradient of a group's mean stays on its rank",
        SHARED,
        lambda: swap(mamba, "sum_input_gradient", lambda x, group: x),
    ),
    ("mamba: every rank takes the first group", SHARED, first_of_shared("mamba")),
    ("mamba: exchanged heads have the first rank's steps", EXCHANGED, _steps_of_the_first_heads),
    ("mamba: a state decays on into the next document", PASSED, _decay_across_documents),
    ("mamba: a span's padding is a document of its own", PASSED, _padding_begins_a_document),
    ("mamba: nothing comes from the chunks before", PASSED, _no_state_behind_a_chunk),
    (
        "mamba1: step sizes, B and C from this rank's channels alone",
        MAMBA1_TP,
        lambda: swap(mamba1, "sum_partial_results", lambda x, group, sp: x),
    ),
    (
        "mamba1: gradient of step sizes, B and C from this rank's channels alone",
        MAMBA1_TP,
        lambda: swap(mamba1, "sum_input_gradient", lambda x, group: x),
    ),
    ("mamba1: gradient of a norm's weight not summed", MAMBA1_TP, _without_sync("mamba1.B_norm")),
    ("mamba1: states stay on their rank", MAMBA1_PASSED, _states_stay),
    ("mamba1: a state decays on into the next document", MAMBA1_PASSED, _decay_across_documents),
    ("hybrid: a projection has the factors of other rows", HYBRID_TP, _factors_of_the_next_rows),
    ("mamba1: no tokens of other context ranks before the convolution", MAMBA1_PASSED, _no_tokens_of_other_ranks),
]
