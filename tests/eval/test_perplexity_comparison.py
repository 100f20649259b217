"""Perplexity before and after: of a text and of a data set, each model's as `mega eval` measures it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import save_tiny, variant

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_common.errors import DataError
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer
from mega_eval.dataset_scores import evaluate_perplexity
from mega_eval.model_loading import load_inference_model, load_tokenizer
from mega_eval.perplexity_comparison import compare_perplexity

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    config = variant("llama3").model_copy(update={"vocab_size": 300})
    save_tiny(root / "one", find_family_by_name("llama"), config)
    train_tokenizer([TEXT], 300, root / "one")
    convert_checkpoint(root / "one", root / "other", "hf", options=ConvertOptions(quantize="int8"))
    return root / "one", root / "other"


def test_text_and_data_set_give_the_same_scores(models: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = models
    (tmp_path / "text.txt").write_text(TEXT)
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        writer.add_document(np.array(load_tokenizer(one).encode(TEXT)))
    found, expected = (compare_perplexity(one, other, tmp_path / name) for name in ("text.txt", "tokens"))
    assert found == expected
    model = load_inference_model(other)
    assert found.after == evaluate_perplexity(model, tmp_path / "tokens", min(model.config.max_position, 1024))
    assert found.before.loss != found.after.loss
    assert f"{found.before.perplexity:.4f} before, {found.after.perplexity:.4f} after" in str(found)
    assert abs(found.change) < 0.05
    assert json.loads((other / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"


def test_an_empty_text_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(DataError, match=r"text.txt: perplexity requires at least two tokens, and the text has 0"):
        compare_perplexity(*models, tmp_path / "text.txt")
