"""Vectors of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_expressing_model
from mega_common.errors import ConfigError, DataError
from mega_eval.model_loading import load_inference_model
from mega_eval.text_embedding import compute_embeddings

TEXTS = [[3, 9, 11, 8], [5], [4, 30, 31, 32, 33, 34, 35, 36, 37], [3, 9, 11, 8, 12], [60, 59]]


@pytest.mark.parametrize("name", ["bert-without-a-head", "modernbert", "roberta"])
def test_are_pooled_hidden_states_of_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", reason="the reference implementation")
    config = variant(name)
    reference, model = (
        save_tiny(tmp_path, find_family_expressing_model(config), config),
        load_inference_model(tmp_path, kinds=("encoder",)),
    )
    found = {pooling: compute_embeddings(model, TEXTS, pooling=pooling, batch_tokens=12) for pooling in ("mean", "cls")}
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            out = reference.base_model(torch.tensor([text])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(found["mean"][row], out.mean(0), atol=1e-5)
        np.testing.assert_allclose(found["cls"][row], out[0], atol=1e-5)


def test_options_and_mistakes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = variant("bert")
    save_tiny(tmp_path, find_family_expressing_model(config), config)
    model = load_inference_model(tmp_path, kinds=("encoder",))
    np.testing.assert_allclose(np.linalg.norm(compute_embeddings(model, TEXTS, normalize=True), axis=1), 1, atol=1e-6)
    cut: Any = compute_embeddings(model, TEXTS, max_length=4)
    np.testing.assert_allclose(cut[3], cut[0], atol=1e-6)
    for texts, told in (([[1], []], "text 2 has no tokens"), ([[61]], "token 61 of text 1 is outside")):
        with pytest.raises(DataError, match=told):
            compute_embeddings(model, texts)
    model.config = model.config.model_copy(update={"causal": True})
    with pytest.raises(ConfigError, match="--pooling cls requires an encoder"):
        compute_embeddings(model, TEXTS, pooling="cls")
