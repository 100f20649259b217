from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import cases, save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_common.model_config import ModelConfig
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.generate import Completion, generate_completions, stream_completion
from mega_eval.model_loading import load_inference_model
from mega_eval.sampling import Sampling
from mega_eval.text_stream import Continuation, GenerationLimits, IncrementalDetokenizer
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder


class Numbers:
    """A tokenizer whose texts are numbers: '3 5 8 '."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f"{token} " for token in ids)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(["the end of the story is the beginning of the other story"] * 3, 280, folder)


def model_of(config: ModelConfig) -> Decoder:
    model = Decoder(LayerBuilder(config, dtype=torch.float64)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


MODEL = model_of(variant("plain"))
PROMPTS = ["3 5 8 13 21 34 55 1 2", "7", "60 0 0 60 1", "9 9", "4 8 15 16 23 42"]


GREEDY = [
    ("llama", "grouped"), ("qwen3", "qk-norm"), ("gpt2", "gpt2"), ("mistral", "window"), ("llama", "dynamic"),
    ("gemma2", "gemma2"), ("gemma3_text", "gemma3"), ("ministral", "windows-in-some"),
    ("qwen2", "windows-in-some-biased"), ("phi3", "long-within-the-original"), ("phi3", "long"),
    ("olmo2", "olmo2-grouped-head"), ("gpt_neox", "neox"), ("mixtral", "moe"), ("qwen2_moe", "moe-shared-some"),
    ("qwen3_moe", "moe-normed"), ("gpt_oss", "oss"), ("deepseek_v2", "deepseek2"), ("deepseek_v3", "deepseek3-yarn"),
]  # fmt: skip
# and the first case of every family that is not named
GREEDY += {
    family.name: name for family, name in reversed(cases()) if family.name not in dict(GREEDY) and variant(name).causal
}.items()


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [*((*one, torch.float64) for one in GREEDY), *((*one, torch.float32) for one in GREEDY[:4])],
)
def test_greedy_is_that_of_transformers(tmp_path: Path, family: str, name: str, dtype: torch.dtype):
    pytest.importorskip("transformers", reason="the reference implementation")
    reference = save_tiny(tmp_path, find_family_by_name(family), variant(name), dtype=dtype)
    expected = []
    for prompt in PROMPTS:
        tokens = torch.tensor([Numbers().encode(prompt)])
        out = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=25, do_sample=False, eos_token_id=[33, 44],
            pad_token_id=0,
        )  # fmt: skip
        expected.append(out[0, tokens.shape[1] :].tolist())
    found = generate_completions(
        load_inference_model(tmp_path, dtype=dtype),
        Numbers(),
        PROMPTS,
        GenerationLimits(25, ends={33, 44}),
        batch_size=3,
    )
    assert [completion.tokens for completion in found] == expected


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_what_follows_a_prompt_does_not_depend_on_the_batch(batch_size: int):
    sampling, limits = Sampling(temperature=1.3, top_p=0.95, seed=5), GenerationLimits(12, stop=["1 "])
    assert generate_completions(
        MODEL, Numbers(), PROMPTS, limits, sampling, batch_size=batch_size
    ) == generate_completions(MODEL, Numbers(), PROMPTS, limits, sampling, batch_size=len(PROMPTS))


def test_equal_prompts_are_different_samples():
    texts = {
        c.text
        for c in generate_completions(MODEL, Numbers(), ["7"] * 5, GenerationLimits(9), Sampling(temperature=2.0))
    }
    assert len(texts) == 5


def test_end_tokens_and_limit():
    (free,) = generate_completions(MODEL, Numbers(), ["7"], GenerationLimits(6), Sampling(temperature=3.0, seed=1))
    assert (len(free.tokens), free.finish, free.text) == (6, "length", Numbers().decode(free.tokens))
    end = free.tokens[3]
    (ended,) = generate_completions(
        MODEL, Numbers(), ["7"], GenerationLimits(6, ends={end}), Sampling(temperature=3.0, seed=1)
    )
    cut = free.tokens.index(end) + 1
    assert ended == Completion(Numbers().decode(free.tokens[: cut - 1]), free.tokens[:cut], "end")


@pytest.mark.parametrize("cut", [None, 3, 30, 77])
def test_streamed_text_is_the_text(cut: int | None):
    sampling = Sampling(temperature=2.0, seed=3)
    (free,) = generate_completions(MODEL, Numbers(), ["7"], GenerationLimits(40), sampling)
    stop = "never" if cut is None else free.text[cut : cut + 8]
    limits = GenerationLimits(40, stop=["x", stop])
    (completion,) = generate_completions(MODEL, Numbers(), ["7"], limits, sampling)
    assert completion.text == free.text.partition(stop)[0]
    assert completion.finish == ("length" if cut is None else "stop")
    assert "".join(stream_completion(MODEL, Numbers(), "7", limits, sampling)) == completion.text


def pieces_of(tokenizer: Tokenizer, text: str, *stop: str) -> tuple[list[str], Continuation]:
    tokens = tokenizer.encode(text)
    row = Continuation(tokenizer, GenerationLimits(len(tokens), stop=stop), tokenizer.encode("A prompt,"))
    pieces = []
    for token in tokens:
        if row.finish is None:
            pieces.append(row.append_token(token))
    return pieces, row


def test_stop_string_never_shows_even_in_part(tokenizer: Tokenizer):
    pieces, row = pieces_of(tokenizer, "the story of the other ENDxyz more", "END", "ENDING")
    assert row.text == "".join(pieces) == "the story of the other "
    assert row.finish == "stop"
    pieces, row = pieces_of(tokenizer, "the story of the EN", "END")
    assert "".join(pieces) == "the story of the EN"
    assert not any("E" in piece for piece in pieces[:-1])


def test_earliest_of_several_stop_strings(tokenizer: Tokenizer):
    assert pieces_of(tokenizer, "abcdefg", "fg", "cd", "def")[1].text == "ab"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=90))
def test_characters_come_whole(tokenizer: Tokenizer, text: str):
    pieces, row = pieces_of(tokenizer, text) if text else ([], None)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert row is None or row.text == text


def test_long_text_is_decoded_in_windows(tokenizer: Tokenizer):
    text = "the 🌍 is the end of 日本語 story, " * 30
    pieces, _ = pieces_of(tokenizer, text)
    assert "".join(pieces) == text


def test_words_keep_the_space_before_them_and_bytes_become_characters():
    """A decoder like Llama 2's drops the space before the first word, and spells what it has no token for in bytes."""
    words = ["▁the", "▁end", "▁of", *(f"<0x{byte:02X}>" for byte in "€".encode())]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    class Backend(Numbers):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return backend.decode(ids)

    told = IncrementalDetokenizer(Backend(), [0, 1])
    assert [told.append_token(token) for token in (2, 0, 3, 4, 5, 1)] == [" of", " the", "", "", "€", " end"]


