"""Endpoint /v1/rerank: documents by their similarity to a query, the cosine of their embeddings."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from mega_eval.server.embeddings_api import ServedEmbedder, Vectors
from mega_eval.server.request_schemas import RequestBody
from mega_eval.server.request_validation import Many, StrictRequestModel, make_union_validator

# names of prompts in sentence-transformers folders
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


class RerankDocument(StrictRequestModel):
    """Document of a request to /v1/rerank as an object with its text."""

    text: str


DocumentsField = Annotated[
    Many[str] | Many[RerankDocument],
    Field(min_length=1, max_length=10_000),
    make_union_validator('a list of texts or of objects {"text": TEXT}, and not empty'),
]


class RerankRequest(RequestBody):
    """Body of a request to /v1/rerank."""

    query: Annotated[str, Field(min_length=1)]
    documents: DocumentsField
    top_n: Annotated[int | None, Field(ge=0, description="0 or absent: all")] = None
    return_documents: bool | None = True

    def list_document_texts(self) -> list[str]:
        """Return the texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


def select_prompt_name(embedder: ServedEmbedder, names: tuple[str, ...]) -> str | None:
    """Return the first of `names` that is a prompt of the embedder's folder; None for the default prompt."""
    return next((name for name in names if name in embedder.texts.settings.prompts), None)


def format_rerank_response(
    body: RerankRequest, query: Vectors, documents: Vectors, model: str, tokens: int
) -> dict[str, Any]:
    """Return the JSON body of a /v1/rerank answer: documents [N, P] by falling cosine similarity to `query` [1, P]."""
    lengths = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    scores = documents @ query[0] / np.maximum(lengths, 1e-12)
    order = np.argsort(-scores, kind="stable")[: body.top_n or None]
    texts = body.list_document_texts()
    results = [
        {"index": int(at), "relevance_score": float(scores[at]), **({"document": {"text": texts[at]}} if body.return_documents else {})}
        for at in order
    ]  # fmt: skip
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "results": results, "usage": usage}
