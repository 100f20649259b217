"""OpenAI's own client against a server of a T5: what transformers says of each prompt, however many are asked at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from encoder_decoders import published
from masked_data import save_word_pieces
from openai import OpenAI
from served_models import openai_client
from serving import service_of, serving
from transformers import T5ForConditionalGeneration

from mega_data.tokenizer import Tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model

PROMPTS = ["w1 w2 w3 w20", "w9", "w4 w4 w5 w6 w7 w8 w1", "w30 w31", "w9"]
KEY = "sk-tiny-key"


@pytest.fixture(scope="module")
def hf_t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, T5ForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("t5")
    model = published(folder, vocab_size=207)
    save_word_pieces(folder)
    return folder, model


@pytest.fixture(scope="module")
def client(hf_t5: tuple[Path, T5ForConditionalGeneration]) -> Iterator[OpenAI]:
    folder, _ = hf_t5
    model = load_inference_model(folder, kinds=("encoder-decoder",))
    engine = InferenceEngine(model, Tokenizer(folder), cache_tokens=256, batch_size=3)
    service = service_of(engine, folder, ends=frozenset(), max_length=64)
    with serving(service, key=KEY) as (url, _), openai_client(url, KEY) as client:
        yield client


def complete(client: OpenAI, prompt: Any, **options: Any) -> Any:
    given = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8}
    return client.completions.create(**{**given, **options})


def expected(theirs: tuple[Path, T5ForConditionalGeneration], prompt: str) -> list[int]:
    folder, model = theirs
    tokens = torch.tensor([Tokenizer(folder).encode(prompt, add_special_tokens=True)])
    found = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, use_cache=False)
    answer: list[int] = found[0, 1:].tolist()
    return answer


def test_completions_are_those_of_transformers_alone_at_once_and_as_a_stream(
    client: OpenAI, hf_t5: tuple[Path, T5ForConditionalGeneration]
) -> None:
    words = Tokenizer(hf_t5[0])
    answers = [words.decode(expected(hf_t5, prompt), skip_special_tokens=True) for prompt in PROMPTS]
    assert len(set(answers)) >= 3  # the encoder matters
    assert [choice.text for choice in complete(client, PROMPTS).choices] == answers
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda prompt: complete(client, prompt), PROMPTS))
    assert [one.choices[0].text for one in found] == answers
    assert [one.usage.prompt_tokens for one in found] == [
        len(words.encode(prompt, add_special_tokens=True)) for prompt in PROMPTS
    ]
    parts = complete(client, PROMPTS[2], stream=True)
    assert "".join(part.choices[0].text for part in parts) == answers[2]


def test_probabilities_are_of_what_the_decoder_says(
    client: OpenAI, hf_t5: tuple[Path, T5ForConditionalGeneration]
) -> None:
    folder, model = hf_t5
    told = complete(client, PROMPTS[0], logprobs=1).choices[0].logprobs.token_logprobs
    answer = expected(hf_t5, PROMPTS[0])
    read = torch.tensor([Tokenizer(folder).encode(PROMPTS[0], add_special_tokens=True)])
    with torch.inference_mode():
        logits = model(input_ids=read, decoder_input_ids=torch.tensor([[0, *answer[:-1]]])).logits[0]
    wanted = logits.double().log_softmax(-1)[range(len(answer)), answer]
    assert told == pytest.approx(wanted.tolist(), rel=1e-4)


def test_what_is_not_asked_of_an_encoder_is_refused_in_a_sentence(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "w1"}])
    with pytest.raises(openai.BadRequestError, match="log-probabilities of the prompt are not supported"):
        complete(client, "w1 w2", echo=True, logprobs=1)
