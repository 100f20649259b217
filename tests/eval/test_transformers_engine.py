"""Evaluation and generation with a module of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mega_ckpt.source import open_weight_source
from mega_ckpt.stream_checkpoint import write_weights_as_checkpoint
from mega_common.errors import ConfigError
from mega_data.tokenizer import train_tokenizer
from mega_eval.language_model import LanguageModel
from mega_trainer.model.transformers_decoder import TransformersDecoder

transformers = pytest.importorskip("transformers")
STORY = "the end of the story is the beginning of the other story"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model type that mega does not have, without a KV cache of keys alone, with a tokenizer."""
    config = transformers.Lfm2Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=290, max_position_embeddings=512, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path / "hf")
    train_tokenizer([STORY] * 3, 282, tmp_path / "hf")
    return tmp_path / "hf"


def test_greedy_text_and_scores_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    source = open_weight_source(folder, implementation="transformers")
    write_weights_as_checkpoint(source, tmp_path / "mega", "writing mega")
    loaded = LanguageModel.load(str(tmp_path / "mega"), device="cpu")
    module = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = loaded.tokenizer.encode(STORY)[:7]
    (found,) = loaded.generate([prompt], max_new_tokens=20)
    wanted = module.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 7:]
    assert found.tokens == wanted[: len(found.tokens)].tolist()
    (score,) = loaded.score([STORY])
    tokens = torch.tensor([loaded.tokenizer.encode(STORY, add_special_tokens=True)])
    logprobs = module(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
    torch.testing.assert_close(torch.tensor(score.logprobs), logprobs[:, 0].detach(), rtol=1e-5, atol=1e-5)


def test_other_ways_are_refused(folder: Path, tmp_path: Path) -> None:
    write_weights_as_checkpoint(
        open_weight_source(folder, implementation="transformers"), tmp_path / "mega", "writing mega"
    )
    loaded = LanguageModel.load(str(tmp_path / "mega"), device="cpu", draft="ngrams")
    assert isinstance(loaded.model, TransformersDecoder)
    with pytest.raises(ConfigError, match="draft is not supported"):
        loaded.generate([[3, 4]], max_new_tokens=2)
