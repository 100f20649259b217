"""Settings of generation_config.json: those that are followed give the tokens of transformers, the others are named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mega_common.errors import ConfigError
from mega_eval.generate import generate_completions
from mega_eval.generation_config import list_unsupported_settings, parse_sampling_settings
from mega_eval.model_loading import load_inference_model, load_sampling_settings, warn_unsupported_settings
from mega_eval.sampling import Sampling, apply_penalties, compute_probabilities
from mega_eval.text_stream import GenerationLimits

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
    assert list_unsupported_settings(given) == []


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
    found = list_unsupported_settings(raw)
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
