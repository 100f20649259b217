"""Large bodies: a list is checked up to its first error, so that one body does not hold up the event loop."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mega_eval.server.embeddings_api import EmbeddingRequest
from mega_eval.server.request_schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from mega_eval.server.responses_api import ResponsesRequest

COUNT = 100_000
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ChatRequest, {"messages": [{}] * COUNT}),
        (ChatRequest, {"messages": [{"role": "x"}] * COUNT}),
        (ChatRequest, {"messages": [USER, *[None] * COUNT]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * COUNT}]}),
        (TokenizeRequest, {"messages": [{}] * COUNT}),
        (DetokenizeRequest, {"tokens": [-1] * COUNT}),
        (DetokenizeRequest, {"tokens": ["a"] * COUNT}),
        (CompletionRequest, {"prompt": [{}] * COUNT}),
        (CompletionRequest, {"prompt": [[{}]] * COUNT}),
        (CompletionRequest, {"prompt": [1, "a"] * COUNT}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * COUNT}),
        (CompletionRequest, {"prompt": "a", "bad_words": [1] * COUNT}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * COUNT}),
        (EmbeddingRequest, {"input": [[{}]] * COUNT}),
        (ResponsesRequest, {"input": [{}] * COUNT}),
    ],
)
def test_a_list_is_checked_up_to_its_first_error(schema: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        schema.model_validate(body)
    assert refused.value.error_count() <= 3
