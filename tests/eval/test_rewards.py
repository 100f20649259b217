"""A reward model's scores of preference pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from preference_pairs import pairs, write_model, write_pairs

from mega_common.errors import ConfigError
from mega_eval.dataset_scores import evaluate_preferences
from mega_eval.model_loading import load_inference_model

transformers = pytest.importorskip("transformers", reason="whose scores are the truth here")


def test_accuracy_and_margin_are_those_of_transformers_and_nothing_else_is_asked_of_it(tmp_path: Path) -> None:
    made = pairs(9)
    write_pairs(tmp_path / "pairs", made)
    write_model(tmp_path / "scorer", 3, kind="LlamaForSequenceClassification", num_labels=1)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer")
    apart = [
        theirs(torch.tensor([good])).logits.item() - theirs(torch.tensor([bad])).logits.item()
        for (good, _), (bad, _) in made
    ]
    with pytest.raises(ConfigError, match="a reward model, which scores texts and predicts no tokens"):
        load_inference_model(tmp_path / "scorer")
    found = evaluate_preferences(
        load_inference_model(tmp_path / "scorer", dtype=torch.float64, kinds=("reward model",)), tmp_path / "pairs"
    )
    assert found.pairs == 9
    assert found.accuracy == pytest.approx(sum(each > 0 for each in apart) / 9)
    assert found.margin == pytest.approx(sum(apart) / 9, rel=1e-4)
