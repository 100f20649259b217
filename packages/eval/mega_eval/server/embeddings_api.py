"""Endpoint /v1/embeddings: vectors of texts, computed in the engine's thread between two of its steps.

Legend: N texts, P width of a vector.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from mega_common.errors import DataError
from mega_data.tokenizer import Tokenizer
from mega_eval.sentence_transformers_folder import (
    SentenceTransformersSettings,
    log_sentence_transformers_settings,
    read_sentence_transformers_folder,
)
from mega_eval.server.api_errors import ApiRequestError, reject_lone_surrogates
from mega_eval.server.request_schemas import RequestBody
from mega_eval.server.request_validation import Many, TokenId, make_union_validator
from mega_eval.text_embedding import TextEmbedder, check_pooling_modes
from mega_trainer.model.decoder import Decoder
from mega_trainer.parallel.lora_layers import PerRowAdapterSelection

BATCH_TOKENS = 2048  # tokens of one batch; the engine pauses while it is computed

Vectors = npt.NDArray[np.float32]
EmbeddingInputField = Annotated[
    str | Many[str] | Many[TokenId] | Many[Many[TokenId]],
    Field(min_length=1, max_length=1_000_000),
    make_union_validator("a text, a list of texts, a list of token ids or a list of lists of token ids, and not empty"),
]


class EmbeddingRequest(RequestBody):
    """Body of a request to /v1/embeddings."""

    input: EmbeddingInputField
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int | None, Field(ge=1, description="must be the width of the model's vectors")] = None
    prompt_name: Annotated[
        str | None, Field(description="prompt of a sentence-transformers folder; absent: its default prompt, if any")
    ] = None

    def list_input_texts(self) -> list[str | list[int]]:
        """Return each input to embed, as text or as token ids."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


@dataclass(frozen=True)
class ServedEmbedder:
    """Embedding model of the server; it gives the vectors that `mega embed` computes for the model.

    Attributes:
        texts: model, tokenizer and settings.
        adapters: selection of LoRA adapters; texts are embedded without any.
        declared: True if a sentence-transformers folder declares the settings.
        width: P.
    """

    texts: TextEmbedder
    adapters: PerRowAdapterSelection
    declared: bool
    width: int

    def select_prompt(self, name: str | None = None) -> str:
        """Return the prompt called `name`, or the folder's default prompt if None; a DataError for an unknown name.
        It is put in front of each text.

        Raises:
            DataError: for a name that the folder does not have.
        """
        prompts = self.texts.settings.prompts
        if name is not None and name not in prompts:
            names = ", ".join(map(repr, prompts)) or "none, the model has no prompts"
            raise DataError(f"prompt_name {name!r} is not a prompt of this model; its prompts are: {names}")
        return self.texts.settings.select_prompt(name)

    def encode_text(self, text: str, prompt: str) -> list[int]:
        """Return the token ids of a text to embed, after the prompt and truncated if the folder has such settings.

        Without a sentence-transformers folder, `prompt` is ignored and the text is not truncated.
        """
        if self.declared:
            return self.texts.encode_texts([text], prompt)[0]
        return self.texts.encode_untruncated(text)

    def __call__(self, texts: Sequence[Sequence[int]], prompt: str = "") -> Vectors:
        """Return the embedding of each text of token ids, fp32 [N, P]; call it in the engine's thread, since two
        forward passes may not run at the same time.
        """
        self.adapters.select_adapters([], self.texts.model.device)
        return self.texts.embed_token_ids(texts, prompt=prompt, batch_tokens=BATCH_TOKENS, advance=lambda _: None)


def make_served_embedder(
    folder: str, model: Decoder, tokenizer: Tokenizer, adapters: PerRowAdapterSelection
) -> ServedEmbedder:
    """Return the embedder of a served model, for /v1/embeddings.
    It has the settings of the model's sentence-transformers folder; for other folders it takes the mean hidden state,
    scaled to length 1.

    Raises:
        CheckpointError: when a declared module or setting is not supported.
        ConfigError: when the declared default prompt is missing, or for `cls` pooling, which requires an encoder.
    """
    found = read_sentence_transformers_folder(Path(folder))
    settings = found or SentenceTransformersSettings(Path(folder), normalized=True)
    settings.select_prompt(None)
    check_pooling_modes(model, settings.modes)
    if found is not None:
        log_sentence_transformers_settings(settings)
    pooled = torch.zeros(1, model.config.hidden_size * len(settings.modes))
    for layer in settings.layers:
        pooled = layer(pooled)
    return ServedEmbedder(TextEmbedder(model, tokenizer, settings), adapters, found is not None, pooled.shape[1])


def encode_embedding_input(embedder: ServedEmbedder, text: str | list[int], prompt: str, max_length: int) -> list[int]:
    """Return the token ids of a text to embed, or raise ApiRequestError if it is empty or too long.

    Raises:
        ApiRequestError: for an empty text, one that is too long, or token ids where the model puts a `prompt` first.
    """
    if not text:
        raise ApiRequestError(400, "input must not have an empty text", param="input")
    if isinstance(text, list) and prompt:
        message = f"input must be text, as the model's prompt {prompt!r} is put first; found token ids"
        raise ApiRequestError(400, message, param="input")
    if isinstance(text, str):
        reject_lone_surrogates(text)
        text = embedder.encode_text(text, prompt)
    most = min(max_length, embedder.texts.model.config.max_position)
    if embedder.declared:
        most = min(most, embedder.texts.max_length)
    if len(text) > most:
        raise ApiRequestError(
            400,
            f"This model's maximum context length is {most} tokens; a text of input has {len(text)}.",
            param="input",
            code="context_length_exceeded",
        )
    if not text:
        raise ApiRequestError(400, "input must not have an empty text: one has no tokens", param="input")
    return text


def split_into_token_batches(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Split texts, in their order, into batches of at most `BATCH_TOKENS` tokens; a longer text is a batch of its own."""
    batch: list[Sequence[int]] = []
    for text in texts:
        if batch and sum(map(len, batch)) + len(text) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(text)
    yield batch


def format_embeddings(vectors: Vectors, model: str, tokens: int, encoding: str | None) -> dict[str, Any]:
    """Return the JSON body of an answer of /v1/embeddings.
    With `encoding` base64 each vector is little-endian fp32 in base64.
    """

    def encode_vector(vector: Vectors) -> str | list[float]:
        if encoding == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers

    data = [
        {"object": "embedding", "index": at, "embedding": encode_vector(vector)} for at, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
