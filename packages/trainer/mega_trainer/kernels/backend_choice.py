"""Choice of kernel back ends from the settings, the machine and the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from mega_common.errors import ConfigError
from mega_trainer.kernels.flash_attention import WIDEST_HEAD

# Oldest supported version of each distribution.
OLDEST = {
    "flash-attn": "2.8.3", "flash-attn-3": "3.0", "transformer-engine": "2.10", "causal-conv1d": "1.7", "mamba-ssm": "2.3.2",
    "fla-core": "0.6",
}  # fmt: skip
# Libraries for parts of recurrent mixers: (name in run.yaml, distribution).
RECURRENT = {
    "conv": ("causal_conv1d", "causal-conv1d"),
    "scan": ("mamba_ssm", "mamba-ssm"),
    "delta": ("fla", "fla-core"),
}
NARROWEST_FLEX_HEAD = 16  # of the kernels that torch generates
CONV_TAPS = range(2, 5)  # supported by causal-conv1d
CUDNN_UNEVEN = 91100  # oldest cuDNN that supports different head sizes of keys and values, forward and backward


@dataclass(frozen=True)
class BackendFacts:
    """Facts of the machine and the model that the choice of back ends depends on.

    Attributes:
        installed: versions of the installed distributions of `OLDEST`.
        capability: compute capability of the GPU, (9, 0) for Hopper; None on a CPU.
        cudnn: torch's cuDNN version as one number, 91100 for 9.11.
        half: activations are bf16 or fp16.
        head: size of a head's keys, and of its values.
        softcap: attention scores are soft-capped.
        biased: attention scores have a relative position bias.
        taps: taps of the model's short convolutions.
        compiler_problem: the requirement of torch.compile that is missing on this machine, if any.
        fp8: linear layers run in fp8.
    """

    installed: Mapping[str, str]
    capability: tuple[int, int] | None
    cudnn: int | None
    half: bool
    head: tuple[int, int]
    softcap: bool
    biased: bool = False
    taps: frozenset[int] = frozenset()
    compiler_problem: str | None = None
    fp8: bool = False

    @property
    def missing_gpu_problem(self) -> str | None:
        """End of an error message ("requires a GPU ..") about a kernel back end if the run is on a CPU, else None."""
        return "requires a GPU, and the run is on a CPU" if self.capability is None else None

    @property
    def flash_attention_problem(self) -> str | None:
        """End of an error message ("requires ..") if flash attention does not support the precision or head size, else None."""
        if not self.half:
            return "requires precision = bf16, fp16 or fp8"
        if max(self.head) > WIDEST_HEAD or max(self.head) % 8:
            return f"requires a head size that is a multiple of 8 and at most {WIDEST_HEAD}, not {max(self.head)}"
        return None

    @property
    def flex_attention_problem(self) -> str | None:
        """End of an error message ("requires ..") if FlexAttention cannot be compiled or requires larger heads, else None."""
        if self.missing_gpu_problem or self.compiler_problem:
            return self.missing_gpu_problem or f"requires {self.compiler_problem}"
        narrow = min(self.head) < NARROWEST_FLEX_HEAD
        return f"requires a head size of at least {NARROWEST_FLEX_HEAD}, not {min(self.head)}" if narrow else None

    def recurrent_library_problem(self, kind: str) -> str | None:
        """Return the end of an error message if the library for `conv`, `scan` or `delta` cannot be used, else None.
        They are parts of recurrent mixers; the message begins with "requires".
        """
        if self.missing_gpu_problem or not self.half:
            return self.missing_gpu_problem or "requires precision = bf16, fp16 or fp8"
        if kind == "conv" and any(taps not in CONV_TAPS for taps in self.taps):
            return f"requires convolutions of {CONV_TAPS[0]} to {CONV_TAPS[-1]} taps, not {max(self.taps)}"
        return self.missing_package_problem(RECURRENT[kind][1])

    def missing_package_problem(self, name: str) -> str | None:
        """Return the end of an error message ("requires .."), with the fix, if a package is missing or too old, else None."""
        have, oldest = self.installed.get(name), OLDEST[name]
        if have is not None and _numbers(have) >= _numbers(oldest):
            return None
        return f"requires {name} {oldest} or later, {have or 'none'} is installed; pip install '{name}>={oldest}'"

    @property
    def has_flash_attention_3(self) -> bool:
        """True if flash-attn 3 can be used: a Hopper GPU, the package, and a supported precision and head size."""
        hopper = self.capability is not None and self.capability[0] == 9
        return hopper and not self.missing_package_problem("flash-attn-3") and not self.flash_attention_problem


@dataclass(frozen=True)
class BackendChoice:
    """Kernel back ends chosen for linear layers, attention and recurrent mixers, and the reasons."""

    linear: str
    attention: str
    because: Mapping[str, str]
    recurrent: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for the log at the start of a run.
        An example is `kernels: linear torch (...), attention flash (...)`.
        """
        chosen = {"linear": self.linear, "attention": self.attention, **self.recurrent}
        return "kernels: " + ", ".join(f"{what} {name} ({self.because[what]})" for what, name in chosen.items())


