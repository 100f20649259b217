"""Each back end against plain products in fp32, where there is a CUDA device; a library that is not installed is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_common.errors import ConfigError
from mega_trainer.config.fp8_config import check_fp8_device
from mega_trainer.config.run_config import RunConfig
from mega_trainer.kernels.attention_masks import ALL, CAUSAL, AttentionMaskSpec, BandMask, PackedMask
from mega_trainer.kernels.kernel_interface import Kernels, ScoreTransform
from mega_trainer.kernels.leaf_compiler import LeafCompiler
from mega_trainer.kernels.te_kernels import TeLinearKernels
from mega_trainer.kernels.torch_kernels import TorchKernels, reference_attention
from mega_trainer.run.build_components import choose_kernels, create_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
B, S, H, K = 2, 256, 8, 2
MASKS: dict[str, Callable[[], AttentionMaskSpec]] = {
    "causal": lambda: CAUSAL,
    "window": lambda: BandMask(left=40, right=0),
    "documents": lambda: PackedMask.from_lengths([1, 255, 100, 156], CAUSAL, CUDA),
    "both": lambda: PackedMask.from_lengths([256, 56, 200], BandMask(left=20, right=0), CUDA),
}
HOW: dict[str, dict[str, Any]] = {"plain": {}, "cap": {"softcap": 20.0}}


def kernels(**asked: str) -> Kernels:
    model = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 1, "vocab_size": 8}
    config = RunConfig.parse({"model": model, "data": {"train": "none"}, "kernels": asked})
    try:
        return create_kernels(choose_kernels(config, CUDA), LeafCompiler())
    except ConfigError as error:
        pytest.skip(str(error))


def operands(d: int = 64, e: int = 64) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = [(B, S, H, d), (B, S, K, d), (B, S, K, e)]
    return [torch.randn(shape, device=CUDA, generator=generator).bfloat16() for shape in shapes]


def close(mine: Tensor, wide: Tensor) -> None:
    """To a few roundings of bf16, as a whole and nowhere far off."""
    assert (mine.float() - wide).norm() < 0.01 * wide.norm()
    assert (mine.float() - wide).abs().max() < 0.05 * wide.abs().max()


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash", "flex", "te"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", MASKS)
def test_attention_is_that_of_plain_products(name: str, how: str, kind: str) -> None:
    if name == "flex" and (how, kind) not in (("cap", "causal"), ("cap", "both")):
        pytest.skip("each is compiled, which takes its time")
    check(kernels(attention=name), operands(), MASKS[kind](), ScoreTransform(0.125, **HOW[how]))


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash", "te"])
def test_heads_of_two_sizes(name: str) -> None:
    check(kernels(attention=name), operands(192, 128), CAUSAL, ScoreTransform(0.07))


def check(back_end: Kernels, given: list[Tensor], mask: AttentionMaskSpec, how: ScoreTransform) -> None:
    dy = torch.randn(*given[0].shape[:3], given[2].shape[-1], device=CUDA).bfloat16()
    found = []
    for attend, dtype in ((back_end.attention, torch.bfloat16), (reference_attention, torch.float32)):
        tensors = [t.to(dtype).requires_grad_() for t in given]
        y = attend(*tensors, mask, how)
        found.append([y, *torch.autograd.grad(y, tensors, dy.to(dtype))])
    for mine, wide in zip(*found, strict=True):
        close(mine, wide)


@pytest.mark.parametrize("name", ["varlen", "flash", "flex"])
def test_blocks_of_keys_add_up(name: str) -> None:
    back_end, how, (q, k, v) = kernels(attention=name), ScoreTransform(0.125), operands()
    halves = slice(0, 100), slice(100, S)
    made = [back_end.attend_block(q, k[:, half], v[:, half], ALL, how) for half in halves]
    lse = torch.logaddexp(made[0][1], made[1][1])
    y = torch.stack([own * (own_lse - lse).exp().unsqueeze(-1) for own, own_lse in made]).sum(0)
    wide = [t.float().requires_grad_() for t in (q, k, v)]
    expected = reference_attention(*wide, ALL, how)
    close(y, expected)
    dy = torch.randn_like(expected).bfloat16()
    gradients = torch.autograd.grad(expected, wide, dy.float())
    parts = [
        back_end.attend_block_backward(dy, q, k[:, half], v[:, half], y.bfloat16(), lse, ALL, how) for half in halves
    ]
    close(parts[0][0].float() + parts[1][0], gradients[0])
    for index in (1, 2):
        close(torch.cat([part[index] for part in parts], 1), gradients[index])


@pytest.mark.parametrize("recipe", [None, "tensorwise", "blockwise", "mxfp8"])
def test_transformer_engines_products_are_torchs(recipe: str | None) -> None:
    kernels(linear="te")
    if recipe is not None:
        try:
            check_fp8_device(torch.cuda.get_device_capability(CUDA), recipe, experts=False)
        except ConfigError as error:
            pytest.skip(str(error))
    te, plain = TeLinearKernels(recipe=recipe), TorchKernels()
    x, dy, weight = (torch.randn(shape, device=CUDA).bfloat16() for shape in ((2, 128, 512), (2, 128, 256), (256, 512)))
    bound = (
        0.01 if recipe is None else 0.06
    )  # e4m3 has three bits of mantissa: 2^-4 at most, about half of that on average
    into = [torch.ones(256, 512, device=CUDA) for _ in range(2)]
    given, made = te.prepare_gradient(dy), te.prepare_weight(weight)
    for mine, theirs in (
        (te.linear_forward(x, weight), plain.linear_forward(x, weight)),
        (te.linear_forward(x, made), plain.linear_forward(x, weight)),
        (te.linear_dgrad(given, weight), plain.linear_dgrad(dy, weight)),
        (te.linear_dgrad(given, made), plain.linear_dgrad(dy, weight)),
        (te.linear_wgrad(given, x), plain.linear_wgrad(dy, x)),
        (te.linear_wgrad(given, x, into[0], add=True), plain.linear_wgrad(dy, x, into[1], add=True)),
    ):
        assert mine.dtype == theirs.dtype
        assert (mine.float() - theirs.float()).norm() < bound * theirs.float().norm()
