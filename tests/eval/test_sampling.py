from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mega_common.errors import ConfigError, DataError
from mega_eval.sampling import Sampling, apply_penalties, compute_probabilities, draw_token

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0])


@pytest.mark.parametrize(
    "limits", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-300}, {"min_p": 1}]
)
def test_limits_of_one_token_are_greedy(limits: dict[str, float]):
    p = compute_probabilities(LOGITS, Sampling.parse({"temperature": 1.5, **limits}))
    assert p.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "settings",
    [
        *({"repetition_penalty": value} for value in (1e-40, 0, -1, 1e10, float("nan"), float("inf"))),
        *({"presence_penalty": value} for value in (1e39, -1e39, float("nan"), float("-inf"))),
        *({"frequency_penalty": value} for value in (1e300, float("nan"))),
        *({"temperature": value} for value in (-1e-9, float("nan"), float("inf"))),
        *({"top_p": value} for value in (0, 1.1, float("nan"))),
        *({"min_p": value} for value in (-0.1, 1.1, float("nan"))),
        *({"top_k": value} for value in (0, -1)),
    ],
    ids=str,
)
def test_settings_that_would_break_the_scores_are_refused(settings: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Sampling.parse(settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 2e4])
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 1e9},
        {"repetition_penalty": 1e-9, "presence_penalty": 1e9, "frequency_penalty": 1e9},
        {"presence_penalty": -1e9, "frequency_penalty": -1e9},
        {"temperature": 5e-324},
        {"temperature": 1e308},
        {"top_p": 5e-324},
        {"top_p": 5e-324, "top_k": 1, "min_p": 1.0},
        {"top_k": 2**62},
        {"min_p": 5e-324},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_no_setting_within_bounds_breaks_the_scores(settings: dict[str, float], size: float, dtype: torch.dtype):
    sampling = Sampling.parse({"temperature": 1.0, **settings})
    p = compute_probabilities(apply_penalties((LOGITS * size).to(dtype), sampling, [1, 1, 3], [0, 2, 2]), sampling)
    assert float(p.sum()) == pytest.approx(1)
    assert p[draw_token(p, sampling, 0, 0)] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_scores_without_a_choice_are_an_error(broken: float, temperature: float):
    for scores in (LOGITS.clone().index_fill_(0, torch.tensor(2), broken), torch.full((5,), float("-inf"))):
        with pytest.raises(DataError, match="no token can be chosen"):
            compute_probabilities(scores, Sampling(temperature=temperature))


def test_seeds_samples_and_steps_differ():
    p = torch.full((1000,), 1e-3, dtype=torch.float64)
    draws = [
        [draw_token(p, Sampling(temperature=1.0, seed=seed), sample, step) for sample in range(first, first + 40)]
        for seed, first, step in ((0, 0, 0), (1, 0, 0), (0, 40, 0), (0, 0, 1))
    ]
    assert len({tuple(row) for row in draws}) == 4
    assert all(len(set(row)) > 30 for row in draws)
    assert draws[0] == [draw_token(p, Sampling(temperature=1.0), sample, 0) for sample in range(40)]


def test_frequencies_are_the_probabilities():
    sampling, count = Sampling(temperature=1.0), 4000
    p = compute_probabilities(LOGITS, sampling.model_copy(update={"top_k": 4}))
    found = torch.tensor([draw_token(p, sampling, sample, 0) for sample in range(count)]).bincount(minlength=5) / count
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
    found = compute_probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    torch.testing.assert_close(found, expected)


@given(st.integers(0, 10**6), st.floats(0.2, 5), st.lists(st.integers(0, 29), max_size=20))
def test_repetition_is_penalised_as_in_transformers(seed: int, penalty: float, seen: list[int]):
    warpers = pytest.importorskip("transformers.generation.logits_process", reason="the reference implementation")
    logits = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([[4, *seen]])
    expected: Tensor = warpers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None].clone())[0]
    assert torch.equal(apply_penalties(logits, Sampling(repetition_penalty=penalty), [4], seen), expected)


def test_presence_and_frequency_count_what_was_generated():
    found = apply_penalties(LOGITS, Sampling(presence_penalty=0.5, frequency_penalty=0.25), [0, 0], [1, 3, 1])
    assert found.tolist() == [1.0, 3.0 - 0.5 - 2 * 0.25, 2.0, -1.0 - 0.5 - 0.25, 0.0]
    assert apply_penalties(LOGITS, Sampling(presence_penalty=0.5), [0], []).tolist() == LOGITS.tolist()


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2}, {"repetition_penalty": 0}]
)
def test_settings_that_cannot_be(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling.parse(wrong)
