"""The mixer `my_extension`: its mathematics in one process, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mega_trainer.extend import compute_logits, verify_run

RUN: dict[str, Any] = {
    "extensions": [str(Path(__file__).parent / "my_extension.py")],
    "model": {"preset": "tiny", "mixers": {"my_extension": {}}, "layers": ["my_extension+mlp", "attention+mlp"]},
}


def test_a_token_depends_on_no_later_one() -> None:
    tokens = torch.arange(12)[None]
    changed = torch.cat([tokens[:, :8], tokens[:, 8:] + 1], 1)
    before, after = compute_logits(RUN, tokens), compute_logits(RUN, changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_the_temperature_changes_the_output() -> None:
    hot = {**RUN, "model": {**RUN["model"], "mixers": {"my_extension": {"temperature": 2.0}}}}
    tokens = torch.arange(12)[None]
    assert not torch.equal(compute_logits(RUN, tokens), compute_logits(hot, tokens))


def test_every_layout_computes_what_one_process_computes() -> None:
    assert verify_run(RUN, layouts=3) == []
