"""Choice of kernel back ends, from the settings and from facts of the machine and the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from mega_common.errors import ConfigError
from mega_trainer.kernels.flash_attention import WIDEST_HEAD

# Distributions by the name they are installed under, and the oldest version of each that is supported.
OLDEST = {
    "flash-attn": "2.8.3", "flash-attn-3": "3.0", "transformer-engine": "2.10", "causal-conv1d": "1.7", "mamba-ssm": "2.3.2",
    "fla-core": "0.6",
}  # fmt: skip
# Libraries for parts of recurrent mixers, by the names that run.yaml and pip have for them.
RECURRENT = {
    "conv": ("causal_conv1d", "causal-conv1d"),
    "scan": ("mamba_ssm", "mamba-ssm"),
    "delta": ("fla", "fla-core"),
}
CONV_TAPS = range(2, 5)  # that causal-conv1d is made for
CUDNN_UNEVEN = 91100  # the oldest that takes values of another size than keys in both directions


@dataclass(frozen=True)
class BackendFacts:
    """Facts of the machine and the model that the choice of back ends depends on.

    Attributes:
        installed: versions of the distributions of `OLDEST` that are there.
        capability: of the GPU, (9, 0) for Hopper; None on a CPU.
        cudnn: torch's version of it as one number, 91100 for 9.11.
        half: whether activations are bf16 or fp16.
        head: size of a head's keys, and of its values.
        softcap: whether scores are capped.
        biased: whether something is added to them, as relative positions are.
        taps: of the model's short convolutions.
    """

    installed: Mapping[str, str]
    capability: tuple[int, int] | None
    cudnn: int | None
    half: bool
    head: tuple[int, int]
    softcap: bool
    biased: bool = False
    taps: frozenset[int] = frozenset()

    @property
    def gpu_problem(self) -> str | None:
        """Problem of a back end that needs a GPU where none is used, else None."""
        return "it needs a GPU, and none is used here" if self.capability is None else None

    @property
    def flash_head_problem(self) -> str | None:
        """Problem of a precision or head size that flash attention does not support, else None."""
        if not self.half:
            return "it is for precision = bf16, fp16 and fp8"
        if max(self.head) > WIDEST_HEAD or max(self.head) % 8:
            return f"it takes heads of a multiple of 8 up to {WIDEST_HEAD}, and the model's have {max(self.head)}"
        return None

    def recurrent_problem(self, kind: str) -> str | None:
        """Return the problem of the library for that part of recurrent mixers, else None."""
        if self.gpu_problem or not self.half:
            return self.gpu_problem or "it is for precision = bf16, fp16 and fp8"
        if kind == "conv" and any(taps not in CONV_TAPS for taps in self.taps):
            return (
                f"it takes {CONV_TAPS[0]} to {CONV_TAPS[-1]} taps, and the model's convolutions have {max(self.taps)}"
            )
        return self.package_problem(RECURRENT[kind][1])

    def package_problem(self, name: str) -> str | None:
        """Return the problem of a package that is missing or too old, with the fix, else None."""
        have, oldest = self.installed.get(name), OLDEST[name]
        if have is not None and _numbers(have) >= _numbers(oldest):
            return None
        return f"{have or 'none'} is installed of {name}; pip install '{name}>={oldest}'"

    @property
    def has_flash_attention_3(self) -> bool:
        """True if flash-attn 3 can be used."""
        hopper = self.capability is not None and self.capability[0] == 9
        return hopper and not self.package_problem("flash-attn-3") and not self.flash_head_problem


@dataclass(frozen=True)
class BackendChoice:
    """One back end for each kind of work, and the reasons."""

    linear: str
    attention: str
    because: Mapping[str, str]
    recurrent: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for the start of a run."""
        chosen = {"linear": self.linear, "attention": self.attention, **self.recurrent}
        return "kernels: " + ", ".join(f"{what} {name} ({self.because[what]})" for what, name in chosen.items())


