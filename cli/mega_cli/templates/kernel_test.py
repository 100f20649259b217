"""The kernel `my_extension`: a training step with it is that with mega's."""

from __future__ import annotations

from pathlib import Path

import torch

from mega_trainer.extend import load_extensions, verify_run

FILE = str(Path(__file__).parent / "my_extension.py")
ENTRY = load_extensions([FILE]).entries("kernels")["my_extension"]


def test_calls_that_it_does_not_support_are_left_to_mega() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    assert ENTRY.supports(x, weight, 1e-6, zero_centered=False)
    assert not ENTRY.supports(x.bfloat16(), weight, 1e-6, zero_centered=False)
    assert not ENTRY.supports(x, weight, 1e-6, zero_centered=True)


def test_a_step_is_that_with_the_kernel_of_mega() -> None:
    run = {"extensions": [FILE], "model": {"preset": "tiny"}, "kernels": {"functions": ["my_extension"]}}
    assert verify_run(run, layouts=1) == []
