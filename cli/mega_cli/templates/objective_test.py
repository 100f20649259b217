"""The objective `my_extension`: its values."""

from __future__ import annotations

import subprocess
import sys
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


def test_every_layout_computes_what_one_process_computes() -> None:
    extension = f"--set=extensions=[{Path(__file__).parent / 'my_extension.py'}]"
    run = [str(Path(__file__).parent / "run.yaml"), extension, "--layouts", "2", "--ranks", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "mega_cli.main", "verify", *run], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
