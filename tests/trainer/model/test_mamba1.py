"""Mamba-1: initial values, documents, and what context ranks send. Its parity with transformers is in tests/interop."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from mega_common.model_config import ModelConfig
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.comm import CommGroup, CommTrafficCounter
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.mamba1 import Mamba1Mixer
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.parameter_info import is_weight_matrix

S, D, N = 30, 12, 5


def build_mixer(inner: int, groups: ParallelGroups | None = None) -> Mamba1Mixer:
    sizes = {
        "inner_size": inner,
        "state_size": N,
        "dt_rank": 4,
        "chunk_size": 7,
        "norms": "weight",
        "dt_init_floor": 0.002,
    }
    config = ModelConfig.parse(
        {
            "layers": ["mamba1"], "hidden_size": D, "ffn_hidden_size": 8, "num_attention_heads": 4, "vocab_size": 8, "init_std": 0.5,
            "mamba1": sizes,
        }
    )  # fmt: skip
    layer = Mamba1Mixer(LayerBuilder(config, groups or ParallelGroups(), dtype=torch.float64, cp_kind="alltoall"), 0)
    initialize_weights(layer, 3)
    return layer


def context(length: int, documents: np.ndarray | None = None) -> ForwardContext:
    starts = None if documents is None else DocumentBounds.from_positions(documents, documents).document_starts
    return ForwardContext(SequenceMask(length, torch.device("cpu"), starts))


def test_initial_values() -> None:
    layer = build_mixer(4096)
    steps, weight = torch.nn.functional.softplus(layer.selection.bias), layer.selection.steps
    assert steps.min().item() == pytest.approx(0.002, rel=1e-3)
    assert 0.09 < steps.max() < 0.1001
    assert 0.499 < weight.abs().max() <= 0.5
    torch.testing.assert_close(layer.a_log.exp(), torch.arange(1.0, N + 1).double().expand(4096, N), rtol=1e-6, atol=0)
    assert not is_weight_matrix(layer.a_log)  # no weight decay
    assert (layer.skip == 1).all()


def test_a_document_is_computed_as_if_it_were_alone() -> None:
    layer, starts = build_mixer(24), [0, 1, 2, 9, 14, S]
    x = torch.randn(1, S, D, dtype=torch.float64)
    y = layer(x, context(S, np.repeat(np.arange(5), np.diff(starts))[None]))
    for begin, end in pairwise(starts):
        alone = layer(x[:, begin:end], context(end - begin))
        torch.testing.assert_close(y[:, begin:end], alone, rtol=1e-12, atol=1e-13)


def test_context_ranks_pass_states_whatever_attention_does() -> None:
    log = CommTrafficCounter()
    layer = build_mixer(24, replace(ParallelGroups(), cp=CommGroup("cp", (0, 1), 0, log=log)))
    x = torch.randn(2, S // 2 + 1, D, dtype=torch.float64)
    layer(x, context(S + 2))
    seen = layer.projection(x)[..., :24]
    assert {key: entry[1] for key, entry in log.counts.items()} == {
        ("cp", "all_gather"): layer.recurrence.state_passing_bytes(seen)
    }
