from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mega_common.errors import ConfigError
from mega_eval.sampling import Sampling, draw, penalised, probabilities

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0])


@pytest.mark.parametrize(
    "limits", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-300}, {"min_p": 1}]
)
def test_limits_of_one_token_are_greedy(limits: dict[str, float]):
    p = probabilities(LOGITS, Sampling.parse({"temperature": 1.5, **limits}))
    assert p.tolist() == [0, 1, 0, 0, 0]


def test_seeds_samples_and_steps_differ():
    p = torch.full((1000,), 1e-3, dtype=torch.float64)
    draws = [
        [draw(p, Sampling(temperature=1.0, seed=seed), sample, step) for sample in range(first, first + 40)]
        for seed, first, step in ((0, 0, 0), (1, 0, 0), (0, 40, 0), (0, 0, 1))
    ]
    assert len({tuple(row) for row in draws}) == 4
    assert all(len(set(row)) > 30 for row in draws)
    assert draws[0] == [draw(p, Sampling(temperature=1.0), sample, 0) for sample in range(40)]


def test_frequencies_are_the_probabilities():
    sampling, count = Sampling(temperature=1.0), 4000
    p = probabilities(LOGITS, sampling.model_copy(update={"top_k": 4}))
    found = torch.tensor([draw(p, sampling, sample, 0) for sample in range(count)]).bincount(minlength=5) / count
    assert (found - p).abs().max() < 5 * (0.25 / count) ** 0.5  # five standard deviations
    assert found[3] == 0


@given(
    st.integers(0, 10**6), st.floats(0.1, 5), st.sampled_from([30, 300]), st.none() | st.integers(1, 40), st.floats(0.05, 1),
    st.floats(0, 1),
)  # fmt: skip
def test_what_is_cut_off_is_what_transformers_cuts_off(
    seed: int, temperature: float, size: int, top_k: int | None, top_p: float, min_p: float
):
    warpers = pytest.importorskip("transformers.generation.logits_process", reason="the reference implementation")
    logits = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    expected = warpers.TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        expected = warpers.TopKLogitsWarper(top_k)(None, expected)
    expected = warpers.TopPLogitsWarper(top_p)(None, expected)
    expected = warpers.MinPLogitsWarper(min_p)(None, expected).softmax(-1)[0]
    found = probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    torch.testing.assert_close(found, expected)


@given(st.integers(0, 10**6), st.floats(0.2, 5), st.lists(st.integers(0, 29), max_size=20))
def test_repetition_is_penalised_as_in_transformers(seed: int, penalty: float, seen: list[int]):
    warpers = pytest.importorskip("transformers.generation.logits_process", reason="the reference implementation")
    logits = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([[4, *seen]])
    expected: Tensor = warpers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None].clone())[0]
    assert torch.equal(penalised(logits, Sampling(repetition_penalty=penalty), [4], seen), expected)


def test_presence_and_frequency_count_what_was_generated():
    found = penalised(LOGITS, Sampling(presence_penalty=0.5, frequency_penalty=0.25), [0, 0], [1, 3, 1])
    assert found.tolist() == [1.0, 3.0 - 0.5 - 2 * 0.25, 2.0, -1.0 - 0.5 - 0.25, 0.0]
    assert penalised(LOGITS, Sampling(presence_penalty=0.5), [0], []).tolist() == LOGITS.tolist()


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2}, {"repetition_penalty": 0}]
)
def test_settings_that_cannot_be(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling.parse(wrong)
