"""The optimizer `my_extension`: its formulas, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mega_trainer.extend import OptimizerConfig, load_extensions, verify_run

FILE = str(Path(__file__).parent / "my_extension.py")
ENTRY = load_extensions([FILE]).entries("optimizers")["my_extension"]
RUN: dict[str, Any] = {
    "extensions": [FILE],
    "model": {"preset": "tiny"},
    "optimizer": {"name": "my_extension", "lr": 3e-4},
}


def test_it_computes_its_formulas() -> None:
    rule = ENTRY.build(OptimizerConfig(), ENTRY.options(beta1=0.5, beta2=0.75))
    weight, m = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    expected, state = weight.clone(), {"momentum": torch.zeros(3, dtype=torch.float64)}
    for step in range(1, 4):
        gradient = torch.tensor([1.0, -2.0, 3.0 - step], dtype=torch.float64)
        expected = expected - 0.1 * ((0.5 * m + 0.5 * gradient).sign() + 0.01 * expected)
        m = 0.75 * m + 0.25 * gradient
        rule.update(weight, gradient, state, lr=0.1, weight_decay=0.01, step=step)
        torch.testing.assert_close(weight, expected)
        torch.testing.assert_close(state["momentum"], m)


def test_every_layout_computes_what_one_process_computes() -> None:
    assert verify_run(RUN, layouts=2) == []
