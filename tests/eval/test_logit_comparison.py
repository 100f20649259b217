"""Whether two folders hold one model, by their logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_decoders import published
from tiny_models import VARIANTS, save_tiny, variant

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families import find_family_by_name, find_family_expressing_model
from mega_common.errors import CheckpointError, DataError
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer
from mega_eval.logit_comparison import compare_logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", find_family_by_name("llama"), variant("attention-bias"))
    return tmp_path / "hf"


def vocabulary(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def test_what_was_only_converted_gives_the_same_to_the_bit(folder: Path, tmp_path: Path) -> None:
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    found = compare_logits(folder, tmp_path / "mega")
    assert (found.difference, found.token_source) == (0.0, "random numbers")
    assert found.tolerance < 1e-3


def test_the_text_is_encoded_by_the_tokenizer_that_travels(folder: Path, tmp_path: Path) -> None:
    train_tokenizer(["some text"], 257, folder)
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    found = compare_logits(folder, tmp_path / "mega")
    expected = "text" if vocabulary(folder) >= 257 else "random numbers"
    assert found.token_source == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_may_differ_as_much_as_it_rounds(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    convert_checkpoint(folder, tmp_path / "mega", "mega", options=ConvertOptions(dtype=dtype))
    found = compare_logits(folder, tmp_path / "mega")
    assert 0 < found.difference <= found.tolerance


def test_another_setting_is_noticed_though_every_tensor_is_the_same(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    raw = json.loads((other / "config.json").read_text())
    raw["rope_theta"] = 77.0
    raw.pop("rope_parameters", None)
    (other / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"hf and .*other are different models: .*largest difference"):
        compare_logits(folder, other)


def test_tokens_of_a_data_set(folder: Path, tmp_path: Path) -> None:
    for name, tokens in {"good": [1, 2, 3, 4], "bad": [1, vocabulary(folder)]}.items():
        with IndexedWriter(tmp_path / name, np.int32) as writer:
            writer.add_document(np.array(tokens))
    found = compare_logits(folder, folder, tmp_path / "good")
    assert (found.tokens, found.token_source) == (4, str(tmp_path / "good"))
    with pytest.raises(DataError, match="outside the model's vocabulary"):
        compare_logits(folder, folder, tmp_path / "bad")


ENCODERS = [name for name, fields in VARIANTS.items() if fields.get("causal") is False]


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_compared_by_hidden_states_and_heads(tmp_path: Path, name: str) -> None:
    config = variant(name)
    save_tiny(tmp_path / "hf", find_family_expressing_model(config), config)
    convert_checkpoint(tmp_path / "hf", tmp_path / "mega", "mega")
    assert compare_logits(tmp_path / "hf", tmp_path / "mega").difference == 0.0
    changed = ("n_heads", 2) if name == "distilbert" else ("layer_norm_eps norm_eps rms_norm_eps", 0.1)
    differs(tmp_path / "hf", tmp_path / "other", *changed)


@pytest.mark.parametrize(
    "more", [{}, {"tie_word_embeddings": False}, {"feed_forward_proj": "gated-gelu"}, {"num_decoder_layers": 1}]
)
def test_encoder_decoders_are_compared_by_logits(tmp_path: Path, more: dict[str, Any]) -> None:
    published(tmp_path / "hf", **more)
    convert_checkpoint(tmp_path / "hf", tmp_path / "mega", "mega")
    assert compare_logits(tmp_path / "hf", tmp_path / "mega").difference == 0.0
    differs(tmp_path / "hf", tmp_path / "other", "relative_attention_max_distance", 6)


def test_reward_models_are_compared_by_scores(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(**sizes, num_labels=1, pad_token_id=0)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "mega", "mega")
    assert compare_logits(tmp_path / "hf", tmp_path / "mega").difference == 0.0
    differs(tmp_path / "hf", tmp_path / "other", "rms_norm_eps", 0.1)


def differs(folder: Path, other: Path, keys: str, value: float) -> None:
    """Check that another value of a setting, under the first of `keys` that is there, is noticed."""
    shutil.copytree(folder, other)
    raw = json.loads((other / "config.json").read_text())
    raw[next(key for key in keys.split() if key in raw)] = value
    (other / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="are different models"):
        compare_logits(folder, other)
