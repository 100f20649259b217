"""Each kernel against a plain computation in fp32 or fp64, on any device: used by `mega doctor` and by the tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mega_common.errors import ConfigError
from mega_trainer.config.fp8_config import check_fp8_device
from mega_trainer.config.run_config import RunConfig
from mega_trainer.doctor.check_result import CheckResult, make_upper_bound_check_result
from mega_trainer.kernels import gemm_accumulation
from mega_trainer.kernels.attention_masks import (
    ALL,
    CAUSAL,
    AttentionMaskSpec,
    BandMask,
    PackedDocumentMask,
    PagedAttentionName,
    VisiblePagedKeys,
)
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, Kernels
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.kernels.paged_attention import FLASH_PAGE, get_flash_page_size
from mega_trainer.kernels.te_kernels import TeLinearKernels
from mega_trainer.kernels.torch_kernels import TorchKernels, reference_attention
from mega_trainer.run.build_components import choose_kernels, create_kernels

BATCH, TOKENS, HEADS, KV_HEADS = 2, 256, 8, 2
BF16_BOUND = 0.01  # relative, in the norm: a few roundings of bf16
FP8_BOUND = 0.06  # e4m3 has three bits of mantissa: 2^-4 at most, about half of that on average
FP32_BOUND = 1e-5
OUTLIER = 5  # how many times larger than in the norm a relative error may be in an element
AttentionBackend = Literal["sdpa", "varlen", "flash", "flex", "te"]
NVFP4_BOUND = 0.25  # e2m1 has one bit, gradients are rounded stochastically: twice what the CPU's rounding shows
Recipe = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]
MASKS: Mapping[str, Callable[[torch.device], AttentionMaskSpec]] = {
    "causal": lambda device: CAUSAL,
    "window": lambda device: BandMask(left=40, right=0),
    "documents": lambda device: PackedDocumentMask.from_lengths([1, 255, 100, 156], CAUSAL, device),
    "documents and window": lambda device: PackedDocumentMask.from_lengths(
        [256, 56, 200], BandMask(left=20, right=0), device
    ),
}
TRANSFORMS: Mapping[str, Mapping[str, Any]] = {"": {}, ", soft cap": {"softcap": 20.0}}
COUNTS = ([3, 0, 13, 8], [0, 0, 0, 0], [5, 7, 1, 0])  # rows of each group of a grouped GEMM


@dataclass(frozen=True)
class KernelCheck:
    """Comparison of a kernel with a plain computation.

    Attributes:
        name: of the kernel and the case.
        bound: of the relative error.
        measure: returns the largest relative error, in the norm, of the outputs and gradients on a device; raises
            ConfigError where the kernel cannot be used.
    """

    name: str
    bound: float
    measure: Callable[[torch.device], float]

    def run_check(self, device: torch.device) -> CheckResult:
        """Return the result of the check on a device: ok, failed (also if it raises), or skipped if it is not supported."""
        try:
            # a product of bf16 operands on a CPU is rounded to bf16 before it is added
            bound = self.bound if device.type == "cuda" else max(self.bound, BF16_BOUND)
            return make_upper_bound_check_result("kernels", self.name, self.measure(device), bound)
        except ConfigError as error:
            return CheckResult("kernels", self.name, "skipped", error.message.splitlines()[-1].strip())
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the other kernels are checked too
            first = (str(error).splitlines() or [""])[0]
            return CheckResult("kernels", self.name, "failed", f"{type(error).__name__}: {first}")


def iterate_kernel_checks() -> Iterator[KernelCheck]:
    """Yield a check of each kernel and case, including kernels that this device may not support."""
    for name in get_args(AttentionBackend):
        for mask in MASKS:
            for transform in TRANSFORMS:
                if name != "flex" or (transform and mask in ("causal", "documents and window")):  # each is compiled
                    measure = partial(measure_attention_error, name, mask=mask, transform=transform)
                    yield KernelCheck(f"attention {name}, {mask}{transform}", BF16_BOUND, measure)
    for name in ("sdpa", "varlen", "flash", "te"):
        yield KernelCheck(
            f"attention {name}, heads of 192 and 128", BF16_BOUND, partial(measure_mla_attention_error, name)
        )
    for name in ("varlen", "flash", "flex"):
        yield KernelCheck(
            f"attention {name}, blocks of keys", BF16_BOUND, partial(measure_blockwise_attention_error, name)
        )
    for paged in ("flash", "gathered"):
        for words, window in (("", None), (", window and sinks", 40)):
            measure = partial(measure_paged_attention_error, paged, window)
            yield KernelCheck(f"paged attention {paged}{words}", BF16_BOUND, measure)
    for recipe in (None, *get_args(Recipe)):
        bound = {None: BF16_BOUND, "nvfp4": NVFP4_BOUND}.get(recipe, FP8_BOUND)
        yield KernelCheck(f"linear te, {recipe or 'bf16'}", bound, partial(measure_te_linear_error, recipe))
    for counts in COUNTS:
        words = "+".join(map(str, counts))
        yield KernelCheck(f"grouped GEMM, {words} rows", BF16_BOUND, partial(measure_grouped_gemm_error, counts))
    for add in (False, True):
        words = "added to" if add else "written into"
        yield KernelCheck(f"weight gradients {words} fp32", FP32_BOUND, partial(measure_wgrad_accumulation_error, add))


def make_kernels(device: torch.device, **asked: str) -> Kernels:
    """Return the kernels that a run with the settings `asked` of its section `kernels:` has.

    Raises:
        ConfigError: when one of them cannot be used on this device.
    """
    model = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 1, "vocab_size": 8}
    config = RunConfig.parse({"model": model, "data": {"train": "none"}, "kernels": asked})
    return create_kernels(choose_kernels(config, device), FusibleFunctionCompiler())


def relative_error(mine: Tensor, exact: Tensor) -> float:
    """Return the relative error in the norm or, if larger, a fifth of that in the maximum norm; absolute if `exact` is 0.
    It is |mine - exact| / |exact|; by the maximum norm no element may be far off.
    """
    exact = exact.detach().double().flatten()
    difference = mine.detach().double().flatten() - exact
    if not exact.any():
        return float(difference.norm())
    largest = difference.abs().max() / exact.abs().max() / OUTLIER
    return float(torch.maximum(difference.norm() / exact.norm(), largest))


def largest_error(errors: Iterable[float]) -> float:
    """Return the largest of `errors`, or NaN if one of them is NaN, which Python's `max` may drop."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def measure_attention_error(
    name: str, device: torch.device, *, mask: str = "causal", transform: str = "", head: int = 64, value: int = 64
) -> float:
    """Return the largest relative error of an attention kernel's output and gradients in bf16, against fp32."""
    kernels, how = make_kernels(device, attention=name), AttentionScoreTransform(0.125, **TRANSFORMS[transform])
    given, shape = _attention_operands(device, head, value), MASKS[mask](device)
    dy = torch.randn(*given[0].shape[:3], value, device=device).bfloat16()
    found = []
    for attend, dtype in ((kernels.attention, torch.bfloat16), (reference_attention, torch.float32)):
        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in given)
        y = attend(q, k, v, shape, how)
        found.append([y, *torch.autograd.grad(y, [q, k, v], dy.to(dtype))])
    return largest_error(relative_error(mine, exact) for mine, exact in zip(*found, strict=True))


