"""Weights with more tokens than they had."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
from tiny_models import BASE, save_tiny, variant
from typer.testing import CliRunner

from mega_ckpt.canonical_tensors import EMBEDDING, HEAD, LAYER_EMBEDDING, canonical_tensors
from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_ckpt.source import open_weight_source
from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_cli.ckpt import app
from mega_common.errors import CheckpointError, MegaError
from mega_common.model_config import ModelConfig


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_are_the_mean_of_the_others(tmp_path: Path, tied: bool) -> None:
    model = ModelConfig.model_validate({**BASE, "tie_embeddings": tied})
    held = {
        f"weights/{name}": ShardedTensor(shape, [TensorBox((0,) * len(shape), torch.randn(shape))])
        for name, shape in canonical_tensors(model).items()
    }
    save_sharded_checkpoint(tmp_path / "checkpoints", 0, held, model=model, state={})
    convert_checkpoint(tmp_path, tmp_path / "hf", "hf", options=ConvertOptions(vocab_size=64), verify=True)
    before, after = open_weight_source(tmp_path), open_weight_source(tmp_path / "hf")
    assert after.model.vocab_size == 64
    for name in [EMBEDDING] if tied else [EMBEDDING, HEAD]:
        old, new = before.read_tensor(name), after.read_tensor(name)
        assert torch.equal(new[:61], old)
        torch.testing.assert_close(new[61:], old.mean(0).expand(3, -1))
    assert torch.equal(after.read_tensor("model.norm.weight"), before.read_tensor("model.norm.weight"))
    with pytest.raises(CheckpointError, match="must be at least 61, the vocabulary size of the model"):
        convert_checkpoint(tmp_path, tmp_path / "small", "mega", options=ConvertOptions(vocab_size=60))


def test_a_table_of_inputs_of_layers_with_fewer_rows_keeps_them(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny(base, find_family_by_name("gemma3n_text"), variant("gemma3n"))
    convert_checkpoint(base, tmp_path / "hf", "hf", options=ConvertOptions(vocab_size=64), verify=True)
    before, after = open_weight_source(base), open_weight_source(tmp_path / "hf")
    assert after.tensor_shape(EMBEDDING)[0] == 64
    assert torch.equal(after.read_tensor(LAYER_EMBEDDING), before.read_tensor(LAYER_EMBEDDING))


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """A folder of transformers' with a tokenizer of 60 tokens, and 61 rows of weights."""
    transformers = pytest.importorskip("transformers")
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, 60)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, vocab_size=61,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "old")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "old")
    return tmp_path / "old"


def test_tokens_are_added_to_tokenizer_and_weights(spoken: Path, tmp_path: Path) -> None:
    """Their rows begin where the tokenizer ends, and the logits of the old tokens keep their bits."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokens").write_text("<think>\n\n</think>\n")
    args = ["convert", spoken, tmp_path / "new", "--to", "hf", "--verify", "--add-tokens", tmp_path / "tokens"]
    CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert words("w5 <think>w6</think>w7", add_special_tokens=False)["input_ids"] == [5, 60, 6, 61, 7]
    old, new = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("old", "new"))
    assert new.config.vocab_size == 62
    with torch.no_grad():
        before, after = (model(torch.arange(60).view(3, 20)).logits for model in (old, new))
    assert torch.equal(before[..., :60], after[..., :60])
    for one, other in (
        (old.lm_head.weight, new.lm_head.weight),
        (old.model.embed_tokens.weight, new.model.embed_tokens.weight),
    ):
        torch.testing.assert_close(other[60:], one[:60].mean(0).expand(2, -1))


def test_tokens_that_cannot_be_added_are_told(spoken: Path, tmp_path: Path) -> None:
    for tokens, size, told in (
        ("<a>,w5", None, "has 'w5' already, with id 5"),
        ("<a>,<a>", None, "'<a>' is given twice"),
        (",", None, "found no tokens"),
        ("<a>,<b>", 61, "must be at least 62 for these tokens, not 61"),
    ):
        args = ["convert", spoken, tmp_path / "new", "--to", "hf", "--add-tokens", tokens]
        args += ["--vocab-size", size] if size else []
        with pytest.raises(MegaError, match=told):
            CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    (spoken / "tokenizer.json").unlink()
    with pytest.raises(MegaError, match=r"requires a tokenizer\.json"):
        convert_checkpoint(spoken, tmp_path / "new", "hf", options=ConvertOptions(tokens=("<a>",)))
    assert not (tmp_path / "new").exists()
