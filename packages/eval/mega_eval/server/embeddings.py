"""/v1/embeddings: vectors of texts, computed by the engine's thread between two of its steps.

Legend: N texts, D model width.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from mega_eval.embed import embed
from mega_eval.server.schemas import Body
from mega_eval.server.validation import Many, TokenId, expecting
from mega_trainer.model.decoder import Decoder
from mega_trainer.parallel.lora import Selection

BATCH_TOKENS = 2048  # tokens of one batch, which the steps of the engine wait for

Vectors = npt.NDArray[np.float32]
InputField = Annotated[
    str | Many[str] | Many[TokenId] | Many[Many[TokenId]],
    Field(min_length=1, max_length=1_000_000),
    expecting("a text, a list of texts, a list of token ids or a list of lists of token ids, and not empty"),
]


class EmbeddingRequest(Body):
    """Body of /v1/embeddings."""

    input: InputField
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int | None, Field(ge=1, description="must be the model's width")] = None

    def texts(self) -> list[str | list[int]]:
        """Return each input, as text or tokens."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


@dataclass(frozen=True)
class Embedder:
    """Model that makes vectors of length 1 of texts: the mean of the last hidden states of their tokens.

    Attributes:
        model: in eval mode, on one rank.
        adapters: of the model; texts are embedded without any.
    """

    model: Decoder
    adapters: Selection

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.model.config.hidden_size

    def __call__(self, texts: Sequence[Sequence[int]]) -> Vectors:
        """Return the vectors, fp32 [N, D]; in the engine's thread, as no two passes may run at the same time."""
        self.adapters.begin([], self.model.device)
        return embed(self.model, texts, normalize=True, batch_tokens=BATCH_TOKENS, advance=lambda _: None)


def batches_of(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Cut texts into batches of about `BATCH_TOKENS`, in their order."""
    batch: list[Sequence[int]] = []
    for text in texts:
        if batch and sum(map(len, batch)) + len(text) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(text)
    yield batch


def embedding_body(vectors: Vectors, model: str, tokens: int, encoding: str | None) -> dict[str, Any]:
    """Return the JSON of the answer; base64 is of fp32 in little-endian order."""

    def spelt(vector: Vectors) -> str | list[float]:
        if encoding == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers

    data = [{"object": "embedding", "index": at, "embedding": spelt(vector)} for at, vector in enumerate(vectors)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