def measure_mla_attention_error(name: str, device: torch.device) -> float:
    """Return the error of an attention kernel whose keys and values differ in size, as with latent attention (MLA)."""
    return measure_attention_error(name, device, head=192, value=128)


def measure_blockwise_attention_error(name: str, device: torch.device) -> float:
    """Return the error of attention in two blocks of keys, as in context parallelism by a ring, and of its backward."""
    kernels, how, (q, k, v) = (
        make_kernels(device, attention=name),
        AttentionScoreTransform(0.125),
        _attention_operands(device),
    )
    halves = slice(0, 100), slice(100, TOKENS)
    made = [kernels.attend_block(q, k[:, half], v[:, half], ALL, how) for half in halves]
    lse = torch.logaddexp(made[0][1], made[1][1])
    y = torch.stack([own * (own_lse - lse).exp().unsqueeze(-1) for own, own_lse in made]).sum(0)
    wide_q, wide_k, wide_v = (tensor.float().requires_grad_() for tensor in (q, k, v))
    exact = reference_attention(wide_q, wide_k, wide_v, ALL, how)
    dy = torch.randn_like(exact).bfloat16()
    gradients = torch.autograd.grad(exact, [wide_q, wide_k, wide_v], dy.float())
    parts = [
        kernels.attend_block_backward(dy, q, k[:, half], v[:, half], y.bfloat16(), lse, ALL, how) for half in halves
    ]
    sums = [parts[0][0].float() + parts[1][0], *(torch.cat([part[index] for part in parts], 1) for index in (1, 2))]
    pairs = [(y, exact), *zip(sums, gradients, strict=True)]
    return largest_error(relative_error(mine, wanted) for mine, wanted in pairs)


