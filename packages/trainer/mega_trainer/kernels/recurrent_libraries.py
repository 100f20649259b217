"""Libraries for recurrent mixers on GPUs: causal-conv1d, mamba-ssm and flash-linear-attention.

These kernels are differentiable and support documents. With states from other context ranks, or in generation, the torch
implementations (`selective_scan`, `gated_delta_rule`) are used, which can pass states on.

Legend: B batch, S tokens, c channels, k taps, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_trainer.kernels.gated_delta_rule import DeltaRuleInputs
from mega_trainer.kernels.selective_scan import ScanInputs
from mega_trainer.kernels.sequence_chunks import SequenceChunks

LEAST_CHUNK = 16  # least rows of a GEMM tile


class CausalConvKernel:
    """Short causal convolution by the causal-conv1d package, for two to four taps."""

    def __init__(self) -> None:
        from causal_conv1d import causal_conv1d_fn

        self.convolve = causal_conv1d_fn

    def __call__(
        self,
        x: Tensor,
        before: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        preceding_tokens: Tensor | None,
        *,
        silu: bool = True,
    ) -> Tensor:
        """Compute the short causal convolution, with the arguments of `Kernels.short_convolution`."""
        taps = 0 if before is None else before.shape[1]
        numbers = None if preceding_tokens is None else _document_numbers(preceding_tokens, taps)
        # `before` is passed as tokens: which document an initial state belongs to depends on the library's version
        tokens = x.contiguous() if before is None else torch.cat([before, x], 1)
        activation = "silu" if silu else None
        y: Tensor = self.convolve(tokens.transpose(1, 2), weight, bias, seq_idx=numbers, activation=activation)
        return y.transpose(1, 2)[:, taps:]


def _document_numbers(preceding_tokens: Tensor, before: int = 0) -> Tensor:
    """Return document numbers of tokens, int32 [B, before + S]; -1 for an earlier token that is in no document."""
    begins = torch.arange(preceding_tokens.shape[1], device=preceding_tokens.device) - preceding_tokens
    numbers = begins.clamp(min=-1) + 1  # 0 for a document that began before the first token
    back = torch.arange(before, 0, -1, device=preceding_tokens.device)
    known = torch.where(preceding_tokens[:, :1] >= back, numbers[:, :1], -1)
    return torch.cat([known, numbers], 1).int()


class MambaScanKernel:
    """Selective scan of whole sequences by the mamba-ssm package."""

    def __init__(self) -> None:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        self.scan = mamba_chunk_scan_combined

    def supports(self, steps: ScanInputs, chunks: SequenceChunks) -> bool:
        """Return whether the package has the scan: Mamba-2's, and Mamba-1's where each row is one document."""
        return steps.decay.dim() == 1 or chunks.preceding_tokens is None

    def __call__(self, steps: ScanInputs, chunks: SequenceChunks) -> Tensor:
        """Compute the selective scan of Mamba-2 or Mamba-1, with the arguments of `Kernels.selective_scan`."""
        if steps.decay.dim() == 2:
            return self._scan_channels(steps)
        size = max(LEAST_CHUNK, 1 << (chunks.size.bit_length() - 1))  # a power of two
        numbers = None if chunks.preceding_tokens is None else _document_numbers(chunks.preceding_tokens)
        y: Tensor = self.scan(steps.x, steps.d, steps.decay, steps.b, steps.c, chunk_size=size, seq_idx=numbers)
        return y

    def _scan_channels(self, steps: ScanInputs) -> Tensor:
        # imported here: the module needs the package's CUDA extension, which Mamba-2 does not
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        dtype = steps.d.dtype  # the kernel takes one dtype for x, the step sizes, B and C
        parts = (steps.x.squeeze(-1), steps.d, steps.b.squeeze(2), steps.c.squeeze(2))
        x, d, b, c = (part.to(dtype).transpose(1, 2).contiguous() for part in parts)
        y: Tensor = selective_scan_fn(x, d, steps.decay, b, c)
        return y.transpose(1, 2).unsqueeze(-1)


class FlaDeltaRuleKernel:
    """Gated delta rule of whole sequences by the flash-linear-attention library.
    With documents, the batch rows are concatenated to one, as the library requires.
    """

    def __init__(self) -> None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        self.rule = chunk_gated_delta_rule
        self.channel_rule = chunk_kda

    def __call__(self, updates: DeltaRuleInputs, chunks: SequenceChunks) -> Tensor:
        """Compute the gated delta rule, with the arguments of `Kernels.gated_delta_rule`."""
        parts = [updates.q, updates.k, updates.v, updates.g, updates.beta]
        device, host = chunks.cu_seqlens or (None, None)
        if device is not None:
            parts = [part.flatten(0, 1).unsqueeze(0) for part in parts]
        q, k, v, g, beta = parts
        if g.dim() == 3:
            y, _ = self.rule(
                q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=device, cu_seqlens_cpu=host
            )
        else:
            y, _ = self.channel_rule(
                q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=device, cu_seqlens_cpu=host
            )
        out: Tensor = y.view_as(updates.v)
        return out


@dataclass(frozen=True)
class RecurrentLibraries:
    """Kernels of optional packages that replace torch implementations in recurrent mixers.
    They replace the convolution, the scan and the delta rule.
    """

    conv: CausalConvKernel | None = None
    scan: MambaScanKernel | None = None
    delta: FlaDeltaRuleKernel | None = None
