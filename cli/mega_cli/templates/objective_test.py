"""The objective `my_extension`: its values."""

from __future__ import annotations

from pathlib import Path

import torch

from mega_trainer.extend import load_extensions

ENTRY = load_extensions([str(Path(__file__).parent / "my_extension.py")]).entries("objectives")["my_extension"]


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