def measure_paged_attention_error(name: PagedAttentionName, window: int | None, device: torch.device) -> float:
    """Return the error of attention to a paged KV cache, of four rows with scattered pages.
    With a sliding `window`, each head has an attention sink too.

    Raises:
        ConfigError: when the kernel cannot be used on this device.
    """
    if name == "flash" and get_flash_page_size(device, torch.bfloat16) is None:
        raise ConfigError("attention to pages in place requires a GPU of compute capability 8.0 or later")
    lengths, pages, d = [1, 300, 512, 257], torch.tensor([[5, 0], [3, 6], [0, 2], [4, 1]], dtype=torch.int32), 64
    generator = torch.Generator(device).manual_seed(0)
    q, keys, values, sinks = (
        torch.randn(shape, device=device, generator=generator).bfloat16()
        for shape in ((4, HEADS, d), (7 * FLASH_PAGE, KV_HEADS, d), (7 * FLASH_PAGE, KV_HEADS, d), (HEADS,))
    )
    how = AttentionScoreTransform(0.125, sinks=None if window is None else sinks)
    first = [0 if window is None else max(0, length - window) for length in lengths]
    rows = VisiblePagedKeys.from_bounds(pages.to(device), first, lengths, FLASH_PAGE, window=window)
    y = TorchKernels().paged_attention(q, keys, values, rows, how, name)
    exact = []
    for row, (start, stop) in enumerate(zip(first, lengths, strict=True)):
        slots = (pages[row, :, None] * FLASH_PAGE + torch.arange(FLASH_PAGE)).flatten()[start:stop].to(device)
        own_q, own_k, own_v = (t.float()[None] for t in (q[row : row + 1], keys[slots], values[slots]))
        exact.append(reference_attention(own_q, own_k, own_v, ALL, how)[0])
    return relative_error(y, torch.cat(exact))


def measure_te_linear_error(recipe: Recipe | None, device: torch.device) -> float:
    """Return the largest relative difference of Transformer Engine's linear kernels to torch's.
    The kernels run with the FP8 `recipe`, or in bf16 if it is None.
    """
    make_kernels(device, linear="te")
    if recipe is not None:
        check_fp8_device(torch.cuda.get_device_capability(device), recipe, experts=False)
    te, plain = TeLinearKernels(recipe=recipe), TorchKernels()
    x, dy, weight = (
        torch.randn(shape, device=device).bfloat16() for shape in ((2, 128, 512), (2, 128, 256), (256, 512))
    )
    into = [torch.ones(256, 512, device=device) for _ in range(2)]
    given, made = te.prepare_gradient(dy), te.prepare_weight(weight)
    pairs = (
        (te.linear_forward(x, weight), plain.linear_forward(x, weight)),
        (te.linear_forward(x, made), plain.linear_forward(x, weight)),
        (te.linear_dgrad(given, weight), plain.linear_dgrad(dy, weight)),
        (te.linear_dgrad(given, made), plain.linear_dgrad(dy, weight)),
        (te.linear_wgrad(given, x), plain.linear_wgrad(dy, x)),
        (te.linear_wgrad(given, x, into[0], add=True), plain.linear_wgrad(dy, x, into[1], add=True)),
    )
    assert all(actual.dtype == expected.dtype for actual, expected in pairs)
    return largest_error(relative_error(actual, expected) for actual, expected in pairs)


def measure_grouped_gemm_error(counts: list[int], device: torch.device) -> float:
    """Return the error of a grouped GEMM in bf16, forward and weight gradient, against one GEMM per group in fp32."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(sum(counts), 32), (sum(counts), 48), (len(counts), 48, 32)]
    x, y, weight = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    rows, kernels = GroupedRows.from_counts(counts, x.device), TorchKernels()
    low = [tensor.bfloat16() for tensor in (x, y, weight)]
    wide = [tensor.float() for tensor in low]
    fused, alone = (
        (kernels.grouped_linear(x, weight, rows), kernels.grouped_wgrad(y, x, rows)) for x, y, weight in (low, wide)
    )
    return largest_error(relative_error(mine, exact) for mine, exact in zip(fused, alone, strict=True))


def measure_wgrad_accumulation_error(add: bool, device: torch.device) -> float:
    """Return the error of weight and embedding gradients that are written into, or added to, fp32 buffers.
    The operands are bf16; the gradients may not be rounded to bf16 first.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(48, 64), (64, 32), (40, 32), (48, 32)]
    a, b, rows, there = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    a, b, rows = a.bfloat16(), b.bfloat16(), rows.bfloat16()
    places = torch.randint(0, 48, (40,), generator=generator, device=device)
    one_hot = torch.nn.functional.one_hot(places, 48).double()
    kept = there.double() if add else 0
    products = relative_error(gemm_accumulation.gemm_into(a, b, there.clone(), add=add), a.double() @ b.double() + kept)
    embedding = gemm_accumulation.write_embedding_grad(rows, places, there.clone(), add=add)
    return largest_error([products, relative_error(embedding, one_hot.t() @ rows.double() + kept)])


def _attention_operands(device: torch.device, head: int = 64, value: int = 64) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [
        (BATCH, TOKENS, HEADS, head), (BATCH, TOKENS, KV_HEADS, head), (BATCH, TOKENS, KV_HEADS, value)
    ]  # fmt: skip
    return [torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes]
