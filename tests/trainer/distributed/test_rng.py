"""Dropout masks: those of the whole sequence, wherever its tokens are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.rng import TOKENS, SeededDropout
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices, residual_stream_token_ranges

WIDTH, SAMPLES = 3, [4, 9]


def mask(places: list[range], seed: int = 1, layer: int = 2, site: str = "mlp") -> torch.Tensor:
    ones = torch.ones(len(SAMPLES), sum(map(len, places)), WIDTH)
    return SeededDropout(seed, SAMPLES, places).drop_residual(ones, 0.3, layer, site)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40) | st.integers(300, 700), st.booleans())
def test_ranks_draw_the_parts_of_one_mask(cp: int, tp: int, chunk: int, sp: bool) -> None:
    length = 2 * cp * tp * chunk
    whole = mask([range(length)])
    for c in range(cp):
        context = CommGroup("cp", tuple(range(cp)), c)
        rows = get_context_rank_token_indices(length, context)
        for t in range(tp):
            tensor = CommGroup("tp", tuple(range(tp)), t)
            own = rows.chunk(tp)[t] if sp else rows
            places = residual_stream_token_ranges(length, context, tensor, sp=sp)
            assert [place for part in places for place in part] == own.tolist()
            assert mask(places).equal(whole[:, own])


def test_masks_differ_by_what_they_are_for() -> None:
    places = [range(2 * TOKENS)]
    made = [mask(places), mask(places, seed=2), mask(places, layer=3), mask(places, site="attention")]
    parts = [part for one in made for sample in one for part in sample.chunk(2)]
    assert len({tuple(part.flatten().tolist()) for part in parts}) == len(parts)
    assert 0.2 < (made[0] == 0).float().mean() < 0.4
    assert made[0].max().item() == pytest.approx(1 / 0.7)


def test_a_sample_is_drawn_in_few_kernels() -> None:
    """One for each 1,024 tokens of a sample, as launches of small kernels are what dropout costs on a GPU."""

    class Draws(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func._schema.name == "aten::uniform_" or func._schema.name.startswith("aten::rand")
            return func(*args, **(kwargs or {}))

    with Draws() as draws:
        mask([range(3 * 1024)])
    assert draws.count == 3 * len(SAMPLES)
