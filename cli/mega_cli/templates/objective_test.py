"""The objective `my_extension`: its values, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mega_trainer.extend import load_extensions, verify_run

FILE = str(Path(__file__).parent / "my_extension.py")
ENTRY = load_extensions([FILE]).entries("objectives")["my_extension"]
RUN: dict[str, Any] = {
    "extensions": [FILE],
    "model": {"preset": "tiny"},
    "objective": {"kind": "my_extension", "options": {"gamma": 1.0}},
}


def test_gamma_zero_is_the_cross_entropy() -> None:
    log_probs = torch.tensor([-0.1, -2.0], dtype=torch.float64)
    losses = ENTRY.token_loss(log_probs, torch.zeros_like(log_probs), options=ENTRY.options(gamma=0))
    torch.testing.assert_close(losses, -log_probs)


def test_a_known_token_counts_less() -> None:
    log_probs = torch.tensor([-0.1, -2.0], dtype=torch.float64)
    known, unknown = (
        ENTRY.token_loss(log_probs, torch.zeros_like(log_probs), options=ENTRY.options(gamma=2)) / -log_probs
    )
    assert known < unknown < 1


def test_every_layout_computes_what_one_process_computes() -> None:
    assert verify_run(RUN, layouts=2) == []
