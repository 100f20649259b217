from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import ConfigError
from mega_eval.sampling import Sampling, choose, ranked

LOGITS = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0], [0.0, 0.0, 5.0, 4.0, -9.0]])


def test_greedy_takes_the_likeliest():
    assert choose(LOGITS, Sampling(), [0, 1], 0).tolist() == [1, 2]


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-300}])
def test_limits_of_one_token_are_greedy(limits: dict[str, float]):
    sampling = Sampling.parse({"temperature": 1.5, **limits})
    assert choose(LOGITS, sampling, [3, 4], 8).tolist() == [1, 2]


@given(st.integers(), st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True), st.integers(0, 1000))
def test_a_draw_depends_on_seed_sample_and_step_alone(seed: int, samples: list[int], step: int):
    sampling, logits = Sampling(temperature=2.0, seed=seed), LOGITS[:1]
    together = choose(logits.expand(len(samples), -1), sampling, samples, step).tolist()
    assert together == [choose(logits, sampling, [sample], step).item() for sample in samples]


def test_seeds_samples_and_steps_differ():
    logits = torch.zeros(40, 1000)
    draws = [
        choose(logits, Sampling(temperature=1.0, seed=seed), range(first, first + 40), step).tolist()
        for seed, first, step in ((0, 0, 0), (1, 0, 0), (0, 40, 0), (0, 0, 1))
    ]
    assert len({tuple(draw) for draw in draws}) == 4
    assert all(len(set(draw)) > 30 for draw in draws)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.9}]
)
def test_frequencies_are_the_probabilities(options: dict[str, float]):
    sampling, count = Sampling.parse({"temperature": 1.0, **options}), 4000
    scores = LOGITS[0].double() / sampling.temperature
    expected = scores.softmax(-1)
    if sampling.top_k:
        expected[expected.argsort(descending=True)[sampling.top_k :]] = 0
        expected /= expected.sum()
    order = expected.argsort(descending=True)
    enough = int((expected[order].cumsum(0) < sampling.top_p).sum()) + 1
    expected[order[enough:]] = 0
    expected /= expected.sum()
    drawn = choose(LOGITS[:1].expand(count, -1), sampling, range(count), 0)
    found = drawn.bincount(minlength=5) / count
    assert (found - expected).abs().max() < 5 * (0.25 / count) ** 0.5  # five standard deviations
    assert (found[expected == 0] == 0).all()


@given(
    st.integers(0, 10**6), st.floats(0.1, 5), st.one_of(st.none(), st.integers(1, 40)), st.floats(0.05, 1.0)
)  # fmt: skip
def test_what_is_cut_off_is_what_transformers_cuts_off(seed: int, temperature: float, top_k: int | None, top_p: float):
    warpers = pytest.importorskip("transformers.generation.logits_process", reason="the reference implementation")
    logits = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    expected = warpers.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = warpers.TopKLogitsWarper(top_k)(None, expected)
    expected = warpers.TopPLogitsWarper(top_p)(None, expected).softmax(-1)
    likely, tokens = ranked(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    found = torch.zeros_like(logits).scatter(1, tokens, likely / likely.sum(-1, keepdim=True))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}])
def test_settings_that_cannot_be(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling.parse(wrong)
