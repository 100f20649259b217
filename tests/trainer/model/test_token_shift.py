"""Token shift in blocks of an extension: documents, parallel layouts, generation, and a missing declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extension_cases import SIZES, extended_cases, find_differences

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_eval.generation_check import compare_generation_with_training
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.token_shift import TokenShift
from mega_trainer.verify.tiny_model import TinyModelRun
from mega_trainer.verify.verification import GenerationFindings, make_tiny_layout_case

# Shifts of the stream, of columns that all tokens of a context rank have, and of both blocks of a layer.
SHIFTED = """
from torch import nn
from mega_trainer.extend import AttentionCore, Block, BlockTraits, Extension, FeedForward, SplitHeads, TokenShift

class ShiftedAttention(nn.Module):
    def __init__(self, build, layer, options):
        super().__init__()
        heads, self.size = build.config.num_attention_heads, build.config.query_key_head_dim
        name = f"model.layers.{layer}.shifted"
        self.qkv = build.build_column_linear([SplitHeads(f"{name}.{part}", heads, self.size) for part in "qkv"], bias=False)
        self.core = AttentionCore(build, layer)
        self.out = build.build_row_linear(f"{name}.o", heads * self.size, bias=False)
        self.stream, self.values = TokenShift(build, layer, "stream"), TokenShift(build, layer, "values")

    def forward(self, x, context):
        q, k, v = self.qkv(x + self.stream(x, context)).chunk(3, -1)
        v = v + 0.5 * self.values(v, context)
        return self.out(self.core(*(part.unflatten(-1, (-1, self.size)) for part in (q, k, v)), context).flatten(-2))

class ShiftedFeedForward(nn.Module):
    def __init__(self, build, layer, options):
        super().__init__()
        self.block = FeedForward(build, f"model.layers.{layer}.mlp", build.config.ffn_hidden_size)
        self.shift = TokenShift(build, layer, "mlp")

    def forward(self, x, context):
        return self.block(x - self.shift(x, context), context)

EXTENSION = Extension(
    name="shifted", version="1", api=1,
    mixers={"shifted": Block(ShiftedAttention, declares=lambda model, options: BlockTraits(heads=8, TRAITS))},
    feed_forwards={"shifted_mlp": Block(ShiftedFeedForward, declares=lambda model, options: BlockTraits(TRAITS))},
)
"""
TRAITS = "recurrent=True, context_parallel=True"
MODEL: dict[str, Any] = {"mixers": {"shifted": {}}, "feed_forwards": {"shifted_mlp": {}}}


def write_extension(folder: Path, traits: str = TRAITS) -> str:
    (folder / "shifted.py").write_text(SHIFTED.replace("TRAITS", traits))
    return str(folder / "shifted.py")


def test_the_first_token_of_a_document_has_none_before_it() -> None:
    shift = TokenShift(LayerBuilder(ModelConfig(**SIZES, num_layers=1)), 0, "")
    x = torch.arange(1.0, 9.0).reshape(2, 4, 1)
    starts = np.array([[0, 0, 2, 2], [0, 1, 1, 1]])
    for bounds, expected in ((None, [[0, 1, 2, 3], [0, 5, 6, 7]]), (starts, [[0, 1, 0, 3], [0, 0, 6, 7]])):
        context = ForwardContext(SequenceMask(4, torch.device("cpu"), bounds))
        assert shift(x, context).squeeze(-1).tolist() == expected


def test_every_layout_computes_what_one_process_computes(tmp_path: Path) -> None:
    layouts: list[tuple[dict[str, Any], str]] = [
        ({"tp": 2, "sp": True, "cp": 2}, "full"), ({"tp": 4, "sp": True}, "none"),
    ]  # fmt: skip
    run = {"model": {**MODEL, "layers": ["shifted+shifted_mlp"]}}
    cases = extended_cases(write_extension(tmp_path), run, layouts)
    assert all(case.closed for case in cases)  # several documents in a sequence
    assert not find_differences(cases)


def test_generation_computes_what_training_computes(tmp_path: Path) -> None:
    raw = {
        "extensions": [write_extension(tmp_path)], "data": {"train": "none", "seq_length": 32},
        "model": {**SIZES, **MODEL, "num_layers": 2, "layers": ["shifted+shifted_mlp", "attention+shifted_mlp"]},
    }  # fmt: skip
    tiny = TinyModelRun.from_run(RunConfig.parse(resolve_run_config(raw)))
    found = compare_generation_with_training(make_tiny_layout_case(tiny, 2, 1, parallel={}, steps=1))
    assert isinstance(found, GenerationFindings)
    assert found.error < 1e-10, found.difference


@pytest.mark.parametrize("layer", ["shifted+mlp", "attention+shifted_mlp"])
def test_a_block_that_does_not_declare_its_state_is_refused(layer: str, tmp_path: Path) -> None:
    extensions = [write_extension(tmp_path, "context_parallel=True")]
    used = {key: blocks for key, blocks in MODEL.items() if set(blocks) & set(layer.split("+"))}
    model = {**SIZES, **used, "num_layers": 1, "layers": [layer]}
    with pytest.raises(ConfigError, match="a TokenShift keeps a state from token to token"):
        resolve_run_config({"extensions": extensions, "model": model, "data": {"train": "none"}})


def test_a_feed_forward_block_with_a_state_makes_the_model_recurrent(tmp_path: Path) -> None:
    """So that generation shares no prefixes, and a bidirectional model is refused."""
    model = {
        **SIZES,
        "feed_forwards": {"shifted_mlp": {}},
        "num_layers": 2,
        "layers": ["attention+shifted_mlp", "attention+mlp"],
    }
    for traits, recurrent in (("recurrent=True", True), ("recurrent=False", False)):
        (tmp_path / traits).mkdir()
        extension = write_extension(tmp_path / traits, traits)
        if not recurrent:
            Path(extension).write_text(Path(extension).read_text().replace("TokenShift(build", "nn.Identity(build"))
        raw = {"extensions": [extension], "model": model, "data": {"train": "none"}}
        assert RunConfig.parse(resolve_run_config(raw)).model.is_recurrent is recurrent
