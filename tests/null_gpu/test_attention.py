"""FlexAttention compiles for every mask, soft cap and shape that one process meets."""

from __future__ import annotations

import pytest
import torch

from mega_trainer.kernels.attention_masks import CAUSAL, AttentionMaskSpec, BandMask, PackedDocumentMask
from mega_trainer.kernels.flex_attention import FlexAttentionKernel
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.torch_kernels import TorchKernels

CUDA, HEADS = torch.device("cuda"), 4
WINDOW = BandMask(left=40, right=0)


def documents(*lengths: int, band: BandMask = WINDOW) -> PackedDocumentMask:
    return PackedDocumentMask.from_lengths(list(lengths), band, CUDA)


def test_shapes_masks_and_caps_that_change() -> None:
    kernels = TorchKernels(flash=FlexAttentionKernel())
    sinks = torch.zeros(HEADS, device=CUDA, requires_grad=True)
    calls: list[tuple[int, int, AttentionMaskSpec, float]] = [
        (2, 64, documents(64, 64), 20.0), (4, 32, documents(10, 22, 96), 20.0), (2, 64, documents(64, 64), 30.0),
        (2, 256, WINDOW, 20.0), (2, 128, WINDOW, 20.0), (1, 128, CAUSAL, 30.0),
    ]  # fmt: skip
    for batch, length, mask, cap in calls:
        q, k, v = (
            torch.zeros(batch, length, heads, 32, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, 2, 2)
        )
        y = kernels.attention(q, k, v, mask, AttentionScoreTransform(0.1, softcap=cap, sinks=sinks))
        gradients = torch.autograd.grad(y.sum(), (q, k, v, sinks))
        assert y.shape == q.shape
        assert [gradient.shape for gradient in gradients] == [each.shape for each in (q, k, v, sinks)]


@pytest.fixture(autouse=True)
def _limits_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
