"""Text generation by a module of transformers: one text at a time, with the module's own KV cache."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from mega_common.errors import ConfigError
from mega_eval.engine_requests import EngineRequest, GenerationEvent, RequestState, score_tokens
from mega_eval.grammar_matcher import GrammarCache
from mega_eval.sampling import check_chosen_tokens
from mega_eval.text_stream import Continuation, TextTokenizer
from mega_trainer.model.transformers_decoder import TransformersDecoder


class TransformersEngine:
    """Inference engine for a module of transformers, with the requests and events of `InferenceEngine`.
    It runs one request after another; a module that returns no `past_key_values` reads the whole text again for each
    token.
    """

    def __init__(self, model: TransformersDecoder, tokenizer: TextTokenizer) -> None:
        self._model, self._tokenizer, self._grammars = model, tokenizer, GrammarCache(tokenizer)
        self._waiting: deque[RequestState] = deque()
        self._cache: Any = None
        self._number = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not finished, except the running one."""
        return max(0, len(self._waiting) - 1)

    @property
    def num_running(self) -> int:
        """Number of running requests, 0 or 1."""
        return min(1, len(self._waiting))

    def add_request(self, request: EngineRequest) -> int:
        """Add a request to the queue and return its number.

        Raises:
            DataError: when the prompt is empty, too long or has tokens outside the vocabulary.
            ConfigError: for a request with images or an adapter.
        """
        if request.images is not None or request.adapter is not None:
            raise ConfigError(
                "images and separate adapters are not supported with a model of implementation: transformers",
                hint="use a model type that mega has",
            )
        request.check_fits_engine(self._model.config, (), self._model.config.max_position)
        grammar = (
            None
            if request.grammar is None
            else self._grammars.get_grammar_matcher(request.grammar, request.limits.ends)
        )
        text = Continuation(self._tokenizer, request.limits, request.prompt)
        self._waiting.append(RequestState(self._number, request, text, list(request.prompt), grammar))
        self._number += 1
        return self._number - 1

    def step(self) -> list[GenerationEvent]:
        """Generate one token of the running request and return its event; an empty list without a request.

        Raises:
            CheckpointError: when the model's output is not a number, or the module fails.
        """
        if not self._waiting:
            return []
        row = self._waiting[0]
        logits = self._next_logits(row)
        token, wanted = row.choose_token(logits), row.request.logprobs
        check_chosen_tokens([token], self._model.dtype)
        scored = [] if wanted is None else score_tokens(logits[None], [token], wanted)
        row.tokens.append(token)
        new = row.text.append_token(token)
        if row.grammar is not None and row.grammar.accept_token(token):
            new += row.text.flush_held_back_text()
        if row.text.finish is not None:
            self._waiting.popleft()
            self._cache = None
        return [GenerationEvent(row.number, new, [token], scored, None, row.text.finish)]

    @torch.inference_mode()
    def _next_logits(self, row: RequestState) -> Tensor:
        """Return the logits [V] after the row's last token, and keep the module's cache if it returns one."""
        pending = row.tokens if self._cache is None else row.tokens[row.num_computed :]
        found = self._model.run_with_kv_cache(torch.tensor([pending], device=self._model.device), self._cache)
        self._cache, row.num_computed = getattr(found, "past_key_values", None), len(row.tokens)
        logits: Tensor = found.logits[0, -1]
        return logits
