"""A small Retro reads facts it has never seen from its neighbors, which is all that tells them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.verify.case_trainer import BatchFunction, CaseTrainer
from mega_trainer.verify.layout_case import LayoutCase

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
M, S, SIZE, ROWS, STEPS = 8, 64, 32, 16, 60
MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": SIZE, "init_std": 0.1,
    "retro": {"chunk_length": M, "neighbors": 2, "layers": [0, 1]},
}  # fmt: skip


def facts(step: int, *, neighbors: bool) -> StepBatch:
    """Texts that state four facts each, all drawn for this step: a key of a chunk of tokens, and its value, a chunk of one token
    again and again, of which the first one is asked for.

    Another text states the same facts: it has the key with its value, and the value with other text behind it, which are
    one of the two neighbors of each. There is no second one.
    """
    rng = np.random.default_rng([11, step])
    tokens = rng.integers(0, SIZE, (ROWS, S + 1))
    chunks = tokens[:, :-1].reshape(ROWS, S // M, M)
    chunks[:, 1::2] = chunks[:, 1::2, :1]
    tokens[:, :-1] = chunks.reshape(ROWS, S)
    behind = rng.integers(0, SIZE, chunks.shape)
    behind[:, ::2] = chunks[:, 1::2]
    told = np.concatenate([chunks, behind], -1)
    found = np.stack([told, np.full_like(told, -1)], 2)
    found = np.where(rng.random((ROWS, S // M, 1, 1)) < 0.5, found[:, :, ::-1], found)
    weights = np.zeros((ROWS, S), np.float32)
    weights[:, M - 1 :: 2 * M] = 1.0
    return StepBatch(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_weights=weights,
        position_ids=np.tile(np.arange(S), (ROWS, 1)), document_ids=None, sample_ids=np.arange(ROWS),
        neighbors=found if neighbors else np.full_like(found, -1),
    )  # fmt: skip


def batches(*, neighbors: bool) -> BatchFunction:
    def batch(config: RunConfig, step: int, rank: int, ranks: int, closed: bool) -> StepBatch:
        return facts(step, neighbors=neighbors)

    return batch


def held_out(*, neighbors: bool) -> float:
    """The loss of the values of facts that were not trained on."""
    one = LayoutCase("retro", MODEL, micro=ROWS, batch=ROWS, length=S, precision="fp32", steps=STEPS, clip=1.0)
    trainer = CaseTrainer.build(one, batches=batches(neighbors=neighbors))
    for _ in range(STEPS):
        trainer.step()
    model = next(iter(trainer.state.stages.values())).eval()
    found = []
    for step in range(STEPS, STEPS + 4):
        micro = next(split_micro_batches(facts(step, neighbors=neighbors), trainer.config, torch.device("cpu")))
        with torch.no_grad():
            total, _, _ = model.run_stage(None, micro, model.make_batch_context(micro, lambda *_: None))
        found.append(total.item() / micro.weights.sum().item())
    return sum(found) / len(found)


def test_values_of_facts_never_seen_are_told_by_neighbors() -> None:
    assert held_out(neighbors=True) < 1.0
    assert held_out(neighbors=False) > 0.9 * math.log(SIZE)
