"""Layers that predict further tokens: what they compute, what they see, what their loss is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.run.train_step import normalize_auxiliary_loss_weights

B, S = 2, 9


def run_config(**fields: Any) -> RunConfig:
    model = {
        "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "vocab_size": 31,
        "mtp_layers": 2, "init_std": 0.2, **fields,
    }  # fmt: skip
    raw = {"model": model, "data": {"train": ["none"], "seq_length": S}, "batch": {"micro": B, "global": B}}
    return RunConfig.parse(raw)


def samples(documents: bool = True) -> StepBatch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 31, (B, S + 1))
    return StepBatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_weights=(rng.random((B, S)) < 0.7).astype(np.float32),
        position_ids=np.broadcast_to(np.arange(S), (B, S)),
        document_ids=np.cumsum(rng.random((B, S)) < 0.3, axis=1).astype(np.int32) if documents else None,
        sample_ids=np.arange(B),
    )


def batch_of(config: RunConfig, drawn: StepBatch | None = None) -> MicroBatch:
    (batch,) = split_micro_batches(drawn or samples(), config, torch.device("cpu"))
    return batch


def build_decoder(model: ModelConfig) -> Decoder:
    decoder = Decoder(LayerBuilder(model, dtype=torch.float64))
    initialize_weights(decoder, 3)
    return decoder


def objective(decoder: Decoder, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    total, sums, _ = decoder.run_stage(
        None, batch, decoder.make_forward_context(batch.positions, sequence_bounds=batch.sequence_bounds)
    )
    return total, sums


@pytest.mark.parametrize("documents", [False, True])
def test_each_label_is_the_one_so_many_places_on_and_counts_where_it_can_be_known(documents: bool) -> None:
    drawn = samples(documents)
    batch = batch_of(run_config(), drawn)
    for places, ahead in enumerate(batch.mtp_targets, 1):
        for b in range(B):
            for i in range(S):
                there = i + places
                known = there < S and (not documents or drawn.document_ids[b, i] == drawn.document_ids[b, there])
                assert ahead.weights[b, i] == (known and drawn.loss_weights[b, there])
                if there < S:
                    assert ahead.tokens[b, i] == drawn.tokens[b, there]
                    assert ahead.labels[b, i] == drawn.labels[b, there]


@pytest.mark.parametrize("tied", [False, True])
def test_the_objective_is_what_the_paper_says(tied: bool) -> None:
    config = run_config(tie_embeddings=tied)
    decoder, batch = build_decoder(config.model), batch_of(config)
    context, table = (
        decoder.make_forward_context(batch.positions, sequence_bounds=batch.sequence_bounds),
        decoder.embedding.weight,
    )
    norm, head = (lambda x, n: F.rms_norm(x, (16,), n.weight, 1e-5)), decoder.output_weight
    hidden = norm(decoder(table[batch.tokens], context), decoder.head.norm)
    main = (F.cross_entropy((hidden @ head.T).mT, batch.labels, reduction="none") * batch.weights).sum()
    further = torch.zeros((), dtype=torch.float64)
    for layer, ahead in zip(decoder.predictors, batch.mtp_targets, strict=True):
        parts = [norm(table[ahead.tokens], layer.embedding_norm), norm(hidden, layer.hidden_norm)]
        hidden = norm(layer.block(torch.cat(parts, -1) @ layer.join.T, context), layer.norm)
        further += (F.cross_entropy((hidden @ head.T).mT, ahead.labels, reduction="none") * ahead.weights).sum()
    total, sums = objective(decoder, batch)
    torch.testing.assert_close(sums, torch.stack([main, further]))
    torch.testing.assert_close(total, main + 0.3 * further)
    expected = torch.autograd.grad(main + 0.3 * further, list(decoder.parameters()))
    torch.testing.assert_close(torch.autograd.grad(total, list(decoder.parameters())), expected)


def test_a_further_token_is_predicted_from_those_before_it_alone() -> None:
    config = run_config()
    decoder, place = build_decoder(config.model), 5
    drawn = samples(documents=False)
    other = drawn.tokens.copy()
    other[:, place] = (other[:, place] + 1) % 31
    for layer in range(2):
        seen = []
        for tokens in (drawn.tokens, other):
            batch = batch_of(config, replace(drawn, tokens=tokens))
            each = []
            for i in range(S):
                here = [replace(a, weights=torch.zeros_like(a.weights)) for a in batch.mtp_targets]
                here[layer].weights[:, i] = 1.0
                each.append(objective(decoder, replace(batch, mtp_targets=here))[1][1])
            seen.append(torch.stack(each))
        changed = (seen[0] != seen[1]).tolist()
        assert changed == [i + layer + 1 >= place for i in range(S)]


def test_evaluation_leaves_them_alone() -> None:
    config = run_config()
    decoder, batch = build_decoder(config.model).eval(), batch_of(config)
    total, sums = objective(decoder, batch)
    assert sums[1] == 0
    assert total == sums[0]


def test_their_loss_is_the_mean_of_each_ones_mean() -> None:
    config = run_config()
    one, other = batch_of(config), batch_of(config, samples(documents=False))
    tokens = 13.0
    counts = [sum(batch.mtp_targets[layer].weights.sum().item() for batch in (one, other)) for layer in range(2)]
    weighed = normalize_auxiliary_loss_weights([one, other], [tokens, *counts])
    for layer in range(2):
        before = torch.stack([batch.mtp_targets[layer].weights for batch in (one, other)])
        after = torch.stack([batch.mtp_targets[layer].weights for batch in weighed])
        torch.testing.assert_close(after, before * (tokens / 2 / before.sum()))
