"""Generation against training: a block that forgets the tokens before is named with its layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from extension_cases import SIZES

from mega_eval.generation_check import compare_generation_with_training
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.verify.tiny_model import TinyModelRun
from mega_trainer.verify.verification import GenerationFindings, Verification, make_tiny_layout_case

FORGETFUL = """
from torch import nn
from mega_trainer.extend import Block, BlockTraits, Extension, FeedForward

class Averaged(nn.Module):
    def __init__(self, build, layer, options):
        super().__init__()
        self.block = FeedForward(build, f"model.layers.{layer}.mlp", build.config.ffn_hidden_size)

    def forward(self, x, context):
        RAISE
        return self.block((x + nn.functional.pad(x[:, :-1], (0, 0, 1, 0))) / 2, context)

EXTENSION = Extension(name="averaged", version="1", api=1, feed_forwards={"averaged": Block(Averaged)})
"""


@pytest.fixture
def tiny(tmp_path: Path, request: pytest.FixtureRequest) -> TinyModelRun:
    """A run whose second layer reads the token before, which generation does not keep; `request.param` is a line of it."""
    (tmp_path / "averaged.py").write_text(FORGETFUL.replace("RAISE", getattr(request, "param", "")))
    raw: dict[str, Any] = {
        "extensions": [str(tmp_path / "averaged.py")], "data": {"train": "none", "seq_length": 32},
        "model": {**SIZES, "num_layers": 2, "layers": ["attention+mlp", "attention+averaged"], "feed_forwards": {"averaged": {}}},
    }  # fmt: skip
    return TinyModelRun.from_run(RunConfig.parse(resolve_run_config(raw)))


def test_the_first_layer_that_differs_is_named(tiny: TinyModelRun) -> None:
    found = compare_generation_with_training(make_tiny_layout_case(tiny, 2, 1, parallel={}, steps=1))
    assert isinstance(found, GenerationFindings)
    assert found.error > 1e-6
    difference = found.difference
    assert difference is not None
    assert (difference.kind, difference.name, difference.layer) == ("activation", "model.layers.1.mlp", 1)
    assert "in training" in str(difference)


@pytest.mark.parametrize("tiny", ["assert context.cache is None, 'no cache'"], indirect=True)
def test_an_error_in_generation_is_a_failed_check(tiny: TinyModelRun) -> None:
    verification = Verification(tiny, layouts=1, ranks=1, check_generation=compare_generation_with_training)
    row = verification._compare_generation(compare_generation_with_training)
    assert "AssertionError: no cache (in forward, " in row.problem
