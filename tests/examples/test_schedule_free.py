"""The example of a schedule-free optimizer, against the formulas of the paper and in every layout."""

from __future__ import annotations

import torch
from extension_cases import EXAMPLES, extended_cases, find_differences

from mega_trainer.config.extensions import load_extensions

FILE = "schedule_free.py"


def test_it_computes_the_formulas_of_the_paper() -> None:
    entry = load_extensions([str(EXAMPLES / FILE)]).entries("optimizers")["schedule_free_adamw"]
    rule, weight = entry.build(None, entry.options(beta1=0.8, beta2=0.9, eps=0.1)), torch.randn(5, dtype=torch.float64)
    state = {name: torch.zeros(5, dtype=torch.float64) for name in rule.state}
    x = y = z = weight.clone()
    v = torch.zeros(5, dtype=torch.float64)
    for step in range(1, 5):
        gradient = torch.randn(5, dtype=torch.float64)
        v = 0.9 * v + 0.1 * gradient**2
        z = z - 0.3 * (gradient / ((v / (1 - 0.9**step)).sqrt() + 0.1) + 0.01 * y)
        x = (1 - 1 / step) * x + z / step
        y = 0.2 * z + 0.8 * x
        rule.update(weight, gradient, state, lr=0.3, weight_decay=0.01, step=step)
        torch.testing.assert_close(weight, y)
        torch.testing.assert_close(state["z"], z)


def test_every_layout_computes_what_one_process_computes() -> None:
    run = {"optimizer": {"name": "schedule_free_adamw", "options": {"eps": 1e-2}}}
    layouts = [
        ({"zero": 0}, "none"), ({"zero": 1}, "none"), ({"tp": 2, "zero": 2}, "none"), ({"zero": 3}, "none"),
        ({"pp": 2, "zero": 1}, "none"),
    ]  # fmt: skip
    assert not find_differences(extended_cases(FILE, run, layouts))
