"""Configuration of LoRA adapters (arXiv:2106.09685): the adapted projections, their ranks and their scales.

    y = W x + s B A x      A [r, in], B [out, r], s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)
    y = m (W x + s B A x) / |W + s B A|      m [out], the magnitude of each row (DoRA, arXiv:2402.09353)

With `quantize`, W is the dequantised value of its 4 bits (QLoRA, arXiv:2305.14314).

Patterns of projections follow PEFT: a regular expression that matches a module's whole name, or its end after a dot.
The experts of a layer are two modules, `mlp.experts.gate_up_proj` (`up_proj` without a gate) and
`mlp.experts.down_proj`, with an A and a B for each expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from pydantic import Field, PositiveInt

from mega_common.strict_config import ConfigProblem, StrictConfig

N = TypeVar("N", int, float)


class LoraConfig(StrictConfig):
    """Configuration of a LoRA adapter: adapted modules, ranks, scales and the rsLoRA, DoRA and QLoRA variants."""

    rank: PositiveInt = 16
    alpha: float = Field(32.0, gt=0, description="the update is multiplied by alpha / rank")
    modules: list[str] = Field(
        [".*_proj"],
        min_length=1,
        description="patterns of the adapted projections, such as q_proj or layers.0..*",
    )
    rslora: bool = Field(False, description="multiply by alpha / sqrt(rank) instead")
    ranks: dict[str, PositiveInt] = Field({}, description="ranks of the projections that match a pattern")
    alphas: dict[str, float] = Field({}, description="alphas of the projections that match a pattern")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the adapter's input")
    dora: bool = Field(False, description="train a magnitude for each row of W + s B A (DoRA)")
    quantize: Literal["nf4"] | None = Field(
        None, description="keep the frozen projections in 4 bits (QLoRA), packed and unpacked by bitsandbytes"
    )
    init_from: str | None = Field(
        None, description="start from this adapter (of a run or a PEFT folder), with equal projections and ranks"
    )
    modules_to_save: list[str] = Field(
        [], description="patterns of modules that are trained in full, such as lm_head or embed_tokens"
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield conflicting LoRA settings, and module patterns that are not regular expressions."""
        if self.dora and self.dropout:
            yield ConfigProblem("dropout", "is not supported with dora", self.dropout, "dropout: 0")
        if self.quantize and self.dora:
            yield ConfigProblem("quantize", "is not supported with dora", self.quantize, "dora: false")
        for key in ("modules", "ranks", "alphas", "modules_to_save"):
            for pattern in getattr(self, key):
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield ConfigProblem(key, f"must be regular expressions ({error})", pattern, "correct the pattern")

    def get_adapter_rank(self, module: str) -> int | None:
        """Return the LoRA rank of a module, None for a module without an adapter.
        The module is given by its canonical name without `.weight`.
        """
        return _get_override(self.ranks, module, self.rank) if matches_module_pattern(module, self.modules) else None

    def get_adapter_scale(self, module: str) -> float:
        """Return the scale s of a module's LoRA update s B A: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        rank = _get_override(self.ranks, module, self.rank)
        return _get_override(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def is_fully_trained(self, name: str) -> bool:
        """Return whether a tensor is trained in full in addition to the LoRA adapter (`modules_to_save`).
        The tensor is given by its canonical name.
        """
        return matches_module_pattern(name.rpartition(".")[0], self.modules_to_save)


def _get_override(patterns: Mapping[str, N], module: str, default: N) -> N:
    return next((value for pattern, value in patterns.items() if matches_module_pattern(module, [pattern])), default)


def is_trainable_tensor(name: str, freeze: Sequence[str], lora: LoraConfig | None) -> bool:
    """Return whether a training run trains a tensor, given its frozen tensors and LoRA settings.
    The tensor has the canonical name `name`; `freeze` are patterns (shell globs), and `lora` is the adapter.
    """
    if any(fnmatchcase(name, pattern) for pattern in freeze):
        return False
    return lora is None or is_adapter_tensor(name) or lora.is_fully_trained(name)


def is_adapter_tensor(name: str) -> bool:
    """Return whether a tensor, by its canonical name, belongs to a LoRA adapter."""
    return ".lora_" in name


def matches_module_pattern(name: str, patterns: Sequence[str]) -> bool:
    """Return whether any of the regular expressions `patterns` matches the whole of `name`, or its end after a dot."""
    return any(re.fullmatch(rf"(.*\.)?({pattern})", name) for pattern in patterns)