def choose_kernel_backends(
    linear: str, attention: str, facts: BackendFacts, recurrent: Mapping[str, str] | None = None
) -> BackendChoice:
    """Return the kernel back ends requested, for `auto` the best available; a ConfigError if a request cannot be met.
    `recurrent` are the requests for parts of recurrent mixers (`conv`, `scan`, `delta`).

    Raises:
        ConfigError: when a requested back end cannot be used here, with the reason.
    """
    chosen = {
        "linear": _choose_linear(linear, facts),
        "attention": _best_attention(facts) if attention == "auto" else _requested_attention(attention, facts),
        **{kind: _choose_recurrent(kind, name, facts) for kind, name in (recurrent or {}).items()},
    }
    names = {kind: name for kind, (name, _) in chosen.items()}
    because = {kind: reason for kind, (_, reason) in chosen.items()}
    return BackendChoice(names.pop("linear"), names.pop("attention"), because, names)


def _choose_linear(name: str, facts: BackendFacts) -> tuple[str, str]:
    if name == "te":
        _raise_problem(
            "linear=te",
            facts.missing_gpu_problem or facts.missing_package_problem("transformer-engine"),
            "linear=torch",
        )
    if facts.fp8 and facts.capability is None:
        return name.replace("auto", "torch"), "fp8 is emulated on a CPU: results as on a GPU, but slower than fp32"
    return ("torch", "auto: as fast as any") if name == "auto" else (name, "as set")


def _requested_attention(name: str, facts: BackendFacts) -> tuple[str, str]:
    problem = None
    if facts.biased and name not in ("sdpa", "varlen"):
        problem = "is not supported with a relative position bias; only sdpa and varlen are"
    elif name == "flex":
        problem = facts.flex_attention_problem
    elif name == "te":
        problem = (
            facts.missing_gpu_problem
            or facts.flash_attention_problem
            or facts.missing_package_problem("transformer-engine")
        )
    elif name == "flash":
        if facts.has_flash_attention_3:
            return "flash 3", "as set, on Hopper"
        problem = (
            facts.missing_gpu_problem or facts.flash_attention_problem or facts.missing_package_problem("flash-attn")
        )
        name = "flash 2"
    _raise_problem(f"attention={name.split()[0]}", problem, "attention=auto")
    return name, "as set"


def _best_attention(facts: BackendFacts) -> tuple[str, str]:
    """Return the best attention back end.

    On Hopper flash-attn 3 is the fastest, and torch's choice (cuDNN) is close; neither supports every score transform.
    """
    if facts.missing_gpu_problem:
        return "sdpa", "on a CPU"
    if facts.biased:
        return "sdpa", "auto: relative position bias"
    if facts.has_flash_attention_3:
        return "flash 3", "auto: on Hopper, and installed"
    if not facts.half:
        return "sdpa", "auto: flash attention requires bf16 or fp16"
    if facts.softcap:
        return _best_softcap_attention(facts)
    keys, values = facts.head
    if keys != values and not facts.flash_attention_problem and (facts.cudnn or 0) < CUDNN_UNEVEN:
        return "varlen", f"auto: heads of {keys} and {values} are padded; unpadded heads require cuDNN 9.11 or later"
    return "sdpa", "auto: torch's choice; its flash attention for blocks, documents and windows"


def _best_softcap_attention(facts: BackendFacts) -> tuple[str, str]:
    """Return the best attention back end for soft-capped scores: flash-attn 2, FlexAttention, else matrix products."""
    problem = facts.flash_attention_problem or facts.missing_package_problem("flash-attn")
    if not problem:
        return "flash 2", "auto: soft caps"
    because = f"auto: soft caps; flash-attn {problem}"
    return (
        ("sdpa", f"{because}; flex {facts.flex_attention_problem}")
        if facts.flex_attention_problem
        else ("flex", because)
    )


def _choose_recurrent(kind: str, name: str, facts: BackendFacts) -> tuple[str, str]:
    """Return the library for one part of recurrent mixers where it is installed, else torch."""
    problem = facts.recurrent_library_problem(kind)
    if name == "auto" and facts.missing_gpu_problem:
        return "torch", "on a CPU"
    if name == "auto":
        return (RECURRENT[kind][0], "auto: installed") if problem is None else ("torch", f"auto: {problem}")
    if name != "torch":
        _raise_problem(f"{kind}={name}", problem, f"{kind}=torch")
    return name, "as set"


def _raise_problem(setting: str, problem: str | None, alternative: str) -> None:
    if problem is not None:
        raise ConfigError(f"kernels.{setting.replace('=', ' = ')} {problem}", hint=f"set kernels.{alternative}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def installed_kernel_versions() -> dict[str, str]:
    """Return the versions of the optional kernel packages (the ones in `OLDEST`) that are installed."""
    out = {}
    for name in OLDEST:
        with suppress(PackageNotFoundError):
            out[name] = version(name)
    return out
