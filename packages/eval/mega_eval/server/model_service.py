"""Service of one model: encodes prompts, submits requests to the engine and formats its events as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from anyio import CapacityLimiter, to_thread

from mega_common.errors import ConfigError, DataError
from mega_common.extension_entries import Sampler
from mega_common.vision_config import VisionConfig
from mega_data.chat.chat_template import ChatTemplate
from mega_data.tokenizer import Tokenizer
from mega_eval.engine_requests import EngineRequest
from mega_eval.image_prompts import assemble_image_prompt
from mega_eval.sampling import Sampling
from mega_eval.server.answer_formats import (
    AnswerFormat,
    AnswerWriter,
    ChatAnswerFormat,
    CompletionAnswerBuilder,
    CompletionAnswerFormat,
    EchoedPrompt,
    TokenUsage,
    stream_answer_parts,
)
from mega_eval.server.answer_parser import ModelOutputSyntax, parse_reasoning_and_tool_calls
from mega_eval.server.api_errors import ApiRequestError, reject_lone_surrogates
from mega_eval.server.chat_prompts import AnswerGrammarAndParser, ChatPromptRenderer
from mega_eval.server.embeddings_api import (
    EmbeddingRequest,
    ServedEmbedder,
    Vectors,
    encode_embedding_input,
    format_embeddings,
    split_into_token_batches,
)
from mega_eval.server.engine_driver import EngineDriver
from mega_eval.server.messages_api import CountTokensRequest, MessagesAnswerBuilder, MessagesRequest
from mega_eval.server.request_schemas import (
    ChatMessage,
    ChatRequest,
    ChatTemplateFields,
    CompletionRequest,
    GenerationRequestBody,
)
from mega_eval.server.rerank_api import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    RerankRequest,
    format_rerank_response,
    select_prompt_name,
)
from mega_eval.server.responses_api import ResponsesAnswerBuilder, ResponsesRequest
from mega_eval.server.running_answer import RunningAnswer
from mega_eval.server.server_metrics import ServerMetrics
from mega_eval.server.token_spelling import Vocabulary, find_max_token_bytes
from mega_eval.server.worker_processes import WorkerProcesses
from mega_eval.text_stream import GenerationLimits
from mega_trainer.data.batch_images import BatchImages

NO_EMBEDDINGS = "embeddings are supported for a decoder on one rank, without an adapter"


@dataclass
class ModelService:
    """Model that the HTTP server offers, with its tokenizer, chat template and inference engine.

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
        vision: settings of the vision encoder, if the model takes images.
        source: folder of the model, for adapters that are loaded later; None: `name`.
        samplers: samplers of extensions that a request may name.
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
    source: str | None = None
    vision: VisionConfig | None = None
    samplers: Mapping[str, Sampler] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self._adapter_keys: dict[str, str] = {}
        self._loads = 1
        self.vocabulary = Vocabulary(self.tokenizer)
        # encoding takes a hundred times the memory of the text, so few texts at once; threads keep the event loop free
        self._encoders = CapacityLimiter(2)
        self._workers = WorkerProcesses(getattr(self.driver.engine, "grammars", None))
        self._longest = find_max_token_bytes(self.tokenizer)
        syntax = ModelOutputSyntax() if self.template is None else ModelOutputSyntax.detect(self.template.source)
        self._chats = ChatPromptRenderer(self.template, syntax, self._workers)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter between two steps of the engine, for requests that name it as their model.

        Raises:
            CheckpointError: when it is not an adapter of the model.
            ConfigError: when the engine cannot load adapters.
        """
        # a new key each time, since the cache shares keys and values of one key
        key = f"{name}@{self._loads}"
        self._loads += 1
        await self.driver.run_in_engine_thread(
            partial(self.driver.engine.load_adapter, key, self.source or self.name, folder)
        )
        self._adapter_keys[name] = key
        self.adapters = {**self.adapters, name: folder}

    async def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter between two steps of the engine.

        Raises:
            DataError: when requests use it.
        """
        key = self._adapter_keys.get(name, name)
        await self.driver.run_in_engine_thread(partial(self.driver.engine.unload_adapter, key))
        self._adapter_keys.pop(name, None)
        self.adapters = {other: folder for other, folder in self.adapters.items() if other != name}

    async def encode_text(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer puts around it if `special`."""

        def encode_in_thread() -> list[int]:
            # `encode_batch`, unlike `encode`, releases the GIL
            ids: list[int] = self.tokenizer.backend.encode_batch([text], add_special_tokens=special)[0].ids
            return ids

        reject_lone_surrogates(text)
        return await to_thread.run_sync(encode_in_thread, limiter=self._encoders)

    async def decode_tokens(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        largest = max(tokens, default=0)
        if largest >= self.vocab_size:
            raise ApiRequestError(400, f"token {largest} is outside the model's vocabulary of {self.vocab_size}")
        return await to_thread.run_sync(self.tokenizer.decode, tokens, limiter=self._encoders)

    def get_vocabulary_entries(self, tokens: Sequence[int]) -> list[str | None]:
        """Return the tokenizer's vocabulary entry of each token id, such as `Ġthe`; None for an unknown id."""
        return [self.tokenizer.backend.id_to_token(token) for token in tokens]

    async def encode_chat_prompt(self, messages: Sequence[ChatMessage], body: ChatTemplateFields) -> list[int]:
        """Return the token ids of a conversation rendered by the chat template, up to the beginning of the answer."""
        pictures = self._list_images(messages)
        text = await self._chats.render_prompt(messages, body)
        return (await self._encode_chat_text(text, pictures))[0]

    def _list_images(self, messages: Sequence[ChatMessage]) -> list[bytes]:
        """Return the image files of a conversation; refuse them if the model takes none."""
        pictures = [picture for message in messages for picture in message.list_images()]
        if pictures and self.vision is None:
            raise ApiRequestError(400, "this model takes no images; send text", param="messages")
        return pictures

    async def _encode_chat_text(self, text: str, pictures: Sequence[bytes]) -> tuple[list[int], BatchImages | None]:
        """Return the token ids of a rendered conversation, and its images without features."""
        if not pictures or self.vision is None:
            return await self.encode_text(text, special=False), None
        reject_lone_surrogates(text)
        prepared = await self._workers.prepare_images(pictures, self.vision)
        assemble = partial(assemble_image_prompt, text, prepared, self.vision, self.tokenizer, special=False)
        return await to_thread.run_sync(assemble, limiter=self._encoders)

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
            self._answer_builder(CompletionAnswerFormat(self.vocabulary), body.model),
            prompts,
            echoes,
            AnswerGrammarAndParser(body.get_grammar_constraint()),
        )

    async def start_chat_answer(self, body: ChatRequest) -> RunningAnswer:
        """Start the generation for a request to /v1/chat/completions and return the answer in progress."""
        return await self._start_chat(body, self._answer_builder(ChatAnswerFormat(self.vocabulary), body.model))

    async def start_response(self, body: ResponsesRequest) -> RunningAnswer:
        """Start the generation for a request to /v1/responses and return the answer in progress."""
        return await self._start_chat(
            body.to_chat_request(), partial(ResponsesAnswerBuilder, body, body.model or self.name)
        )

    async def start_messages_answer(self, body: MessagesRequest) -> RunningAnswer:
        """Start the generation for a request to /v1/messages and return the answer in progress."""
        return await self._start_chat(body.to_chat_request(), partial(MessagesAnswerBuilder, body.model or self.name))

    async def count_message_tokens(self, body: CountTokensRequest) -> int:
        """Return the number of prompt tokens of a conversation in the form of Anthropic's API."""
        chat = body.to_chat_request()
        return len(await self.encode_chat_prompt(chat.messages, chat))

    async def _start_chat(self, body: ChatRequest, answer_for: Callable[[TokenUsage], AnswerWriter]) -> RunningAnswer:
        """Start the generation of an answer in a chat."""
        self.driver.check_capacity(body.n or 1)
        pictures = self._list_images(body.messages)
        text = await self._chats.render_prompt(body.messages, body)
        self._check_text_size(text, body)
        tokens, images = await self._encode_chat_text(text, pictures)
        plan = replace(self._chats.build_grammar_and_parser(body, text, self.vocabulary.specials), images=images)
        return await self._start_answer(body, answer_for, [self._truncate_prompt(tokens, body)], [None], plan)

    def _answer_builder(self, form: AnswerFormat, model: str | None) -> Callable[[TokenUsage], CompletionAnswerBuilder]:
        """Return a function that makes the answer builder for a token usage."""
        return partial(CompletionAnswerBuilder, form, model or self.name)

    async def compute_embeddings(self, body: EmbeddingRequest) -> dict[str, Any]:
        """Return the JSON body of the answer to a request to /v1/embeddings."""
        embedder = self._find_embedder(body.model)
        if body.dimensions not in (None, embedder.width):
            message = f"dimensions must be {embedder.width}, the width of the model's vectors; found {body.dimensions}"
            raise ApiRequestError(400, message, param="dimensions")
        vectors, tokens = await self._embed_texts(embedder, body.list_input_texts(), body.prompt_name)
        return format_embeddings(vectors, body.model or self.name, tokens, body.encoding_format)

    async def rank_documents(self, body: RerankRequest) -> dict[str, Any]:
        """Return the JSON body of the answer to a request to /v1/rerank."""
        embedder = self._find_embedder(body.model)
        query, one = await self._embed_texts(embedder, [body.query], select_prompt_name(embedder, QUERY_PROMPTS))
        name = select_prompt_name(embedder, DOCUMENT_PROMPTS)
        documents, others = await self._embed_texts(embedder, body.list_document_texts(), name)
        return format_rerank_response(body, query, documents, body.model or self.name, one + others)

    def _find_embedder(self, model: str | None) -> ServedEmbedder:
        """Return the embedder for the model name of a request."""
        if isinstance(self.embedder, ServedEmbedder) and model not in self.adapters:
            return self.embedder
        message = self.embedder if isinstance(self.embedder, str) else NO_EMBEDDINGS
        raise ApiRequestError(400, message, param="model")

    async def _embed_texts(
        self, embedder: ServedEmbedder, sources: Sequence[str | list[int]], prompt_name: str | None
    ) -> tuple[Vectors, int]:
        """Return the embeddings of texts [N, P] and their number of tokens."""
        try:
            prompt = embedder.select_prompt(prompt_name)
        except DataError as error:
            raise ApiRequestError(400, error.message, param="prompt_name") from None
        texts = [
            await to_thread.run_sync(
                encode_embedding_input, embedder, one, prompt, self.max_length, limiter=self._encoders
            )
            for one in sources
        ]
        for text in texts:
            self._check_token_ids(text, "input")
        batches = [partial(embedder, batch, prompt) for batch in split_into_token_batches(texts)]
        vectors = [await self.driver.run_in_engine_thread(batch) for batch in batches]
        tokens_read = sum(map(len, texts))
        self.metrics.record_tokens(tokens_read, 0)
        return np.concatenate(vectors), tokens_read

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
        answer_for: Callable[[TokenUsage], AnswerWriter],
        prompts: Sequence[list[int]],
        echoes: Sequence[EchoedPrompt | None],
        plan: AnswerGrammarAndParser,
    ) -> RunningAnswer:
        """Submit `n` requests for each prompt to the engine; choice number j of prompt p is p * n + j."""
        choices, alternatives, limits = body.n or 1, body.count_alternatives(), self._make_limits(body)
        sampling = await self._make_sampling(body, limits)
        if plan.syntax is not None:
            limits = plan.syntax.keep_marker_tokens_in_text(limits, self.vocabulary.specials)
        if plan.grammar is not None:
            try:
                await self._workers.prepare_grammar(plan.grammar, limits.ends)
            except DataError as error:
                field = body.constraint_field
                message = error.message.replace("the grammar", field or "the grammar", 1)
                raise ApiRequestError(400, message, param=field) from None
        counts = [self._count_new_tokens(prompt, body.get_max_new_tokens()) or 1 for prompt in prompts]
        images = plan.images
        if images is not None:
            images = await self.driver.run_in_engine_thread(partial(self.driver.engine.encode_images, images))
        requests = [
            EngineRequest(
                prompt,
                replace(limits, max_new_tokens=count),
                sampling,
                sample=choice,
                logprobs=alternatives,
                prompt_logprobs=echo is not None and alternatives is not None,
                grammar=plan.grammar,
                images=images,
                adapter=self._adapter_keys.get(body.model or "", body.model) if body.model in self.adapters else None,
            )
            for prompt, echo, count in zip(prompts, echoes, counts, strict=True)
            for choice in range(choices)
        ]
        answer = answer_for(TokenUsage(sum(map(len, prompts))))
        group = await self.driver.submit_requests(requests)
        parts = stream_answer_parts(
            group.iterate_events(), [echo for echo in echoes for _ in range(choices)], alternatives is not None,
            echo_only=body.get_max_new_tokens() == 0,
        )  # fmt: skip
        if plan.make_parser is not None and plan.syntax is not None:
            parts = parse_reasoning_and_tool_calls(parts, plan.make_parser, plan.syntax.format.make_call_id)
        return RunningAnswer(answer, group, parts, self.driver, self.metrics, self.seconds)

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
        try:
            return body.resolve_sampling(own).bind_token_sampler(self.samplers)
        except ConfigError as error:
            raise ApiRequestError(400, f"{error.message}; {error.hint}", param="sampler") from None

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
            found = f"the prompt has {len(prompt)} tokens"
            if requested and available > 0:
                found += f" and max_tokens is {requested}; set max_tokens to at most {available}"
            else:
                found += f"; shorten it to at most {self.max_length - (requested != 0)}"
            raise ApiRequestError(
                400,
                f"This model's maximum context length is {self.max_length} tokens; {found}.",
                code="context_length_exceeded",
            )
        return available if requested is None else requested