def choose_backends(
    linear: str, attention: str, facts: BackendFacts, recurrent: Mapping[str, str] | None = None
) -> BackendChoice:
    """Return the requested back ends, or for `auto` the best available; `recurrent` by the part of recurrent mixers.

    Raises:
        ConfigError: for one that is asked for and cannot be used here, with the reason.
    """
    first = _choose_linear(linear, facts)
    second = _best_attention(facts) if attention == "auto" else _requested_attention(attention, facts)
    others = {kind: _choose_recurrent(kind, name, facts) for kind, name in (recurrent or {}).items()}
    because = {"linear": first[1], "attention": second[1], **{kind: why for kind, (_, why) in others.items()}}
    return BackendChoice(first[0], second[0], because, {kind: name for kind, (name, _) in others.items()})


def _choose_linear(name: str, facts: BackendFacts) -> tuple[str, str]:
    if name == "te":
        _refuse("linear=te", facts.gpu_problem or facts.package_problem("transformer-engine"), "linear=torch")
    return ("torch", "auto: as fast as any") if name == "auto" else (name, "as asked")


def _requested_attention(name: str, facts: BackendFacts) -> tuple[str, str]:
    problem = None
    if facts.biased and name not in ("sdpa", "varlen"):
        problem = "sdpa and varlen alone add relative positions to scores here"
    elif name == "flex":
        problem = facts.gpu_problem
    elif name == "te":
        problem = facts.gpu_problem or facts.flash_head_problem or facts.package_problem("transformer-engine")
    elif name == "flash":
        if facts.has_flash_attention_3:
            return "flash 3", "as asked, on Hopper"
        problem = facts.gpu_problem or facts.flash_head_problem or facts.package_problem("flash-attn")
        name = "flash 2"
    _refuse(f"attention={name.split()[0]}", problem, "attention=auto")
    return name, "as asked"


def _best_attention(facts: BackendFacts) -> tuple[str, str]:
    """Return the best attention back end: on Hopper flash-attn 3 is the fastest, torch's own choice, cuDNN there, is
    close to it; neither supports every score transform.
    """
    if facts.gpu_problem:
        return "sdpa", "on a CPU"
    if facts.biased:
        return "sdpa", "auto: relative positions are added to scores"
    if facts.has_flash_attention_3:
        return "flash 3", "auto: on Hopper, and installed"
    if not facts.half:
        return "sdpa", "auto: flash attention is for bf16 and fp16"
    if facts.softcap:
        lacking = facts.flash_head_problem or facts.package_problem("flash-attn")
        return ("flex", f"auto: soft caps, and {lacking}") if lacking else ("flash 2", "auto: soft caps")
    keys, values = facts.head
    if keys != values and not facts.flash_head_problem and (facts.cudnn or 0) < CUDNN_UNEVEN:
        return "varlen", f"auto: heads of {keys} and {values}, filled up, for cuDNN 9.11 or later is not here"
    return "sdpa", "auto: torch's choice, its flash attention for blocks, documents and windows"


def _choose_recurrent(kind: str, name: str, facts: BackendFacts) -> tuple[str, str]:
    """Return the library for one part of recurrent mixers where it is installed, else torch."""
    problem = facts.recurrent_problem(kind)
    if name == "auto" and facts.gpu_problem:
        return "torch", "on a CPU"
    if name == "auto":
        return (RECURRENT[kind][0], "auto: installed") if problem is None else ("torch", f"auto: {problem}")
    if name != "torch":
        _refuse(f"{kind}={name}", problem, f"{kind}=torch")
    return name, "as asked"


def _refuse(asked: str, problem: str | None, instead: str) -> None:
    if problem is not None:
        raise ConfigError(f"kernels.{asked.replace('=', ' = ')}: {problem}", hint=f"or set kernels.{instead}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages of `OLDEST` that are installed."""
    out = {}
    for name in OLDEST:
        with suppress(PackageNotFoundError):
            out[name] = version(name)
    return out
