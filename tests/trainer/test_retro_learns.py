"""A small Retro reads facts it has never seen from its neighbours, which is all that tells them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from parity.cases import Case
from parity.worker import Batches, Trainer

from mega_data.loader import StepBatch
from mega_trainer.batch import micro_batches
from mega_trainer.config import RunConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
M, S, SIZE, ROWS, STEPS = 8, 64, 32, 32, 250
MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": SIZE,
    "retro": {"chunk_length": M, "neighbors": 2, "layers": [0, 1]},
}  # fmt: skip


def facts(step: int, *, neighbors: bool) -> StepBatch:
    """Texts that state four facts each, a key and a value of a chunk each, all of tokens drawn for this step.

    The neighbours of a key are the same fact as another text states it and one that has nothing to do with it, in either
    order; of a value, the same value before other text.
    """
    rng = np.random.default_rng([11, step])
    tokens = rng.integers(0, SIZE, (ROWS, S + 1))
    chunks = tokens[:, :-1].reshape(ROWS, S // M, M)
    behind = np.concatenate([chunks[:, 1:], rng.integers(0, SIZE, (ROWS, 1, M))], 1)
    behind[:, 1::2] = rng.integers(0, SIZE, behind[:, 1::2].shape)
    told = np.concatenate([chunks, behind], -1)
    found = np.stack([told, rng.integers(0, SIZE, told.shape)], 2)
    turned = rng.random((ROWS, S // M, 1, 1)) < 0.5
    found = np.where(turned, found[:, :, ::-1], found)
    return StepBatch(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_weights=np.ones((ROWS, S), np.float32),
        position_ids=np.tile(np.arange(S), (ROWS, 1)), document_ids=None, sample_ids=np.arange(ROWS),
        neighbors=found if neighbors else np.full_like(found, -1),
    )  # fmt: skip


def batches(*, neighbors: bool) -> Batches:
    def batch(config: RunConfig, step: int, rank: int, ranks: int, closed: bool) -> StepBatch:
        return facts(step, neighbors=neighbors)

    return batch


def losses(*, neighbors: bool) -> tuple[float, float]:
    """Of held-out values, and of held-out keys, after training."""
    one = Case("retro", MODEL, micro=ROWS, batch=ROWS, length=S, precision="fp32", steps=STEPS, clip=1.0)
    trainer = Trainer.make(one, batches=batches(neighbors=neighbors))
    for _ in range(STEPS):
        trainer.step()
    (model,) = trainer.state.stages.values()
    model.eval()
    micro = next(micro_batches(facts(STEPS + 1, neighbors=neighbors), trainer.config, torch.device("cpu")))
    with torch.no_grad():
        _, _, each = model.whole(micro, model.context_of(micro, lambda *_: None))
    of_keys = (torch.arange(1, S + 1) // M % 2 == 0).expand_as(each)
    return each[~of_keys].mean().item(), each[of_keys].mean().item()


def test_values_of_facts_never_seen_are_told_by_neighbours() -> None:
    values, keys = losses(neighbors=True)
    blind, _ = losses(neighbors=False)
    print(values, keys, blind)
    assert math.isclose(blind, math.log(SIZE), rel_tol=0.03)
    assert math.isclose(keys, math.log(SIZE), rel_tol=0.1)
    assert values < blind - 1.5
