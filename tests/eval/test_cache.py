from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import BASE, VARIANTS, YARN, variant

from mega_common.model_config import ModelConfig
from mega_eval.cache import BLOCK, Batch, KeyValueCache, visible
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(Builder(config, dtype=dtype)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def uncached(model: Decoder, row: list[int]) -> torch.Tensor:
    """Logits [V] after the row."""
    tokens, positions = torch.tensor([row]), torch.arange(len(row))[None]
    return model.logits(model(model.embed(tokens, positions), model.context(positions)))[0, -1]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# The frequencies of "dynamic" change as a sequence grows; kept keys do not, here as in transformers.
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "dynamic"])
def test_cached_logits_are_the_uncached_ones(name: str):
    config = variant(name)
    model, batch = model_of(config), Batch(model_of(config))
    rows = [[3, 5, 8, 13, 21, 34, 2, 4, 6, 9, 1], [7], [60, 0, 0, 60, 1]]
    logits = batch.start(rows)
    for step in range(12):
        assert_same(logits, torch.stack([uncached(model, row) for row in rows]))
        if step == 6:
            rows = [rows[2], rows[1]]
            batch.keep([2, 1])
        chosen = [(step * 7 + len(row)) % config.vocab_size for row in rows]
        rows = [[*row, token] for row, token in zip(rows, chosen, strict=True)]
        logits = batch.feed(torch.tensor(chosen)[:, None])


HEADS = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}


def latent(**fields: Any) -> ModelConfig:
    return ModelConfig.parse({**BASE, "mla": HEADS, **fields})


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 5, "rope": {"interleaved": True, **YARN}}])
def test_latents_stand_for_keys_and_values(fields: dict[str, Any]):
    model = model_of(latent(**fields))
    batch = Batch(model)
    rows = [[3, 5, 8, 13, 21, 34, 2, 4, 6, 9, 1], [7], [60, 0, 0, 60, 1]]
    logits = batch.start(rows)
    for token in (17, 2, 60):
        assert_same(logits, torch.stack([uncached(model, row) for row in rows]))
        rows = [[*row, token] for row in rows]
        logits = batch.feed(torch.tensor([[token]] * 3))
    batch.keep([1])
    assert_same(batch.feed(torch.tensor([[5]]))[0], uncached(model, [*rows[1], 5]))


def test_a_latent_and_the_rotated_part_of_the_key_are_all_that_is_kept():
    model, cache = model_of(latent()), KeyValueCache(2)
    positions = torch.arange(7)[None]
    model(model.embed(torch.zeros(1, 7, dtype=torch.int64), positions), model.context(positions, cache=cache))
    for layer in range(2):
        (kept,) = cache.update(layer, torch.zeros(1, 0, 1, 12 + 4))
        assert kept.shape == (1, 7, 1, 12 + 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["window", "gpt2", "grouped"]))
def test_any_cut_of_a_sequence_gives_the_same(sizes: list[int], name: str):
    model = model_of(variant(name))
    batch, row, logits = Batch(model), [], torch.empty(0)
    for size in sizes:
        new = [(31 * len(row) + i * i) % 61 for i in range(size)]
        logits = batch.feed(torch.tensor([new])) if row else batch.start([new])
        row += new
    assert_same(logits[0], uncached(model, row))


def test_cache_grows_past_its_blocks():
    cache, given = KeyValueCache(2), torch.randn(2, 3 * BLOCK, 1, 4)
    sizes = [BLOCK - 1, 1, 1, BLOCK + 5, BLOCK - 6]
    start = 0
    for size in sizes:
        part = given[:, start : start + size]
        start += size
        for layer in range(2):
            keys, values = cache.update(layer, part, -part)
            assert torch.equal(keys, given[:, :start])
            assert torch.equal(values, -given[:, :start])
        assert cache.columns == start


def test_dropping_rows_keeps_what_the_others_hold():
    cache, given = KeyValueCache(1), torch.randn(3, 5, 2, 4)
    cache.update(0, given, given)
    cache.keep(torch.tensor([2, 0]))
    keys, _ = cache.update(0, given[:2, :1], given[:2, :1])
    assert torch.equal(keys, torch.cat([given[[2, 0]], given[:2, :1]], dim=1))


def test_visible():
    found = visible(torch.tensor([2, 3]), torch.tensor([0, 2]), window=3)[:, 0].int().tolist()
    assert found == [[[1, 1, 1, 0], [0, 1, 1, 1]], [[0, 0, 1, 0], [0, 0, 1, 1]]]


def test_padding_sees_itself_alone():
    assert visible(torch.arange(3), torch.tensor([2]), window=None)[0, 0].int().tolist() == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]


def test_one_model_serves_many_batches(tmp_path: Path):
    model = model_of(variant("plain"))
    first, second = Batch(model), Batch(model)
    a, b = first.start([[1, 2, 3]]), second.start([[4, 5]])
    assert_same(a[0], uncached(model, [1, 2, 3]))
    assert_same(b[0], uncached(model, [4, 5]))
    assert_same(first.feed(torch.tensor([[9]]))[0], uncached(model, [1, 2, 3, 9]))
