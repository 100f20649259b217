"""Images in chats of three families: the answers are transformers', and what is no image of the request is refused."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from serving import serving
from vision_language_models import MARKS, make_service, picture, save_model

from mega_data.images.image_pixels import prepare_image
from mega_data.tokenizer import Tokenizer
from mega_eval.generate import generate_completions
from mega_eval.image_prompts import ImagePrompt
from mega_eval.model_loading import load_inference_model
from mega_eval.text_stream import GenerationLimits


def as_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def ask(content: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 10,
        "ignore_eos": True,
        **more,
    }


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


WHAT = {"type": "text", "text": "what is it?"}


FAMILIES = ("llava", "llava next", "gemma3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folders = {name: tmp_path_factory.mktemp("model") for name in FAMILIES}
    return {name: (folder, save_model(name, folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def url(models: dict[str, tuple[Path, Any]]) -> Iterator[str]:
    services = [make_service(folder, name) for name, (folder, _) in models.items()]
    with serving(*services, max_body=2**20) as (url, _):
        yield url


def post(url: str, body: dict[str, Any], path: str = "chat/completions") -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=60)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_about_images(url: str, models: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, theirs = models[name]
    model, tokenizer = load_inference_model(folder), Tokenizer(folder)
    texts, scores = [], []
    for number in (1, 2):
        answer = post(url, ask([image(as_url(picture(number))), WHAT], model=name, logprobs=True)).json()
        mark = MARKS[name == "gemma3"]
        prompt = ImagePrompt(f"user: {mark}what is it?", [picture(number)])
        (expected,) = generate_completions(model, tokenizer, [prompt], GenerationLimits(10))
        texts.append(answer["choices"][0]["message"]["content"])
        scores.append(answer["choices"][0]["logprobs"]["content"][0]["logprob"])
        assert texts[-1] == tokenizer.decode(expected.tokens, skip_special_tokens=True).rstrip("\ufffd")
        tokens, _ = prompt.encode_prompt(model, tokenizer)
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        if name == "llava":
            assert model.config.vision is not None
            pixels = torch.from_numpy(prepare_image(picture(number), model.config.vision).pixels)
            row = theirs.generate(
                torch.tensor([tokens]), pixel_values=pixels, do_sample=False, max_new_tokens=10, eos_token_id=None
            )
            assert row[0, len(tokens) :].tolist() == expected.tokens
    assert scores[0] != scores[1], "images that change nothing"
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(1)).decode()}
    body = {
        "model": name,
        "max_tokens": 10,
        "temperature": 0,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}, WHAT]}],
    }
    said = post(url, body, "messages").json()["content"]
    assert texts[0].startswith(said[0]["text"] if said else "")
    parts = [{"type": "input_image", "image_url": as_url(picture(1))}, {"type": "input_text", "text": "what is it?"}]
    body = {"model": name, "max_output_tokens": 10, "temperature": 0, "input": [{"role": "user", "content": parts}]}
    assert texts[0].startswith(post(url, body, "responses").json()["output"][0]["content"][0]["text"])


def bomb() -> bytes:
    """A PNG of a few hundred bytes whose header declares 40,000 x 40,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100_000)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([image("https://other.example/cat.png")], "this server fetches no addresses"),
        ([image("file:///etc/passwd")], "this server fetches no addresses"),
        ([image("data:text/plain;base64,aGFsbG8=")], "this server fetches no addresses"),
        ([image(None)], "this server fetches no addresses"),
        ([image("data:image/png;base64,!!!")], "is not base64"),
        ([image(as_url(b"no image at all"))], "the image cannot be read"),
        ([image(as_url(picture(1)[:60]))], "the image cannot be read"),
        ([image(as_url(bomb()))], "pixels"),
        ([image(as_url(picture(1, (1, 900))))] * 17, "at most 16 images"),
        ([image(as_url(picture(1))), {"type": "text", "text": "<image> and another"}], "one placeholder"),
        ([image(as_url(picture(number))) for number in range(16)] * 1 + [{"type": "text", "text": "the end " * 300}], "maximum context length"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(url: str, content: list[Any], message: str) -> None:
    answer = post(url, ask([*content, WHAT], model="llava"))
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text
    assert post(url, ask([WHAT], model="llava")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": "a", "images": ["x"]}, "send images in the content of messages"),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": as_url(picture(1))}]}]},
            "'output' must be text",
        ),
    ],
)  # fmt: skip
def test_images_elsewhere_are_refused(url: str, path: str, body: dict[str, Any], message: str) -> None:
    answer = post(url, {"model": "llava", **body}, path)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_model_without_a_vision_encoder_refuses_images(url: str, models: dict[str, tuple[Path, Any]]) -> None:
    cards = httpx.get(f"{url}/v1/models").json()["data"]
    assert [card["images"] for card in cards] == [True] * 3
    service = make_service(models["llava"][0], "blind")
    service.vision = None
    with serving(service) as (other, _):
        answer = post(other, ask([image(as_url(picture(1))), WHAT]))
        assert (answer.status_code, "takes no images" in answer.text) == (400, True)
        assert httpx.get(f"{other}/v1/models").json()["data"][0]["images"] is False
