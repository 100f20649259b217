"""The sampler `my_extension`: the scores that it changes."""

from __future__ import annotations

from pathlib import Path

import torch

from mega_trainer.extend import load_extensions

ENTRY = load_extensions([str(Path(__file__).parent / "my_extension.py")]).entries("samplers")["my_extension"]


def test_tokens_that_followed_the_last_one_are_penalized() -> None:
    scores = torch.zeros(6, dtype=torch.float64)
    found = ENTRY.adjust(scores, [1, 2, 1, 4], [3, 1], options=ENTRY.options(penalty=1.5))
    assert found.tolist() == [0, 0, -1.5, 0, -1.5, 0]
    assert scores.tolist() == [0] * 6


def test_without_a_repetition_the_scores_are_unchanged() -> None:
    scores = torch.randn(6, dtype=torch.float64)
    assert torch.equal(ENTRY.adjust(scores, [1, 2, 3], [], options=ENTRY.options()), scores)
