"""Kernels of extensions: which calls they get, and the comparison with mega's by a verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from extension_cases import EXAMPLES, SIZES
from torch import Tensor

from mega_common.errors import ConfigError
from mega_common.extension_entries import Kernel
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.kernels.attention_masks import CAUSAL, AttentionMaskSpec, BandMask, PackedDocumentMask
from mega_trainer.kernels.extension_kernels import ExtensionKernels
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.verify.kernel_comparison import KERNEL_BOUNDS, compare_kernels
from mega_trainer.verify.layout_case import LayoutCase

EXAMPLE = EXAMPLES / "sampler_tokenizer_kernel.py"
BASE = TorchKernels()
CPU = torch.device("cpu")


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, left: int | None, right: int | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Attention by matrix products, as the documentation describes its arguments."""
    batch, length, heads = q.shape[:3]
    k, v = (part.repeat_interleave(heads // part.shape[2], 2) for part in (k, v))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = torch.ones(batch, 1, length, length, dtype=torch.bool)
    seen &= (distance <= (length if left is None else left)) & (distance >= -(length if right is None else right))
    if cu_seqlens is not None:
        document = torch.bucketize(torch.arange(batch * length), cu_seqlens, right=True).view(batch, 1, length, 1)
        seen &= document == document.transpose(-1, -2)
    scores = (torch.einsum("bshd,bthd->bhst", q, k) * scale).masked_fill(~seen, float("-inf"))
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


@pytest.mark.parametrize(
    "mask", [CAUSAL, BandMask(left=2, right=0), PackedDocumentMask.from_lengths([3, 5, 8], CAUSAL, CPU)]
)
def test_attention_gets_the_mask_as_plain_arguments(mask: AttentionMaskSpec) -> None:
    kernels = ExtensionKernels(BASE, [Kernel("attention", attend)])
    q, k, v = (torch.randn(2, 8, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    how = AttentionScoreTransform(0.5)
    torch.testing.assert_close(kernels.attention(q, k, v, mask, how), BASE.attention(q, k, v, mask, how))


def test_other_calls_are_mega_s() -> None:
    def refuse(*arguments: Any, **options: Any) -> Tensor:
        raise AssertionError("called")

    every = ("rms_norm", "layer_norm", "attention", "gated_activation", "short_convolution")
    kernels = ExtensionKernels(BASE, [Kernel(name, refuse, lambda *arguments, **options: False) for name in every])  # type: ignore[arg-type]
    x, weight = torch.randn(2, 6, 8), torch.randn(8)
    q, how = x.view(2, 6, 2, 4), AttentionScoreTransform(1.0)
    capped = AttentionScoreTransform(1.0, softcap=2.0)
    only_mega = ExtensionKernels(BASE, [Kernel("attention", refuse)])
    for mine, wanted in (
        (kernels.add_rms_norm(x, x, weight, 1e-6)[1], BASE.rms_norm(2 * x, weight, 1e-6)),
        (kernels.layer_norm(x, weight, None, 1e-6), BASE.layer_norm(x, weight, None, 1e-6)),
        (kernels.attention(q, q, q, CAUSAL, how), BASE.attention(q, q, q, CAUSAL, how)),
        (only_mega.attention(q, q, q, CAUSAL, capped), BASE.attention(q, q, q, CAUSAL, capped)),
        (kernels.gated_activation(x, "swiglu"), BASE.gated_activation(x, "swiglu")),
        (
            kernels.short_convolution(x, None, torch.ones(8, 3), None, None),
            BASE.short_convolution(x, None, torch.ones(8, 3), None, None),
        ),
        (kernels.linear_forward(x, torch.eye(8)), x),
    ):
        torch.testing.assert_close(mine, wanted)


def compare(tmp_path: Path, before: str = "", after: str = "") -> Any:
    """Comparison of the example's norm, with a change of one line."""
    text = EXAMPLE.read_text()
    assert not before or text.count(before) == 1
    file = tmp_path / "changed.py"
    file.write_text(text.replace(before, after))
    sections = {"extensions": [str(file)], "kernels": {"functions": ["recomputed_norm"]}}
    case = LayoutCase("kernel", {**SIZES, "num_layers": 1}, sections=sections)
    (found,) = compare_kernels(case, ["recomputed_norm"])
    return found


def test_a_verification_compares_gradients_with_mega_s(tmp_path: Path) -> None:
    found = compare(tmp_path)
    assert (found.precision, found.calls) == ("fp64", 3)  # two norms of the layer and the last one
    assert max(found.findings.errors.values()) < KERNEL_BOUNDS["fp64"]


def test_a_wrong_backward_is_found(tmp_path: Path) -> None:
    found = compare(tmp_path, "dx = scale * (grad - normalized *", "dx = scale * (grad - 0.9 * normalized *")
    assert found.findings.errors["gradients"] > 1e-3
    assert found.findings.errors["loss"] < 1e-12


@pytest.mark.parametrize(("condition", "precision"), [("x.dtype.itemsize == 4", "fp32"), ("x.is_cuda", None)])
def test_the_widest_supported_precision_is_compared(condition: str, precision: str | None, tmp_path: Path) -> None:
    assert compare(tmp_path, "x.dtype.itemsize >= 4", condition).precision == precision


@pytest.mark.parametrize(
    ("names", "change", "words"),
    [
        (
            ["recomputed_nrm"],
            "",
            "kernels.functions = 'recomputed_nrm': must be second, recomputed_norm -> set kernels.functions=recomputed_norm",
        ),
        (["recomputed_norm", "second"], "", "must have one kernel for rms_norm, found recomputed_norm and second"),
        (["second"], "rms_nrm", "the operation of second in kernels must be one of rms_norm, layer_norm"),
    ],
)
def test_kernels_that_cannot_be_used(names: list[str], change: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    second = f'kernels={{"second": Kernel("{change or "rms_norm"}", recompute_norm), '
    file.write_text(EXAMPLE.read_text().replace("kernels={", second))
    raw = {
        "extensions": [str(file)], "model": {**SIZES, "num_layers": 1}, "data": {"train": "none"},
        "kernels": {"functions": names},
    }  # fmt: skip
    with pytest.raises(ConfigError) as error:
        RunConfig.parse(resolve_run_config(raw))
    assert words in str(error.value)
