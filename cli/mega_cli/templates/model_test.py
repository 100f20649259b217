"""`my_extension` in a model: later tokens, its effect, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from mega_trainer.extend import compute_logits, verify_run

HERE = Path(__file__).parent
SETTINGS = yaml.safe_load((HERE / "run.yaml").read_text(encoding="utf-8"))
RUN: dict[str, Any] = {"extensions": [str(HERE / "my_extension.py")], "model": SETTINGS["model"]}


def test_a_token_depends_on_no_later_one() -> None:
    tokens = torch.arange(12)[None]
    changed = torch.cat([tokens[:, :8], tokens[:, 8:] + 1], 1)
    before, after = compute_logits(RUN, tokens), compute_logits(RUN, changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_it_changes_the_model() -> None:
    usual = {"model": {"preset": "tiny", "vocab_size": SETTINGS["model"]["vocab_size"]}}
    tokens = torch.arange(12)[None]
    assert not torch.allclose(compute_logits(RUN, tokens), compute_logits(usual, tokens))


def test_every_layout_computes_what_one_process_computes() -> None:
    assert verify_run(RUN, layouts=2) == []
