"""Folders of tiny models with tokenizers that are trained on the spot, and clients of a server that has one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from chat_templates import chat_tokenizer
from openai import OpenAI
from serving import serving
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model
from mega_eval.server.model_service import ModelService

STORY = "the end of the story is the beginning of the other story"


def text_model(
    temporary: pytest.TempPathFactory, text: str = STORY, *, vocab_size: int = 290, max_position: int = 512
) -> Path:
    """Write a model whose tokenizer is trained on `text`, without a chat template."""
    folder = temporary.mktemp("model")
    _save(folder, train_tokenizer([text] * 3, vocab_size, folder), max_position)
    return folder


def chat_model(
    temporary: pytest.TempPathFactory, text: str = STORY, *, vocab_size: int = 290, max_position: int = 512
) -> Path:
    """Write a model whose tokenizer is trained on `text`, with Qwen's chat template."""
    base, folder = temporary.mktemp("base"), temporary.mktemp("model")
    train_tokenizer([text] * 3, vocab_size, base)
    _save(folder, Tokenizer(chat_tokenizer(base, folder, "qwen", marks=False)), max_position)
    return folder


def _save(folder: Path, tokenizer: Tokenizer, max_position: int) -> None:
    config = variant("grouped").model_copy(update={"vocab_size": tokenizer.vocab_size, "max_position": max_position})
    save_tiny(folder, find_family_by_name("llama"), config)


def engine_for(folder: Path, *, cache_tokens: int = 2048, batch_size: int = 8, **options: Any) -> InferenceEngine:
    """Return an engine of the model in a folder."""
    return InferenceEngine(
        load_inference_model(folder), Tokenizer(folder), cache_tokens=cache_tokens, batch_size=batch_size, **options
    )


@contextlib.contextmanager
def openai_client(url: str, key: str = "none") -> Iterator[OpenAI]:
    """Give OpenAI's client of a server at a URL."""
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@contextlib.contextmanager
def http_client(service: ModelService) -> Iterator[httpx.Client]:
    """Serve, and give a plain HTTP client of the server."""
    with serving(service) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client
