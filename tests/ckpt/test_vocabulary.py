"""Weights with more tokens than they had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import BASE

from mega_ckpt.convert import Options, convert
from mega_ckpt.names import EMBEDDING, HEAD, tensors_of
from mega_ckpt.pieces import Box, Sharded
from mega_ckpt.source import open_source
from mega_ckpt.store import save
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_are_the_mean_of_the_others(tmp_path: Path, tied: bool) -> None:
    model = ModelConfig.model_validate({**BASE, "tie_embeddings": tied})
    held = {
        f"weights/{name}": Sharded(shape, [Box((0,) * len(shape), torch.randn(shape))])
        for name, shape in tensors_of(model).items()
    }
    save(tmp_path / "checkpoints", 0, held, model=model, state={})
    convert(tmp_path, tmp_path / "hf", "hf", options=Options(vocab_size=64), verify=True)
    before, after = open_source(tmp_path), open_source(tmp_path / "hf")
    assert after.model.vocab_size == 64
    for name in [EMBEDDING] if tied else [EMBEDDING, HEAD]:
        old, new = before.read(name), after.read(name)
        assert torch.equal(new[:61], old)
        torch.testing.assert_close(new[61:], old.mean(0).expand(3, -1))
    assert torch.equal(after.read("model.norm.weight"), before.read("model.norm.weight"))
    with pytest.raises(CheckpointError, match="is smaller than the model's, which has 61"):
        convert(tmp_path, tmp_path / "small", "mega", options=Options(vocab_size=60))
