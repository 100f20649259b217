from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mega_common.errors import ConfigError, DataError
from mega_common.extension_entries import Sampler
from mega_eval import sampling as batched
from mega_eval.generate import generate_completions
from mega_eval.model_loading import load_inference_model, load_sampling_settings, warn_unsupported_settings
from mega_eval.sampling import (
    CHOSEN_LATER,
    NO_CHOICE,
    NOT_A_NUMBER,
    Sampling,
    TokenChoice,
    choose_tokens,
    list_unsupported_generation_settings,
    parse_sampling_settings,
)
from mega_eval.text_stream import GenerationLimits
from mega_trainer.config.extensions import load_extensions

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0])


def apply_penalties(logits: Tensor, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    return batched.apply_penalties(logits[None], [TokenChoice(sampling, prompt, generated)])[0]


def compute_probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    return batched.compute_probabilities(scores[None], [sampling])[0]


def draw_token(p: Tensor, sampling: Sampling, sample: int, step: int) -> int:
    return int(batched.draw_tokens(p[None], [TokenChoice(sampling, [], [0] * step, sample)]))


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
def test_scores_without_a_choice_are_named(temperature: float):
    rows = LOGITS.repeat(4, 1)
    rows[0, 2], rows[1, 2], rows[2] = float("nan"), float("inf"), float("-inf")
    sampling = Sampling(temperature=temperature, seed=3, repetition_penalty=1.1)
    choices = [TokenChoice(sampling)] * 4
    *wrong, right = choose_tokens(rows, choices)
    assert wrong == [NOT_A_NUMBER, NO_CHOICE, NO_CHOICE]
    assert choose_tokens(LOGITS[None], choices[:1]) == [right]


MIXED = [
    {}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 3}, {"temperature": 1.0, "top_p": 0.6, "seed": 5},
    {"temperature": 2.0, "min_p": 0.05, "repetition_penalty": 1.4}, {"presence_penalty": 0.5, "logit_bias": {7: 9.0}},
    {"temperature": 1.0, "frequency_penalty": -0.3, "top_k": 40, "top_p": 0.9}, {"allowed_token_ids": [4, 9], "seed": 2},
    {"temperature": 1.0, "no_repeat_ngram_size": 2, "suppress_tokens": [1]}, {"temperature": 1.0, "forced_bos_token_id": 6},
]  # fmt: skip


@pytest.mark.parametrize("size", [40, 700])
def test_rows_chosen_at_once_get_what_each_gets_alone(size: int, monkeypatch: pytest.MonkeyPatch):
    """Also in several parts, as on a CPU with a large vocabulary; 700 equal tokens are more than are sorted at first."""
    logits = torch.randn(len(MIXED), size, generator=torch.Generator().manual_seed(1))
    logits[3] = 0
    choices = [
        None if not settings else TokenChoice(Sampling.parse(settings), [2] if row % 3 else [3, 4, 3], [4, 4, 8][: row % 4], row)
        for row, settings in enumerate(MIXED)
    ]  # fmt: skip
    alone = [choose_tokens(logits[row : row + 1], [choice])[0] for row, choice in enumerate(choices)]
    assert choose_tokens(logits, choices) == alone
    monkeypatch.setattr(batched, "CPU_ELEMENTS", 3 * size)
    assert choose_tokens(logits, choices) == alone
    assert choose_tokens(logits, ["later" if choice else None for choice in choices]) == [
        alone[0],
        *([CHOSEN_LATER] * 9),
    ]


def test_a_token_outside_of_the_vocabulary_is_refused():
    for settings in ({"logit_bias": {5: 1.0}}, {"allowed_token_ids": [1, 5]}):
        with pytest.raises(DataError, match=r"token 5 .*vocabulary of 5"):
            choose_tokens(LOGITS[None], [TokenChoice(Sampling.parse(settings))])


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


PROMPT, NEW = [5, 9, 5, 9, 7], 14


