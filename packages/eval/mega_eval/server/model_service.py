"""Service of one model: encodes prompts, submits requests to the engine and formats its events as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from anyio import CapacityLimiter, to_thread

from mega_common.errors import DataError
from mega_data.chat.chat_template import ChatTemplate
from mega_data.tokenizer import Tokenizer
from mega_eval.engine_requests import EngineRequest
from mega_eval.sampling import Sampling
from mega_eval.server.answer_formats import (
    AnswerBuilder,
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    EchoedPrompt,
    TokenUsage,
    stream_answer_parts,
)
from mega_eval.server.answer_parser import AnswerParser, AnswerSyntax, parse_answer_parts
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.call_grammars import NO_ARGUMENTS, CallableTool, build_answer_grammar, build_call_grammar
from mega_eval.server.chat_prompts import ChatPromptRenderer
from mega_eval.server.embeddings_api import EmbeddingRequest, ServedEmbedder, format_embeddings, split_into_batches
from mega_eval.server.engine_driver import EngineDriver
from mega_eval.server.request_schemas import (
    ChatMessage,
    ChatRequest,
    ChatTemplateFields,
    CompletionRequest,
    GenerationRequestBody,
)
from mega_eval.server.responses_api import ResponsesAnswerBuilder, ResponsesRequest
from mega_eval.server.running_answer import RunningAnswer
from mega_eval.server.server_metrics import ServerMetrics
from mega_eval.server.token_spelling import Vocabulary, find_max_token_bytes
from mega_eval.server.worker_processes import WorkerProcesses
from mega_eval.text_stream import GenerationLimits

NO_EMBEDDINGS = "embeddings are supported for a decoder on one rank, without an adapter"


@dataclass(frozen=True)
class AnswerPlan:
    """Grammar of an answer, and the parser and syntax that separate its reasoning and calls; None for plain text."""

    grammar: str | None
    make_parser: Callable[[], AnswerParser] | None = None
    syntax: AnswerSyntax | None = None


@dataclass
class ModelService:
    """Model that the HTTP server offers, with its tokenizer, chat template and inference engine; it answers the API's
    requests.

    Attributes:
        name: name of the model in the API.
        version: version of mega.
        driver: driver of the inference engine.
        tokenizer: tokenizer of the model.
        template: chat template, if any.
        ends: tokens that end a text.
        default_sampling: sampling settings of the model's own files.
        max_length: maximum number of tokens of a prompt and its continuation.
        vocab_size: vocabulary size of the model.
        seconds: time limit of one answer.
        metrics: metrics of the server.
        adapters: source of each LoRA adapter, by the model name that selects it in the API.
        embedder: embedder of texts, or the reason that embeddings are not supported (None: the kind of model).
    """

    name: str
    version: str
    driver: EngineDriver
    tokenizer: Tokenizer
    template: ChatTemplate | None
    ends: frozenset[int]
    default_sampling: Mapping[str, Any]
    max_length: int
    vocab_size: int
    seconds: float
    metrics: ServerMetrics
    adapters: Mapping[str, str] = field(default_factory=dict)
    embedder: ServedEmbedder | str | None = None

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.vocabulary = Vocabulary(self.tokenizer)
        # encoding takes a hundred times the memory of the text, so few texts at once; threads keep the event loop free
        self._encoders = CapacityLimiter(2)
        self._workers = WorkerProcesses(getattr(self.driver.engine, "grammars", None))
        self._longest = find_max_token_bytes(self.tokenizer)
        syntax = AnswerSyntax() if self.template is None else AnswerSyntax.detect(self.template.source)
        self._chats = ChatPromptRenderer(self.template, syntax, self._workers)

    def check_model_name(self, name: str | None) -> None:
        """Raise ApiRequestError (404) if `name` is not the served model or one of its LoRA adapters; None is the served
        model.
        """
        if name not in (None, self.name, *self.adapters):
            raise ApiRequestError(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")

    async def encode_text(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer puts around it if `special`."""

        def encode_in_thread() -> list[int]:
            # `encode_batch`, unlike `encode`, releases the GIL
            ids: list[int] = self.tokenizer.backend.encode_batch([text], add_special_tokens=special)[0].ids
            return ids

        _check_unicode(text)
        return await to_thread.run_sync(encode_in_thread, limiter=self._encoders)

    async def decode_tokens(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        largest = max(tokens, default=0)
        if largest >= self.vocab_size:
            raise ApiRequestError(400, f"token {largest} is outside the model's vocabulary of {self.vocab_size}")
        return await to_thread.run_sync(self.tokenizer.decode, tokens, limiter=self._encoders)

    def list_token_names(self, tokens: Sequence[int]) -> list[str | None]:
        """Return the tokenizer's vocabulary entry of each token id, such as `Ġthe`; None for an unknown id."""
        return [self.tokenizer.backend.id_to_token(token) for token in tokens]

    async def encode_chat_prompt(self, messages: Sequence[ChatMessage], body: ChatTemplateFields) -> list[int]:
        """Return the token ids of a conversation rendered by the chat template, up to the beginning of the answer."""
        return await self.encode_text(await self._chats.render_prompt(messages, body), special=False)

    async def start_completion(self, body: CompletionRequest) -> RunningAnswer:
        """Start the generation for a request to /v1/completions and return the answer in progress."""
        sources, prompts = body.list_prompts(), []
        self.driver.check_capacity(len(sources) * (body.n or 1))  # before the work of encoding them
        for prompt in sources:
            if isinstance(prompt, str):
                self._check_text_size(prompt, body)
            tokens = (
                prompt if isinstance(prompt, list) else await self.encode_text(prompt, special=body.add_special_tokens)
            )
            prompts.append(self._truncate_prompt(tokens, body))
        echoes: list[EchoedPrompt | None] = [None] * len(sources)
        if body.echo:
            texts = [
                prompt
                if isinstance(prompt, str) and body.truncate_prompt_tokens is None
                else await self.decode_tokens(tokens)
                for prompt, tokens in zip(sources, prompts, strict=True)
            ]
            echoes = [EchoedPrompt(text, tokens) for text, tokens in zip(texts, prompts, strict=True)]
        return await self._start_answer(
            body,
            self._answer_builder(CompletionFormat(self.vocabulary), body.model),
            prompts,
            echoes,
            AnswerPlan(body.resolve_constraint()),
        )

    async def start_chat_answer(self, body: ChatRequest) -> RunningAnswer:
        """Start the generation for a request to /v1/chat/completions and return the answer in progress."""
        return await self._start_chat(body, self._answer_builder(ChatFormat(self.vocabulary), body.model))

    async def start_response(self, body: ResponsesRequest) -> RunningAnswer:
        """Start the generation for a request to /v1/responses and return the answer in progress."""
        return await self._start_chat(
            body.to_chat_request(), partial(ResponsesAnswerBuilder, body, body.model or self.name)
        )

    async def _start_chat(
        self, body: ChatRequest, answer_for: Callable[[TokenUsage], AnswerBuilder | ResponsesAnswerBuilder]
    ) -> RunningAnswer:
        """Start the generation of an answer in a chat."""
        self.driver.check_capacity(body.n or 1)
        text = await self._chats.render_prompt(body.messages, body)
        self._check_text_size(text, body)
        prompt = self._truncate_prompt(await self.encode_text(text, special=False), body)
        return await self._start_answer(body, answer_for, [prompt], [None], self._plan_chat_answer(body, text))

    def _plan_chat_answer(self, body: ChatRequest, prompt: str) -> AnswerPlan:
        """Return the grammar and the parser of an answer in a chat with the rendered `prompt`."""
        syntax, specials, schema = self._chats.syntax, self.vocabulary.specials, body.resolve_constraint()
        if body.separate_reasoning is False:
            syntax = replace(syntax, reasoning=None)
        opened = syntax.begins_in_reasoning(prompt)
        tools = [tool.function for tool in body.list_callable_tools()]
        end = syntax.reasoning[1] if opened and syntax.reasoning is not None else None
        grammar = schema
        if body.constrains_calls():
            strict = body.requires_call()
            callable_tools = [
                CallableTool(tool.name, (tool.parameters or NO_ARGUMENTS) if strict or tool.strict else None)
                for tool in tools
            ]
            grammar = build_call_grammar(syntax.format, callable_tools, specials, required=strict, reasoning_end=end)
        elif schema is not None and schema.startswith("{") and (opened or syntax.has_channels):
            grammar = build_answer_grammar(syntax.format, schema, specials, reasoning_end=end)
        elif schema is not None:
            opened = False  # the grammar holds from the first token
        if not tools and syntax.reasoning is None and not syntax.has_channels:
            return AnswerPlan(grammar)
        make_parser = partial(
            AnswerParser, syntax, {tool.name: tool.parameters or {} for tool in tools}, in_reasoning=opened,
            keep_reasoning=body.include_reasoning is not False,
        )  # fmt: skip
        return AnswerPlan(grammar, make_parser, syntax)

    def _answer_builder(self, form: AnswerFormat, model: str | None) -> Callable[[TokenUsage], AnswerBuilder]:
        """Return a function that makes the answer builder for a token usage."""
        return partial(AnswerBuilder, form, model or self.name)

    async def compute_embeddings(self, body: EmbeddingRequest) -> dict[str, Any]:
        """Return the JSON body of the answer to a request to /v1/embeddings."""
        embedder = self.embedder
        if not isinstance(embedder, ServedEmbedder) or body.model in self.adapters:
            message = embedder if isinstance(embedder, str) else NO_EMBEDDINGS
            raise ApiRequestError(400, message, param="model")
        if body.dimensions not in (None, embedder.width):
            message = f"dimensions must be {embedder.width}, the width of the model's vectors; found {body.dimensions}"
            raise ApiRequestError(400, message, param="dimensions")
        try:
            prompt = embedder.default_prompt(body.prompt_name)
        except DataError as error:
            raise ApiRequestError(400, error.message, param="prompt_name") from None
        texts = [await self._encode_for_embedding(embedder, text, prompt) for text in body.list_input_texts()]
        vectors = [
            await self.driver.run_in_engine_thread(partial(embedder, batch, prompt))
            for batch in split_into_batches(texts)
        ]
        tokens_read = sum(map(len, texts))
        self.metrics.record_tokens(tokens_read, 0)
        return format_embeddings(np.concatenate(vectors), body.model or self.name, tokens_read, body.encoding_format)

    async def _encode_for_embedding(self, embedder: ServedEmbedder, text: str | list[int], prompt: str) -> list[int]:
        """Return the tokens of a text to embed."""
        if not text:
            raise ApiRequestError(400, "input must not have an empty text", param="input")
        if isinstance(text, list) and prompt:
            message = f"input must be text, as the model's prompt {prompt!r} is put first; found token ids"
            raise ApiRequestError(400, message, param="input")
        if isinstance(text, str):
            _check_unicode(text)
            text = await to_thread.run_sync(embedder.encode_text, text, prompt, limiter=self._encoders)
        self._check_token_ids(text, "input")
        most = min(self.max_length, embedder.texts.model.config.max_position)
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

    def describe_tokenizer(self) -> dict[str, str | None]:
        """Return the special tokens and the chat template of the model, under the field names of tokenizer_config.json."""
        begin = None if self.tokenizer.bos_id is None else self.vocabulary[self.tokenizer.bos_id].text
        facts = {} if self.template is None else self.template.get_template_config()
        none = {"pad_token": None, "chat_template": None}
        return {**none, "bos_token": begin, "eos_token": self.tokenizer.eos_token, **facts}

    def _check_text_size(self, text: str, body: GenerationRequestBody) -> None:
        """Refuse a text with more bytes than the model's longest prompt can have, before it is encoded."""
        if self._longest is None or body.truncate_prompt_tokens is not None:
            return
        size, most = len(text.encode(errors="replace")), self._longest * self.max_length
        if size > most:
            raise ApiRequestError(
                400,
                f"This model's maximum context length is {self.max_length} tokens, of {most} bytes at most; "
                f"the prompt has {size} bytes.",
                code="context_length_exceeded",
            )

    def _truncate_prompt(self, prompt: list[int], body: GenerationRequestBody) -> list[int]:
        """Return the last `truncate_prompt_tokens` of a prompt; -1 keeps as many as fit with the answer."""
        kept = body.truncate_prompt_tokens
        if kept == -1:
            kept = max(1, self.max_length - (body.get_max_new_tokens() or 1))
        return prompt if kept is None else prompt[-kept:]

    async def _start_answer(
        self,
        body: GenerationRequestBody,
        answer_for: Callable[[TokenUsage], AnswerBuilder | ResponsesAnswerBuilder],
        prompts: Sequence[list[int]],
        echoes: Sequence[EchoedPrompt | None],
        plan: AnswerPlan,
    ) -> RunningAnswer:
        """Submit `n` requests for each prompt to the engine; choice number j of prompt p is p * n + j."""
        choices, alternatives, limits = body.n or 1, body.count_alternatives(), self._make_limits(body)
        sampling = await self._make_sampling(body, limits)
        if plan.syntax is not None:
            limits = self._show_marks(limits, plan.syntax)
        if plan.grammar is not None:
            await self._workers.prepare_grammar(plan.grammar, limits.ends)
        requests = [
            EngineRequest(
                prompt,
                replace(limits, max_new_tokens=self._count_new_tokens(prompt, body.get_max_new_tokens()) or 1),
                sampling,
                sample=choice,
                logprobs=alternatives,
                prompt_logprobs=echo is not None and alternatives is not None,
                grammar=plan.grammar,
                adapter=body.model if body.model in self.adapters else None,
            )
            for prompt, echo in zip(prompts, echoes, strict=True)
            for choice in range(choices)
        ]
        answer = answer_for(TokenUsage(sum(map(len, prompts))))
        group = await self.driver.submit_requests(requests)
        parts = stream_answer_parts(
            group.iterate_events(), [echo for echo in echoes for _ in range(choices)], alternatives is not None,
            echo_only=body.get_max_new_tokens() == 0,
        )  # fmt: skip
        if plan.make_parser is not None and plan.syntax is not None:
            parts = parse_answer_parts(parts, plan.make_parser, plan.syntax.format.make_call_id)
        return RunningAnswer(answer, group, parts, self.driver, self.metrics, self.seconds)

    def _show_marks(self, limits: GenerationLimits, syntax: AnswerSyntax) -> GenerationLimits:
        """Return the limits of an answer whose text has the special tokens that mark calls and reasoning."""
        if not limits.skip_special_tokens:
            return limits
        hidden = frozenset(self.vocabulary.specials.values()) - syntax.list_special_marks(self.vocabulary.specials)
        return replace(limits, skip_special_tokens=False, hidden_tokens=hidden)

    def _make_limits(self, body: GenerationRequestBody) -> GenerationLimits:
        """Return the generation limits of a request; a stop string that is a special token becomes a stop token."""
        strings, tokens = list(body.list_stop_strings()), set(body.stop_token_ids or ())
        if body.skip_special_tokens is not False:  # otherwise special tokens appear in the text and match as strings
            tokens |= {self.vocabulary.specials[stop] for stop in strings if stop in self.vocabulary.specials}
            strings = [stop for stop in strings if stop not in self.vocabulary.specials]
            mixed = [(stop, name) for stop in strings for name in self.vocabulary.specials if name in stop]
            if mixed:
                stop, name = mixed[0]
                message = f"stop mixes the special token {name!r} with other text ({stop!r}); send {name!r} alone"
                raise ApiRequestError(400, message, param="stop")
        self._check_token_ids(body.stop_token_ids or (), "stop_token_ids")
        least, most = body.min_tokens or 0, body.get_max_new_tokens()
        if most is not None and least > most:
            raise ApiRequestError(
                400, f"min_tokens ({least}) must be at most the maximum of {most} tokens", param="min_tokens"
            )
        return GenerationLimits(
            stop=strings,
            ends=() if body.ignore_eos else self.ends,
            stop_tokens=frozenset(tokens),
            min_new_tokens=least,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
        )

    async def _make_sampling(self, body: GenerationRequestBody, limits: GenerationLimits) -> Sampling:
        """Return the sampling settings; a field of the request overrides the setting of the model's own files."""
        self._check_token_ids([int(token) for token in body.logit_bias or ()], "logit_bias")
        self._check_token_ids(body.allowed_token_ids or (), "allowed_token_ids")
        ends = {*limits.ends, *limits.stop_tokens}
        if body.min_tokens and body.allowed_token_ids and ends.issuperset(body.allowed_token_ids):
            message = "min_tokens requires an allowed token that does not end the text; allowed_token_ids has none"
            raise ApiRequestError(400, message, param="allowed_token_ids")
        own: dict[str, Any] = {**self.default_sampling, "min_length_ends": sorted(ends)}
        if body.min_tokens is not None:
            own |= {"min_new_tokens": body.min_tokens, "min_length": 0}
        if body.bad_words is not None:
            own["bad_words_ids"] = [tokens for word in body.bad_words for tokens in await self._encode_bad_word(word)]
        return body.resolve_sampling(own)

    async def _encode_bad_word(self, word: str) -> list[list[int]]:
        """Return the token sequences of a word at the start of a text and after a space, as vLLM bans them."""
        at_start, spaced = [await self.encode_text(text, special=False) for text in (word, f" {word.lstrip()}")]
        ban_both = len(at_start) == len(spaced) and at_start[:1] != spaced[:1]
        return [tokens for tokens in ([at_start, spaced] if ban_both else [at_start]) if tokens]

    def _check_token_ids(self, tokens: Collection[int], field: str) -> None:
        """Refuse tokens outside the vocabulary."""
        largest = max(tokens, default=0)
        if largest >= self.vocab_size:
            message = f"{field} has token {largest}, which is outside the model's vocabulary of {self.vocab_size}"
            raise ApiRequestError(400, message, param=field)

    def _count_new_tokens(self, prompt: Sequence[int], requested: int | None) -> int:
        """Return the maximum number of tokens that may follow a prompt; 0 if 0 were requested."""
        available = self.max_length - len(prompt)
        if available < (requested != 0) or (requested or 0) > available:
            more = f" and {requested} new ones" if requested and available > 0 else ""
            raise ApiRequestError(
                400,
                f"This model's maximum context length is {self.max_length} tokens; the prompt has {len(prompt)}{more}.",
                code="context_length_exceeded",
            )
        return available if requested is None else requested


def _check_unicode(text: str) -> None:
    """Refuse a text with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiRequestError(400, "a text must not have lone surrogates, which are half characters") from None
