"""Which back end computes what, from the facts of a machine and a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.kernels.backend_choice import BackendChoice, BackendFacts, choose_kernel_backends
from mega_trainer.kernels.flash_attention import TorchFlashKernel
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.kernels.torch_kernels import SdpaAttention
from mega_trainer.run.build_components import choose_kernels, create_kernels

HOPPER = {"capability": (9, 0), "cudnn": 91500}
AMPERE = {"capability": (8, 0), "cudnn": 91500}
FLASH2, FLASH3, TE = {"flash-attn": "2.8.3"}, {"flash-attn-3": "3.0.0b1"}, {"transformer-engine": "2.20.2"}


def facts(**other: Any) -> BackendFacts:
    cpu: dict[str, Any] = {
        "installed": {}, "capability": None, "cudnn": None, "half": True, "head": (128, 128), "softcap": False
    }  # fmt: skip
    return BackendFacts(**(cpu | other))


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({}, "sdpa"),
        ({"softcap": True, "installed": FLASH2}, "sdpa"),
        (HOPPER, "sdpa"),
        (HOPPER | {"installed": FLASH2}, "sdpa"),
        (HOPPER | {"installed": FLASH2 | FLASH3}, "flash 3"),
        (HOPPER | {"installed": FLASH3, "half": False}, "sdpa"),
        (HOPPER | {"installed": FLASH3, "head": (512, 512)}, "sdpa"),
        (HOPPER | {"installed": FLASH3, "head": (192, 128)}, "flash 3"),
        (HOPPER | {"head": (192, 128)}, "sdpa"),
        (HOPPER | {"head": (192, 128), "cudnn": 91002}, "varlen"),
        (AMPERE | {"installed": FLASH3}, "sdpa"),
        (AMPERE | {"softcap": True, "installed": FLASH2}, "flash 2"),
        (AMPERE | {"softcap": True, "installed": {"flash-attn": "2.6.3"}}, "flex"),
        (AMPERE | {"softcap": True, "installed": FLASH2, "half": False}, "sdpa"),
        (AMPERE | {"softcap": True, "compiler_problem": "a C compiler for triton, and none is found"}, "sdpa"),
        (AMPERE | {"softcap": True, "head": (8, 8)}, "sdpa"),
        (AMPERE | {"softcap": True, "head": (16, 16)}, "flex"),
        (HOPPER | {"softcap": True, "installed": FLASH3}, "flash 3"),
        (HOPPER | {"biased": True, "installed": FLASH3}, "sdpa"),
    ],
)
def test_auto_takes_the_best_that_is_there(there: dict[str, Any], expected: str) -> None:
    choice = choose_kernel_backends("auto", "auto", facts(**there))
    assert (choice.linear, choice.attention) == ("torch", expected)


@pytest.mark.parametrize(
    ("asked", "there", "expected"),
    [
        (("torch", "varlen"), {}, ("torch", "varlen")),
        (("auto", "flash"), HOPPER | {"installed": FLASH2}, ("torch", "flash 2")),
        (("auto", "flash"), HOPPER | {"installed": FLASH2 | FLASH3}, ("torch", "flash 3")),
        (("te", "te"), AMPERE | {"installed": TE}, ("te", "te")),
        (("auto", "flex"), AMPERE, ("torch", "flex")),
    ],
)
def test_what_is_asked_for_is_taken(asked: tuple[str, str], there: dict[str, Any], expected: tuple[str, str]) -> None:
    choice = choose_kernel_backends(*asked, facts(**there))
    assert (choice.linear, choice.attention) == expected


@pytest.mark.parametrize(
    ("asked", "there", "said"),
    [
        (("te", "auto"), {}, "kernels.linear = te requires a GPU"),
        (
            ("auto", "flex"),
            AMPERE | {"head": (24, 8)},
            "kernels.attention = flex requires a head size of at least 16, not 8",
        ),
        (
            ("auto", "flex"),
            AMPERE | {"compiler_problem": "a C compiler for triton, and none is found"},
            "kernels.attention = flex requires a C compiler for triton, and none is found",
        ),
        (
            ("te", "auto"),
            HOPPER | {"installed": {"transformer-engine": "2.9.0"}},
            "requires transformer-engine 2.10 or later, 2.9.0 is installed; pip install",
        ),
        (
            ("auto", "flash"),
            HOPPER,
            "kernels.attention = flash requires flash-attn 2.8.3 or later, none is installed; pip install",
        ),
        (("auto", "flash"), HOPPER | {"half": False, "installed": FLASH3}, "precision = bf16"),
        (("auto", "te"), HOPPER | {"installed": TE, "head": (100, 100)}, "a multiple of 8 and at most 256"),
        (("auto", "flex"), {}, "kernels.attention = flex requires a GPU"),
        (("auto", "flex"), HOPPER | {"biased": True}, "flex is not supported with a relative position bias"),
    ],
)
def test_what_is_missing_is_refused_in_one_line(asked: tuple[str, str], there: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        choose_kernel_backends(*asked, facts(**there))
    assert "set kernels." in str(raised.value)


def test_a_choice_is_told_in_one_line_with_its_reasons() -> None:
    line = str(choose_kernel_backends("auto", "auto", facts(**HOPPER, installed=FLASH3)))
    assert line == "kernels: linear torch (auto: as fast as any), attention flash 3 (auto: on Hopper, and installed)"


RECURRENT = {"causal-conv1d": "1.7.0", "mamba-ssm": "2.3.2.post1", "fla-core": "0.6.0"}


@pytest.mark.parametrize(
    ("asked", "there", "expected", "why"),
    [
        ("auto", {"installed": RECURRENT}, "torch", "on a CPU"),
        ("auto", HOPPER | {"installed": RECURRENT}, "library", "auto: installed"),
        ("auto", HOPPER | {"installed": RECURRENT, "half": False}, "torch", "precision = bf16"),
        ("auto", HOPPER, "torch", "none is installed"),
        ("torch", HOPPER | {"installed": RECURRENT}, "torch", "as set"),
        ("library", HOPPER | {"installed": RECURRENT}, "library", "as set"),
    ],
)
@pytest.mark.parametrize("kind", ["conv", "scan", "delta"])
def test_libraries_of_recurrent_mixers(kind: str, asked: str, there: Any, expected: str, why: str) -> None:
    name = {"conv": "causal_conv1d", "scan": "mamba_ssm", "delta": "fla"}[kind]
    choice = choose_kernel_backends("auto", "auto", facts(**there), {kind: name if asked == "library" else asked})
    assert choice.recurrent == {kind: name if expected == "library" else "torch"}
    assert why in choice.because[kind]
    assert f"{kind} {choice.recurrent[kind]} (" in str(choice)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({}, "kernels.conv = causal_conv1d requires a GPU"),
        (
            HOPPER | {"installed": {"causal-conv1d": "1.4.0"}},
            "requires causal-conv1d 1.7 or later, 1.4.0 is installed; pip install",
        ),
        (
            HOPPER | {"installed": RECURRENT, "taps": frozenset({2, 5})},
            "requires convolutions of 2 to 4 taps, not 5",
        ),
    ],
)
def test_a_library_that_cannot_be_used_is_refused(there: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        choose_kernel_backends("auto", "auto", facts(**there), {"conv": "causal_conv1d"})
    assert "set kernels.conv=torch" in str(raised.value)


def test_a_run_on_a_cpu_asks_torch() -> None:
    raw = {"model": {"preset": "tiny"}, "data": {"train": "none"}, "kernels": {"attention": "varlen"}}
    raw["model"] = {
        "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 8
    }  # fmt: skip
    choice = choose_kernels(RunConfig.parse(raw), torch.device("cpu"))
    assert str(choice) == "kernels: linear torch (auto: as fast as any), attention varlen (as set)"
    varlen, sdpa = (
        create_kernels(which, FusibleFunctionCompiler())
        for which in (choice, BackendChoice("torch", "sdpa", {"linear": "", "attention": ""}))
    )
    assert varlen.whole is None
    assert isinstance(varlen.flash, TorchFlashKernel)
    assert isinstance(sdpa.whole, SdpaAttention)