@given(st.lists(st.integers(1, 256), max_size=200))
def test_any_bytes_are_survived(tokenizer: Tokenizer, tokens: list[int]):
    told = IncrementalDetokenizer(tokenizer, [])
    found = "".join(map(told.append_token, tokens))
    assert found == tokenizer.decode(tokens)[: len(found)]
    assert not tokenizer.decode(tokens)[len(found) :].strip("\ufffd")


@pytest.mark.parametrize(
    ("prompt", "limits", "message"),
    [
        ("", GenerationLimits(9), "prompt 2.*no tokens"),
        ("61", GenerationLimits(9), "prompt 2.*token 61 .*vocabulary of 61"),
        ("1 2 3", GenerationLimits(63), r"prompt 2 \('1 2 3'\): 3 tokens and 63 new ones.*64 positions"),
    ],
)
def test_prompts_that_cannot_be(prompt: str, limits: GenerationLimits, message: str):
    with pytest.raises(DataError, match=message):
        generate_completions(model_of(variant("gpt2")), Numbers(), ["1", prompt], limits)


def test_all_positions_can_be_used():
    (found,) = generate_completions(model_of(variant("gpt2")), Numbers(), ["1 2 3"], GenerationLimits(62))
    assert len(found.tokens) == 62


@pytest.mark.parametrize("make", [lambda: GenerationLimits(0), lambda: GenerationLimits(stop=[""])])
def test_limits_that_cannot_be(make):
    with pytest.raises(ConfigError):
        make()


def test_model_that_gives_no_numbers():
    model = model_of(variant("plain"))
    model.output_weight[5, 0] = float("nan")
    with pytest.raises(CheckpointError, match="not a number"):
        generate_completions(model, Numbers(), ["1"], GenerationLimits())
