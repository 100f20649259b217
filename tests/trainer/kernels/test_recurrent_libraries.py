"""Libraries for recurrent mixers, by stand-ins that do what their documentation says: they need a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.gated_delta_rule import DeltaRuleInputs
from mega_trainer.kernels.recurrent_libraries import (
    CausalConvKernel,
    FlaDeltaRuleKernel,
    MambaScanKernel,
    RecurrentLibraries,
)
from mega_trainer.kernels.selective_scan import ScanInputs
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.parallel.recurrent_state import pass_recurrent_states

B, S, G, H, P, N = 2, 37, 2, 4, 3, 5
DOCUMENTS = np.sort(np.random.default_rng(3).integers(0, 4, (B, S)), axis=1)
SIGHTS = {
    "open": SequenceMask(S, torch.device("cpu")),
    "closed": SequenceMask(S, torch.device("cpu"), DocumentBounds.from_positions(DOCUMENTS, DOCUMENTS).document_starts),
}


def library(monkeypatch: Any, name: str, **functions: Any) -> None:
    """Put a module of these functions where an import finds it."""
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType(parts[n - 1]))
    for function, what in functions.items():
        setattr(sys.modules[name], function, what)


def alone(maps: Tensor, added: Tensor) -> Tensor:
    return pass_recurrent_states(maps, added, None, CommGroup("cp"))[0]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def chunks(sight: SequenceMask, size: int = 8) -> SequenceChunks:
    return SequenceChunks(
        1, size, sight.count_preceding_tokens(CommGroup("cp")), whole=True, cu_seqlens=sight.cu_seqlens
    )


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """causal-conv1d's: [B, c, S] with numbers of documents, those below zero give nothing."""
    assert activation == "silu"
    assert seq_idx is None or seq_idx.dtype == torch.int32
    taps, tokens = weight.shape[1], x.shape[2]
    y = torch.zeros_like(x)
    for t in range(tokens):
        for back in range(min(taps, t + 1)):
            seen = 1.0 if seq_idx is None else (seq_idx[:, t] == seq_idx[:, t - back]).to(x.dtype)[:, None]
            y[:, :, t] += x[:, :, t - back] * weight[:, taps - 1 - back] * seen
    return F.silu(y if bias is None else y + bias[:, None])


@pytest.mark.parametrize("kind", SIGHTS)
@pytest.mark.parametrize("before", [False, True])
def test_the_convolution(monkeypatch: Any, kind: str, before: bool) -> None:
    library(monkeypatch, "causal_conv1d", causal_conv1d_fn=convolved)
    reach = SIGHTS[kind].count_preceding_tokens(CommGroup("cp"))
    reach = reach if reach is None or not before else reach + torch.tensor([[1], [9]]) * (reach == torch.arange(S))
    operands = drawn(B, S, 6), drawn(B, 3, 6) if before else None, drawn(6, 4), drawn(6), reach
    theirs = TorchKernels(recurrent=RecurrentLibraries(conv=CausalConvKernel())).short_convolution(*operands)
    torch.testing.assert_close(theirs, TorchKernels().short_convolution(*operands))


def scanned(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, seq_idx: Tensor | None = None
) -> Tensor:
    """mamba-ssm's, token by token."""
    assert chunk_size == 16
    b, c = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (B, C))
    state, out = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1]), []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        added = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
        state = (dt[:, t] * A).exp()[..., None, None] * state + added
        out.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]))
    return torch.stack(out, 1)


@pytest.mark.parametrize("kind", SIGHTS)
def test_the_scan(monkeypatch: Any, kind: str) -> None:
    library(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=scanned)
    steps = ScanInputs(drawn(B, S, H, P), drawn(B, S, H).abs(), -drawn(H).abs(), drawn(B, S, G, N), drawn(B, S, G, N))
    kernels, held = TorchKernels(recurrent=RecurrentLibraries(scan=MambaScanKernel())), chunks(SIGHTS[kind], 24)
    mine = TorchKernels().selective_scan(steps, held, alone)
    torch.testing.assert_close(kernels.selective_scan(steps, held, alone), mine)
    kernels.recurrent.scan.scan = None  # type: ignore[union-attr]
    torch.testing.assert_close(
        kernels.selective_scan(steps, replace(held, whole=False), alone), mine
    )  # states from elsewhere


def scanned_channels(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """mamba-ssm's for Mamba-1, token by token."""
    assert all(part.is_contiguous() and part.dtype == u.dtype for part in (u, delta, B, C))
    state, out = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        added = torch.einsum("bd,bd,bn->bdn", delta[:, :, t], u[:, :, t], B[:, :, t])
        state = (delta[:, :, t, None] * A).exp() * state + added
        out.append(torch.einsum("bdn,bn->bd", state, C[:, :, t]))
    return torch.stack(out, 2)


@pytest.mark.parametrize("kind", SIGHTS)
def test_the_scan_of_channels(monkeypatch: Any, kind: str) -> None:
    """It does not take documents, which are left to torch."""
    library(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=None)
    function = scanned_channels if kind == "open" else None
    library(monkeypatch, "mamba_ssm.ops.selective_scan_interface", selective_scan_fn=function)
    steps = ScanInputs(
        drawn(B, S, H, 1).float(), drawn(B, S, H).abs(), -drawn(H, N).abs(), drawn(B, S, 1, N), drawn(B, S, 1, N)
    )
    kernels, held = TorchKernels(recurrent=RecurrentLibraries(scan=MambaScanKernel())), chunks(SIGHTS[kind])
    mine = TorchKernels().selective_scan(steps, held, alone)
    torch.testing.assert_close(kernels.selective_scan(steps, held, alone), mine)
    torch.testing.assert_close(kernels.selective_scan(steps, replace(held, whole=False), alone), mine)


def ruled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **how: Any) -> tuple[Tensor, None]:
    """flash-linear-attention's: documents as one row, cut where it says."""
    assert how.pop("use_qk_l2norm_in_kernel")
    device, host = how.pop("cu_seqlens"), how.pop("cu_seqlens_cpu")
    assert not how
    parts, lengths = [q, k, v, g, beta], [q.shape[1]]
    if device is not None:
        assert device.equal(host)
        assert q.shape[0] == 1
        lengths = device.diff().tolist()
    rows = zip(*(part.split(lengths, 1) for part in parts), strict=True)
    done = [TorchKernels().gated_delta_rule(DeltaRuleInputs(*row), SequenceChunks(1, 4), alone) for row in rows]
    return torch.cat(done, 1), None


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", SIGHTS)
def test_the_delta_rule(monkeypatch: Any, kind: str, per_channel: bool) -> None:
    """Each of the two functions for its decays: the other one is missing."""
    library(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=None if per_channel else ruled)
    library(monkeypatch, "fla.ops.kda", chunk_kda=ruled if per_channel else None)
    groups, widths = (H, (N,)) if per_channel else (G, ())
    updates = DeltaRuleInputs(
        drawn(B, S, groups, N), drawn(B, S, groups, N), drawn(B, S, H, P), -drawn(B, S, H, *widths).abs(),
        drawn(B, S, H).sigmoid(),
    )  # fmt: skip
    kernels, held = TorchKernels(recurrent=RecurrentLibraries(delta=FlaDeltaRuleKernel())), chunks(SIGHTS[kind])
    torch.testing.assert_close(
        kernels.gated_delta_rule(updates, held, alone), TorchKernels().gated_delta_rule(updates, held, alone)
    )