class Numbers:
    """Tokenizer whose texts are numbers."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f"{token} " for token in ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats itself and ends soon."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=23, **sizes))
    with torch.no_grad():
        model.lm_head.weight[2] *= 3
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("given", "top_k"),
    [
        ({"do_sample": True}, 50), ({"do_sample": True, "top_k": None}, 50), ({"do_sample": True, "top_k": 0}, None),
        ({"do_sample": True, "top_k": 7}, 7), ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, 50),
        ({"do_sample": False}, None), ({"do_sample": False, "top_k": 7}, None), ({}, None), ({"top_k": 7}, None),
    ],
)  # fmt: skip
def test_draws_are_from_as_many_tokens_as_transformers_takes(given: dict[str, Any], top_k: int | None) -> None:
    assert parse_sampling_settings(given).get("top_k") == top_k
    if given.get("do_sample"):
        theirs = transformers.GenerationConfig(**given)
        theirs.update(**transformers.GenerationConfig()._get_default_generation_params(), defaults_only=True)
        assert (theirs.top_k or None) == top_k


FOLLOWED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 0.9},
    {"no_repeat_ngram_size": 40},
    {"suppress_tokens": [2, 11, 400, -1]},
    {"begin_suppress_tokens": [2, 0, 1]},
    {"bad_words_ids": [[2], [3]]},
    {"bad_words_ids": [[7, 7], [9, 7, 3], [5, 9, 5, 9, 7, 7], [1]]},
    {"min_new_tokens": 6},
    {"min_length": 9},
    {"min_length": 9, "min_new_tokens": 2, "eos_token_id": [2, 3]},
    {"forced_bos_token_id": 4},
    {"forced_bos_token_id": 4, "begin_suppress_tokens": [2]},
    {"eos_token_id": None, "min_new_tokens": 6},
]


@pytest.mark.parametrize("prompt", [PROMPT, [1]], ids=["prompt", "one token"])
@pytest.mark.parametrize("settings", FOLLOWED, ids=str)
def test_tokens_are_those_of_transformers(folder: Path, settings: dict[str, Any], prompt: list[int]) -> None:
    given = {"eos_token_id": 2, **settings}
    (folder / "generation_config.json").write_text(json.dumps(given))
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0]
    ends = given["eos_token_id"] if isinstance(given["eos_token_id"], list) else [given["eos_token_id"]]
    sampling = Sampling.parse(load_sampling_settings(folder))
    (found,) = generate_completions(
        load_inference_model(folder), Numbers(), [prompt], GenerationLimits(NEW, ends=ends), sampling
    )
    assert found.tokens == expected[len(prompt) :].tolist()
    assert list_unsupported_generation_settings(given) == []


def test_settings_of_config_json_count_where_there_is_no_generation_config(tmp_path: Path, folder: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "no_repeat_ngram_size": 2, "repetition_penalty": 1.5}))
    assert load_sampling_settings(tmp_path) == {"no_repeat_ngram_size": 2, "repetition_penalty": 1.5}


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"num_beams": 4}, ["num_beams = 4"]),
        ({"num_beams": 1, "early_stopping": True, "length_penalty": 2.0}, []),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            ["diversity_penalty", "num_beam_groups", "num_beams"],
        ),
        ({"forced_eos_token_id": 2}, ["forced_eos_token_id = 2"]),
        ({"exponential_decay_length_penalty": [5, 1.1]}, ["exponential_decay_length_penalty"]),
        ({"encoder_no_repeat_ngram_size": 3}, ["encoder_no_repeat_ngram_size"]),
        ({"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "diversity_penalty": 0.0}, []),
        ({"encoder_repetition_penalty": 1.2}, ["encoder_repetition_penalty"]),
        ({"guidance_scale": 1.5}, ["guidance_scale"]),
        ({"sequence_bias": [[[3], -1.0]]}, ["sequence_bias"]),
        ({"stop_strings": ["###"], "max_time": 3.0}, ["max_time", "stop_strings"]),
        ({"typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.4}, []),
        ({"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 0.1}, ["epsilon_cutoff", "typical_p"]),
        ({"do_sample": True, "typical_p": 1.0, "eta_cutoff": 0.0}, []),
        (
            {"penalty_alpha": 0.6, "dola_layers": "low", "token_healing": True},
            ["dola_layers", "penalty_alpha", "token_healing"],
        ),
        ({"chat_format": "chatml"}, ["chat_format = 'chatml'"]),
        (transformers.GenerationConfig().to_dict(), []),
        (transformers.GenerationConfig._get_default_generation_params(), []),
    ],
)
def test_settings_without_counterpart_are_named(raw: dict[str, Any], named: list[str]) -> None:
    found = list_unsupported_generation_settings(raw)
    assert len(found) == len(named)
    assert all(one.startswith(name) for one, name in zip(found, named, strict=True))


def test_they_are_named_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4, "typical_p": 0.5, "do_sample": True}))
    with caplog.at_level("WARNING", logger="mega"):
        warn_unsupported_settings(folder)
    (line,) = caplog.messages
    assert "num_beams = 4, typical_p = 0.5" in line


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "suppress_tokens", "bad_words_ids", "min_length"])
def test_a_value_of_the_wrong_kind_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Sampling.parse(parse_sampling_settings({name: "often"}))


def test_a_token_is_left_where_all_are_restricted() -> None:
    sampling = Sampling(no_repeat_ngram_size=1, temperature=1.0)
    p = compute_probabilities(apply_penalties(torch.randn(5), sampling, [0, 1, 2, 3, 4], []), sampling)
    assert p.isfinite().all()
    assert p.sum() == pytest.approx(1.0)


EXAMPLE = str(Path(__file__).parents[2] / "examples/extensions/sampler_tokenizer_kernel.py")


def test_a_sampler_of_an_extension_changes_only_its_rows():
    samplers = load_extensions([EXAMPLE]).entries("samplers")
    raw = {"temperature": 5.0, "sampler": "top_n_sigma", "sampler_options": {"n": 0.9}}
    kept = Sampling.parse(raw).bind_token_sampler(samplers)
    rows = LOGITS.repeat(64, 1)
    choices = [TokenChoice(kept if row % 2 else Sampling(temperature=5.0), sample=row) for row in range(64)]
    found = choose_tokens(rows, choices)
    assert set(found[1::2]) == {1, 2}  # mean 1, standard deviation sqrt(2): 3 - 0.9 sqrt(2) = 1.73
    assert set(found[::2]) == {0, 1, 2, 3, 4}
    assert found == [choose_tokens(LOGITS[None], [choice])[0] for choice in choices]


def test_a_sampler_gets_the_tokens_before():
    def forbid_last(scores: Tensor, prompt: list[int], generated: list[int], *, options: object) -> Tensor:
        return scores.index_fill(0, torch.tensor([*prompt, *generated][-2:]), float("-inf"))

    sampling = Sampling.parse({"sampler": "forbid_last"}).bind_token_sampler({"forbid_last": Sampler(forbid_last)})
    assert not sampling.is_greedy
    assert choose_tokens(LOGITS[None], [TokenChoice(sampling, [2], [1])]) == [0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"sampler": "top_sigma"},
            "sampler = 'top_sigma' is not a sampler of a loaded extension\n  use one of top_n_sigma",
        ),
        ({"sampler": "top_n_sigma", "sampler_options": {"m": 1}}, "m: unknown key"),
        ({"sampler_options": {"n": 1}}, "sampler_options requires sampler"),
    ],
)
def test_samplers_that_cannot_be_used(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as error:
        Sampling.parse(settings).bind_token_sampler(load_extensions([EXAMPLE]).entries("samplers"))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("adjust", "words"),
    [
        (lambda scores, prompt, generated, *, options: 1 / 0, "sampler mine raised ZeroDivisionError"),
        (
            lambda scores, prompt, generated, *, options: scores[:2],
            r"sampler mine must return scores \[5\], found \[2\]",
        ),
    ],
)
def test_a_sampler_that_fails_is_named(adjust: Any, words: str):
    sampling = Sampling.parse({"sampler": "mine"}).bind_token_sampler({"mine": Sampler(adjust)})
    with pytest.raises(DataError, match=words):
        choose_tokens(LOGITS[None], [TokenChoice(sampling)])


def test_a_sampler_that_no_one_bound_is_refused():
    with pytest.raises(ConfigError, match="sampler = 'mine' is not supported here"):
        choose_tokens(LOGITS[None], [TokenChoice(Sampling.parse({"sampler": "mine"}))])
