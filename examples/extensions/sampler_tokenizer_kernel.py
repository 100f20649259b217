"""Parts around a model as an extension: a sampler of generation, a tokenizer, and a kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field
from torch import Tensor
from torch.autograd import Function

from mega_trainer.extend import CustomTokenizer, Extension, Kernel, Sampler, StrictConfig


class TopSigmaOptions(StrictConfig):
    """Settings of the sampler: the width of the kept range of scores, in standard deviations."""

    n: float = Field(1.0, gt=0)


def keep_top_sigma(
    scores: Tensor, prompt: Sequence[int], generated: Sequence[int], *, options: TopSigmaOptions
) -> Tensor:
    """Exclude scores [V] more than n standard deviations below the largest (top-n-sigma, arXiv:2411.07641)."""
    finite = scores[scores.isfinite()]
    return scores.masked_fill(scores < finite.max() - options.n * finite.std(correction=0), float("-inf"))


class PlaceValueTokenizer:
    """Bytes as tokens, and each digit of a whole number with its place from the right: `1204` is 1@3 2@2 0@1 4@0.

    Sums of such digits are aligned, which helps arithmetic (arXiv:2405.17399). Places from 15 on are one.
    """

    PLACES = 16
    end_token = "<end>"

    def __init__(self) -> None:
        digits = [f"{digit}@{place}" for digit in range(10) for place in range(self.PLACES)]
        names = [self.end_token, *(f"byte {number}" for number in range(256)), *digits]
        self.vocabulary = {name: number for number, name in enumerate(names)}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        tokens = []
        for part in re.split("([0-9]+)", text):
            if part.isdecimal() and part.isascii():
                places = reversed(range(len(part)))
                tokens += [
                    257 + self.PLACES * int(digit) + min(place, self.PLACES - 1)
                    for digit, place in zip(part, places, strict=True)
                ]
            else:
                tokens += [1 + byte for byte in part.encode()]
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; the end token is spelled."""
        spelled = [
            self.end_token.encode()
            if token == 0
            else bytes([token - 1])
            if token < 257
            else str((token - 257) // self.PLACES).encode()
            for token in ids
        ]
        return b"".join(spelled).decode(errors="replace")


class RecomputedNorm(Function):
    """RMSNorm that keeps its input and weight for the backward, and recomputes the statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight for x [.., D] and weight [D]."""
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and of the weight; with n = x / rms(x): dx = (g - n mean(g n)) / rms(x), g = dy weight."""
        x, weight = ctx.saved_tensors
        scale = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normalized, grad = x * scale, dy * weight
        dx = scale * (grad - normalized * (grad * normalized).mean(-1, keepdim=True))
        return dx, (dy * normalized).flatten(0, -2).sum(0), None


def recompute_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """Return the RMSNorm of x [.., D]."""
    y: Tensor = RecomputedNorm.apply(x, weight, eps)
    return y


def supports_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> bool:
    """Return whether the kernel computes a call: not in 16 bits, which need statistics in fp32, and not `1 + weight`."""
    return not zero_centered and x.dtype == weight.dtype and x.dtype.itemsize >= 4


EXTENSION = Extension(
    name="sampler-tokenizer-kernel",
    version="1.0",
    api=1,
    samplers={"top_n_sigma": Sampler(keep_top_sigma, TopSigmaOptions)},
    kernels={"recomputed_norm": Kernel("rms_norm", recompute_norm, supports_norm)},
    tokenizers={"place_value": CustomTokenizer(PlaceValueTokenizer)},
)
