"""Retrieval: who sees which neighbors, to the bit, and what becomes of chunks without any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mega_common.errors import ConfigError, DataError
from mega_common.model_config import ModelConfig
from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import select_model_class
from mega_trainer.model.forward_context import CrossAttentionChunks
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights

M, K, S = 4, 2, 16
MODEL: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 61, "init_std": 0.3,
    "scale_residual_init": False,
}  # fmt: skip
RETRO = {"chunk_length": M, "neighbors": K, "layers": [1, 2]}


def build_decoder(**more: Any) -> Decoder:
    """A model in fp64, each weight of which is a function of its name."""
    config = ModelConfig.parse({**MODEL, **more}, source="test")
    model = select_model_class(config)(LayerBuilder(config, dtype=torch.float64))
    initialize_weights(model, 5)
    return model.eval()


def samples() -> StepBatch:
    """Two, of which the first one's second chunk has no neighbor and its third one a short one."""
    rng = np.random.default_rng(3)
    tokens, neighbors = rng.integers(0, 61, (2, S + 1)), rng.integers(0, 61, (2, S // M, K, 2 * M))
    neighbors[0, 1], neighbors[0, 2, 0, 3:] = -1, -1
    return StepBatch(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_weights=np.ones((2, S), np.float32),
        position_ids=np.tile(np.arange(S), (2, 1)), document_ids=None, sample_ids=np.arange(2), neighbors=neighbors,
    )  # fmt: skip


def parsed(model: dict[str, Any], **more: Any) -> RunConfig:
    raw = {
        "model": model,
        "data": {"train": ["none"], "seq_length": S, "kind": "retro" if model.get("retro") else "text"},
        "batch": {"micro": 2, "global": 2},
        "precision": "fp64",
    }
    return RunConfig.parse({**raw, **more}, source="test")


@torch.no_grad()
def logits(model: Decoder, batch: StepBatch) -> Tensor:
    """[B, S, V]."""
    config = parsed(model.config.model_dump(exclude_unset=True))
    micro = next(split_micro_batches(batch, config, torch.device("cpu")))
    context = model.make_batch_context(micro, lambda *_: None)
    return model.compute_logits(model(model.embed_micro_batch(micro, context), context))


def with_neighbors(batch: StepBatch, chunk: int, change: int) -> StepBatch:
    """Other neighbors for the chunks from one on."""
    assert batch.neighbors is not None
    found = batch.neighbors.copy()
    found[:, chunk:] = np.where(found[:, chunk:] < 0, -1, (found[:, chunk:] + change) % 61)
    return replace(batch, neighbors=found)


@pytest.mark.parametrize("at", range(1, S))
def test_nothing_that_comes_later_changes_a_bit(at: int) -> None:
    """Neither tokens from `at` on nor neighbors of a chunk that is not complete before them."""
    model, batch = build_decoder(retro=RETRO), samples()
    tokens = batch.tokens.copy()
    tokens[:, at:] = (tokens[:, at:] + 1) % 61
    other = with_neighbors(replace(batch, tokens=tokens), at // M, 1)
    before, after = logits(model, batch), logits(model, other)
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at] != after[:, at]).any()


@pytest.mark.parametrize("chunk", range(S // M))
def test_neighbors_of_a_chunk_reach_its_last_token_and_those_behind(chunk: int) -> None:
    model, batch = build_decoder(retro=RETRO), samples()
    before, after = logits(model, batch)[1], logits(model, with_neighbors(batch, chunk, 1))[1]
    changed = (before != after).any(-1)
    assert changed.tolist() == [place >= (chunk + 1) * M - 1 for place in range(S)]


def closed(begin: int) -> StepBatch:
    """The samples, each of two documents between which attention is closed."""
    places = np.tile(np.arange(S), (2, 1))
    return replace(
        samples(),
        position_ids=np.where(places < begin, places, places - begin),
        document_ids=(places >= begin).astype(np.int32),
    )


@pytest.mark.parametrize("begin", [4, 6, 7, 8, 13])
def test_neighbors_reach_only_the_document_that_has_all_of_their_chunk(begin: int) -> None:
    """Documents begin with a chunk, or within one."""
    model, batch = build_decoder(retro=RETRO), closed(begin)
    before = logits(model, batch)[1]
    assert batch.neighbors is not None
    for chunk in range(S // M):
        found = batch.neighbors.copy()
        found[1, chunk] = (found[1, chunk] + 1) % 61
        changed = (before != logits(model, replace(batch, neighbors=found))[1]).any(-1)
        first = [0 if place < begin else begin for place in range(S)]
        assert changed.tolist() == [first[place] <= chunk * M <= place - M + 1 for place in range(S)]


@pytest.mark.parametrize("begin", [4, 6, 7, 8, 13])
def test_no_bit_of_a_document_changes_with_the_one_before_it(begin: int) -> None:
    """Neither with its tokens nor with the neighbors of its chunks."""
    model, batch = build_decoder(retro=RETRO), closed(begin)
    assert batch.neighbors is not None
    tokens, found = batch.tokens.copy(), batch.neighbors.copy()
    tokens[:, :begin] = (tokens[:, :begin] + 1) % 61
    chunks = -(-begin // M)
    found[:, :chunks] = np.where(found[:, :chunks] < 0, -1, (found[:, :chunks] + 1) % 61)
    after = logits(model, replace(batch, tokens=tokens, neighbors=found))
    assert torch.equal(logits(model, batch)[:, begin:], after[:, begin:])


def test_without_neighbors_it_is_the_model_without_retrieval() -> None:
    batch = samples()
    assert batch.neighbors is not None
    without = logits(build_decoder(retro=RETRO), replace(batch, neighbors=np.full_like(batch.neighbors, -1)))
    torch.testing.assert_close(without, logits(build_decoder(), batch), rtol=1e-12, atol=1e-12)
    some = logits(build_decoder(retro=RETRO), batch)
    torch.testing.assert_close(some[0, : M - 1], without[0, : M - 1], rtol=1e-12, atol=1e-12)
    assert (some[:, M - 1] - without[:, M - 1]).abs().min() > 1e-9


def test_what_stands_where_there_is_no_token_changes_no_bit() -> None:
    """There it is token 0, which these texts have nowhere else."""
    model, batch = build_decoder(retro=RETRO), samples()
    assert batch.neighbors is not None
    one = replace(
        batch, tokens=np.maximum(batch.tokens, 1), neighbors=np.where(batch.neighbors == 0, 1, batch.neighbors)
    )
    before = logits(model, one)
    model.embedding.weight.data[0] += 1.0
    assert torch.equal(before, logits(model, one))
    assert not torch.equal(before, logits(model, batch))


def test_a_token_attends_to_the_neighbors_of_the_last_complete_chunk() -> None:
    """Token by token (arXiv:2112.04426, equation 5), for the chunks of two rows."""
    generator = torch.Generator().manual_seed(1)
    q, k = (
        torch.randn(rows, length, 1, 3, generator=generator, dtype=torch.float64)
        for rows, length in ((2, S), (2 * S // M * K, 2 * M))
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bshd,bthd->bhst", q, k), -1)
        return torch.einsum("bhst,bthd->bshd", weights, v)

    found = CrossAttentionChunks(2 * S // M, range(8), shift=M - 1).attend_chunks(attend, q, k, k)
    neighbors = k.view(2, S // M, K * 2 * M, 3)
    for row in range(2):
        for place in range(S):
            wanted = torch.zeros(3, dtype=torch.float64)
            if place >= M - 1:
                keys = neighbors[row, (place - (M - 1)) // M]
                wanted = torch.softmax(keys @ q[row, place, 0], 0) @ keys
            torch.testing.assert_close(found[row, place, 0], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("neighbors", "told"),
    [
        (None, "requires samples with neighbors"),
        (np.zeros((2, 4, 1, 8), np.int64), r"neighbors of shape \(2, 4, 2, 8\) .*, found \(2, 4, 1, 8\)"),
    ],
)
def test_samples_without_the_models_neighbors_are_refused(neighbors: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        logits(build_decoder(retro=RETRO), replace(samples(), neighbors=neighbors))


@pytest.mark.parametrize(
    ("model", "more", "told"),
    [
        ({}, {"parallel": {"cp": 2}}, "parallel.cp = 2: is not supported with model.retro"),
        ({}, {"parallel": {"tp": 3, "sp": True}}, "must divide model.retro.neighbor_length = 8"),
        ({}, {"precision": "fp8"}, "precision = 'fp8': is not supported with model.retro"),
        ({}, {"data": {"train": ["none"], "seq_length": 18, "kind": "retro"}}, "data.seq_length = 18: must be a multiple of model.retro.chunk_length = 4"),
        ({}, {"data": {"train": ["none"], "seq_length": S}}, "data.kind = 'text': must be retro for a retrieval model"),
        (
            {"retro": None}, {"data": {"train": ["none"], "seq_length": S, "kind": "retro"}},
            "data.kind = 'retro': requires a retrieval model",
        ),
        ({}, {"eval": {"tasks": ["piqa"]}}, "eval.tasks = ['piqa']: is not supported with model.retro"),
        ({"moe": {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 8}}, {}, "model.moe: is not supported with retro"),
        ({"retro": {"layers": [3]}}, {}, "model.retro.layers = 3: must be layer numbers up to 2"),
        ({"retro": {}}, {}, "model.retro.layers: must name at least one of the 3 layers"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_retrieval_is_told(model: dict[str, Any], more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed({**MODEL, "retro": RETRO, **model}, **more)
    assert told in str(error.value)


def test_layers_that_attend_are_those_of_megatron() -> None:
    assert [attending(count) for count in (12, 15, 16, 32)] == [
        [5, 8, 11], [5, 8, 11, 14], [8, 11, 14], [8, 11, 14, 17, 20, 23, 26, 29],
    ]  # fmt: skip


def attending(count: int) -> list[int]:
    return ModelConfig.parse({**MODEL, "num_layers": count, "retro": {}}, source="test").retrieval_layers
