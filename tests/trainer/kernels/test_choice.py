"""Which back end computes what, from the facts of a machine and a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_common.errors import ConfigError
from mega_trainer.build import choose_kernels, make_kernels
from mega_trainer.config import RunConfig
from mega_trainer.kernels.choice import Choice, Facts, choose
from mega_trainer.kernels.flash import TorchFlash
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.kernels.torch import Sdpa

HOPPER = {"capability": (9, 0), "cudnn": 91500}
AMPERE = {"capability": (8, 0), "cudnn": 91500}
FLASH2, FLASH3, TE = {"flash-attn": "2.8.3"}, {"flash-attn-3": "3.0.0b1"}, {"transformer-engine": "2.20.2"}


def facts(**other: Any) -> Facts:
    cpu: dict[str, Any] = {
        "installed": {}, "capability": None, "cudnn": None, "half": True, "head": (128, 128), "softcap": False
    }  # fmt: skip
    return Facts(**(cpu | other))


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
        (HOPPER | {"softcap": True, "installed": FLASH3}, "flash 3"),
    ],
)
def test_auto_takes_the_best_that_is_there(there: dict[str, Any], expected: str) -> None:
    choice = choose("auto", "auto", facts(**there))
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
    choice = choose(*asked, facts(**there))
    assert (choice.linear, choice.attention) == expected


@pytest.mark.parametrize(
    ("asked", "there", "said"),
    [
        (("te", "auto"), {}, "kernels.linear = te: it needs a GPU"),
        (
            ("te", "auto"),
            HOPPER | {"installed": {"transformer-engine": "2.9.0"}},
            "2.9.0 is installed of transformer-engine; pip install",
        ),
        (("auto", "flash"), HOPPER, "kernels.attention = flash: none is installed of flash-attn; pip install"),
        (("auto", "flash"), HOPPER | {"half": False, "installed": FLASH3}, "precision = bf16"),
        (("auto", "te"), HOPPER | {"installed": TE, "head": (100, 100)}, "a multiple of 8 up to 256"),
        (("auto", "flex"), {}, "kernels.attention = flex: it needs a GPU"),
    ],
)
def test_what_is_missing_is_refused_in_one_line(asked: tuple[str, str], there: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        choose(*asked, facts(**there))
    assert "or set kernels." in str(raised.value)


def test_a_choice_is_told_in_one_line_with_its_reasons() -> None:
    line = str(choose("auto", "auto", facts(**HOPPER, installed=FLASH3)))
    assert line == "kernels: linear torch (auto: as fast as any), attention flash 3 (auto: on Hopper, and installed)"


def test_a_run_on_a_cpu_asks_torch() -> None:
    raw = {"model": {"preset": "tiny"}, "data": {"train": "none"}, "kernels": {"attention": "varlen"}}
    raw["model"] = {
        "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 8
    }  # fmt: skip
    choice = choose_kernels(RunConfig.parse(raw), torch.device("cpu"))
    assert str(choice) == "kernels: linear torch (auto: as fast as any), attention varlen (as asked)"
    varlen, sdpa = (
        make_kernels(which, Leaves()) for which in (choice, Choice("torch", "sdpa", {"linear": "", "attention": ""}))
    )
    assert varlen.whole is None
    assert isinstance(varlen.flash, TorchFlash)
    assert isinstance(sdpa.whole, Sdpa)
