"""Characters of several tokens: names, bytes and offsets of tokens, and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from served_models import engine_for, http_client, text_model
from serving import service_of
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from mega_data.tokenizer import Tokenizer
from mega_eval.server.answer_formats import TokenTextOffsets
from mega_eval.server.token_spelling import Vocabulary

TEXTS = [
    "plain", "naïve", "🎉", "a🎉b", "🎉🎉", "👩\u200d👩\u200d👧", "日本語", "e\u0301", "🇫🇷 flag", "half \ufffd here", "\n\n é\n",
    " leading", "𝔘nicode", "ß", "\u00a0",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = text_model(tmp_path_factory, "the end of the story", vocab_size=270)
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.role + one.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with http_client(service_of(engine_for(folder), folder)) as client:
        yield client


def request_completion(client: httpx.Client, text: str, **more: Any) -> dict[str, Any]:
    """A completion that has to be `text`."""
    body = {"prompt": "the", "guided_choice": [text], "max_tokens": 99, "logprobs": 1, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def raw(name: str) -> bytes:
    """Bytes of a token, as a client of OpenAI's reads them."""
    if name.startswith("bytes:"):
        return bytes(int(byte, 16) for byte in name.removeprefix("bytes:").split("\\x")[1:])
    return name.encode()


def offsets_of(text: str, tokens: list[bytes]) -> list[int]:
    """The character of `text` in which each token begins."""
    starts, at = [], 0
    for place, char in enumerate(text):
        starts += [place] * len(char.encode())
    found = []
    for token in tokens:
        found.append(starts[at] if at < len(starts) else len(text))
        at += len(token)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_have_the_bytes_and_offsets_of_the_text(client: httpx.Client, folder: Path, text: str) -> None:
    choice = request_completion(client, text)
    assert choice["text"] == text
    count = len(Tokenizer(folder).encode(text)) if choice["finish_reason"] == "length" else None
    tokens = [raw(name) for name in choice["logprobs"]["tokens"]]
    shown = b"".join(tokens)
    assert shown.startswith(text.encode())
    assert choice["logprobs"]["text_offset"] == offsets_of(text, tokens)
    assert count is None or count == len(tokens)


@pytest.mark.parametrize("text", TEXTS)
def test_an_echo_shifts_the_offsets(client: httpx.Client, text: str) -> None:
    choice = request_completion(client, text, prompt=text, echo=True)
    assert choice["text"] == text * 2
    tokens = [raw(name) for name in choice["logprobs"]["tokens"]]
    assert choice["logprobs"]["text_offset"] == offsets_of(text * 2, tokens)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_never_cuts_a_character(client: httpx.Client, text: str, path: str) -> None:
    body: dict[str, Any] = {"guided_choice": [text], "max_tokens": 99, "stream": True}
    if path == "completions":
        body |= {"prompt": "the", "logprobs": 1}
        sent = client.post("/v1/completions", json=body).text
        chunks = [json.loads(line[6:])["choices"][0] for line in sent.split("\n\n") if line.startswith("data: {")]
        whole = request_completion(client, text)
        texts = [chunk["text"] for chunk in chunks]
        offsets = [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]]
        assert offsets == whole["logprobs"]["text_offset"]
    else:
        body |= {"messages": [{"role": "user", "content": "the"}], "logprobs": True}
        sent = client.post("/v1/chat/completions", json=body).text
        chunks = [json.loads(line[6:])["choices"][0] for line in sent.split("\n\n") if line.startswith("data: {")]
        texts = [chunk["delta"]["content"] for chunk in chunks]
        told = [one for chunk in chunks for one in chunk["logprobs"]["content"]]
        assert b"".join(bytes(one["bytes"]) for one in told).startswith(text.encode())
        assert not any(one["token"].startswith("bytes:") for one in told)
    assert "".join(texts) == text
    assert all("\ufffd" not in part or "\ufffd" in text for part in texts)


def test_offsets_of_sentencepiece_and_special_tokens(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "<0xC3>", "<0xA9>", "▁", "a", "▁a"]
    backend = Backend(models.BPE({word: at for at, word in enumerate(words)}, [("▁", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    vocabulary = Vocabulary(Tokenizer(tmp_path))
    for text, tokens, expected in [
        ("aé a", [1, 6, 2, 3, 6], [0, 0, 1, 1, 2]),  # <s> is not in the text, and the first space is dropped
        ("<s>aé", [1, 5, 2, 3], [0, 3, 4, 4]),
        (" a a", [6, 6], [0, 2]),
    ]:
        assert TokenTextOffsets().next_offsets([vocabulary[token] for token in tokens], text) == expected
