"""Request bodies in the form of OpenAI's API, with bounds: a body out of bounds is refused before any work.

Fields of vLLM are extensions. `request_validation` ignores or refuses fields that are not declared here.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from mega_eval.sampling import Sampling
from mega_eval.server.chat_tools import ChatTool, NamedToolChoice, ToolChoice, decode_tool_call_arguments
from mega_eval.server.output_constraints import ConstrainedRequest
from mega_eval.server.request_validation import (
    Many,
    StrictRequestModel,
    TokenId,
    make_field_error,
    make_union_validator,
)

StopText = Annotated[str, Field(min_length=1, max_length=1000)]
StopField = Annotated[
    StopText | Annotated[Many[StopText], Field(max_length=16)],
    Field(),
    make_union_validator("a text or a list of at most 16 texts, each of 1 to 1000 characters"),
]
PromptField = Annotated[
    str | Many[str] | Many[TokenId] | Many[Many[TokenId]],
    Field(min_length=1),
    make_union_validator("a text, a list of texts, a list of token ids or a list of lists of token ids, and not empty"),
]
TokenIds = Annotated[Many[TokenId], Field(max_length=100_000)]
RESERVED_OPTIONS = frozenset({
    "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "return_assistant_tokens_mask",
})  # fmt: skip
MAX_IMAGES = 16  # of one conversation
MAX_ALTERNATIVES = 20  # `top_logprobs` of OpenAI's API


class RequestBody(StrictRequestModel):
    """Request fields that every endpoint has: the name of the model."""

    model: Annotated[str | None, Field(description="the served model, as /v1/models names it")] = None


class StreamOptions(StrictRequestModel):
    """Request field `stream_options`: report of token usage in the chunks of a streamed answer."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Annotated[bool | None, Field(description="no effect: chunks are never padded")] = None


class GenerationRequestBody(RequestBody, ConstrainedRequest):
    """Request fields that /v1/completions and /v1/chat/completions share: sampling, and conditions that end the text.

    Absent sampling settings default to the model's generation_config.json, or else to OpenAI's defaults.
    """

    n: Annotated[int | None, Field(ge=1, le=128)] = 1
    best_of: Annotated[int | None, Field(ge=1, description="must be n")] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31, description="0 or -1: all")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(max_length=1024, description="added to the scores of token ids"),
    ] = None
    allowed_token_ids: Annotated[TokenIds | None, Field(min_length=1)] = None
    bad_words: Annotated[Many[StopText] | None, Field(max_length=128)] = None
    sampler: Annotated[str | None, Field(max_length=100, description="sampler of an extension of the server")] = None
    sampler_options: Annotated[dict[str, Any] | None, Field(max_length=100, description="settings of `sampler`")] = None
    no_repeat_ngram_size: Annotated[int | None, Field(ge=0, lt=2**31, description="0: no restriction")] = None
    min_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    stop: StopField | None = None
    stop_token_ids: Annotated[TokenIds | None, Field(max_length=128)] = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    truncate_prompt_tokens: Annotated[
        int | None, Field(ge=-1, lt=2**31, description="keep the last tokens of a prompt; -1: as many as fit")
    ] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name in value or {}:
            if not re.fullmatch(r"[0-9]{1,9}", name):
                raise make_field_error(f"must have token ids as keys; found {name[:50]!r}")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncation(cls, value: int | None) -> int | None:
        if value == 0:
            raise make_field_error("must be -1 or at least 1; found 0")
        return value

    @model_validator(mode="after")
    def _check_generation(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise make_field_error("'stream_options' requires 'stream': true", "stream_options")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise make_field_error("'best_of' must be equal to 'n'; remove it", "best_of")
        if self.allowed_token_ids and self.bad_words:
            raise make_field_error(
                "'bad_words' is not supported with 'allowed_token_ids'; use one of them", "bad_words"
            )
        rules = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")
        if self.is_constrained() and (found := [name for name in rules if getattr(self, name)]):
            raise make_field_error(
                f"{found[0]!r} is not supported with a grammar, a response format, a required or strict tool call, or "
                "'parallel_tool_calls': false",
                found[0],
            )
        return self

    def is_constrained(self) -> bool:
        """Return whether the answer must follow a grammar."""
        return self.get_grammar_constraint() is not None

    def resolve_sampling(self, own: Mapping[str, Any]) -> Sampling:
        """Return the sampling settings of the request, with the model's settings for absent fields.
        `own` are the model's settings; an absent seed is random.
        """
        names = Sampling.model_fields.keys() & self.model_fields_set
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if given.get("top_k", 1) < 1:
            given["top_k"] = None
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        return Sampling(**{"temperature": 1.0, "seed": secrets.randbits(63), **own, **given})

    def list_stop_strings(self) -> tuple[str, ...]:
        """Return the request's stop strings, at which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def get_max_new_tokens(self) -> int | None:
        """Return the maximum number of tokens to generate by this request; None: the rest of the context."""
        raise NotImplementedError

    def count_alternatives(self) -> int | None:
        """Return the number of likely alternatives to report with each token's log-probability; None: report nothing."""
        raise NotImplementedError


class CompletionRequest(GenerationRequestBody):
    """Body of a request to /v1/completions."""

    prompt: PromptField
    max_tokens: Annotated[int | None, Field(ge=0, lt=2**31, description="0 with `echo` only")] = 16
    echo: bool | None = False
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_ALTERNATIVES)] = None
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _reject_messages(cls, body: Any) -> Any:
        if isinstance(body, dict) and "messages" in body and "prompt" not in body:
            raise make_field_error(
                "'messages' belongs to /v1/chat/completions; this path requires 'prompt'", "messages"
            )
        return body

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise make_field_error("'max_tokens' must be at least 1, or 0 with 'echo': true", "max_tokens")
        return self

    def list_prompts(self) -> list[str | list[int]]:
        """Return each prompt of the request, as text or as token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def get_max_new_tokens(self) -> int | None:
        """Return the request's `max_tokens`: the maximum number of tokens to generate."""
        return self.max_tokens

    def count_alternatives(self) -> int | None:
        """Return the request's `logprobs`: the number of likely alternatives to report per token; None: report nothing."""
        return self.logprobs


class ContentPart(StrictRequestModel):
    """Part in the content of a chat message: text, or an image as a data: URL."""

    model_config = ConfigDict(extra="ignore", strict=True)  # ignores fields such as `cache_control` and `annotations`
    type: str
    text: str = ""
    image: bytes | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise make_field_error("must be an object with 'type' and 'text'")
        if kind in ("image_url", "input_image"):
            address = value.get("image_url")
            return {
                "type": kind,
                "image": decode_data_url(address.get("url") if isinstance(address, dict) else address),
            }
        if kind not in ("text", "input_text", "output_text"):
            raise make_field_error(
                f"has type {kind[:50]!r}, which is not supported; send parts of type 'text' or 'image_url'"
            )
        if not isinstance(value.get("text"), str):
            raise make_field_error("must have its text in 'text'")
        return {"type": kind, "text": value["text"]}


def decode_data_url(address: Any) -> bytes:
    """Return the bytes of an image in a data: URL; other addresses are refused, as the server fetches nothing."""
    found = re.match(r"data:image/[\w.+-]{1,50};base64,", address) if isinstance(address, str) else None
    if found is None:
        raise make_field_error("must have an image as 'data:image/...;base64,...'; this server fetches no addresses")
    try:
        return base64.b64decode(address[found.end() :], validate=True)
    except ValueError:
        raise make_field_error("has an image that is not base64") from None


ContentField = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Many[ContentPart], Tag("[parts]")],
    Discriminator(
        lambda value: {str: "[text]", list: "[parts]"}.get(type(value)),
        custom_error_type="union",
        custom_error_message="must be a text or a list of parts of type 'text' or 'image_url'",
    ),
]


class ChatMessage(StrictRequestModel):
    """Message of a conversation; extra fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ContentField | None = None

    @model_validator(mode="after")
    def _refuse_extra(self) -> Self:
        for name in ("prefix", "partial"):
            if (self.model_extra or {}).get(name):
                raise make_field_error(f"{name!r} is not supported in a message; use 'continue_final_message'")
        return self

    def to_template_message(self) -> dict[str, Any]:
        """Return the message for chat templates: its text parts joined unless it has images, call arguments parsed from JSON."""
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        content: Any = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        if self.list_images():
            content = [
                {"type": "text", "text": part.text} if part.image is None else {"type": "image"} for part in parts
            ]
        return decode_tool_call_arguments({**(self.model_extra or {}), "role": self.role, "content": content})

    def list_images(self) -> list[bytes]:
        """Return the image files in the message's content."""
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        return [part.image for part in parts if part.image is not None]


class ChatTemplateFields(StrictRequestModel):
    """Request fields that control the rendering of the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Annotated[bool | None, Field(description="default: not `continue_final_message`")] = None
    continue_final_message: bool | None = False

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_options(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in sorted(RESERVED_OPTIONS & (value or {}).keys()):
            raise make_field_error(f"must not have {name!r}; send it as a field of the request")
        return value

    @model_validator(mode="after")
    def _check_ending(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise make_field_error(
                "'continue_final_message' is not supported with 'add_generation_prompt': true; set one of them",
                "continue_final_message",
            )
        return self


class ChatRequest(GenerationRequestBody, ChatTemplateFields):
    """Body of a request to /v1/chat/completions."""

    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_ALTERNATIVES)] = None
    tools: Annotated[list[ChatTool] | None, Field(max_length=128)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: at most one call; null: as the model writes them")
    ] = None
    include_reasoning: Annotated[bool | None, Field(description="false: leave reasoning out of the answer")] = True
    separate_reasoning: Annotated[bool | None, Field(description="false: keep reasoning in the content")] = True
    echo: Annotated[Literal[False] | None, Field(description="of /v1/completions only")] = None
    add_special_tokens: Annotated[Literal[False] | None, Field(description="the chat template adds them")] = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if sum(len(message.list_images()) for message in self.messages) > MAX_IMAGES:
            raise make_field_error(f"'messages' must have at most {MAX_IMAGES} images", "messages")
        if self.truncate_prompt_tokens is not None and any(message.list_images() for message in self.messages):
            raise make_field_error("'truncate_prompt_tokens' is not supported with images", "truncate_prompt_tokens")
        if self.top_logprobs and not self.logprobs:
            raise make_field_error("'top_logprobs' requires 'logprobs': true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise make_field_error(
                f"'tool_choice' must name one of the tools; found {choice.function.name[:64]!r}", "tool_choice"
            )
        if choice == "required" and not names:
            raise make_field_error("'tool_choice': \"required\" requires 'tools'", "tool_choice")
        if self.list_callable_tools() and self.get_grammar_constraint() is not None:
            raise make_field_error("'tools' are not supported with a grammar or a response format; remove one", "tools")
        return self

    def list_callable_tools(self) -> list[ChatTool]:
        """Return the tools that the answer may call by the request's `tool_choice`: one, all or none."""
        if isinstance(self.tool_choice, NamedToolChoice):
            chosen = self.tool_choice.function.name
            return [tool for tool in self.tools or () if tool.function.name == chosen]
        return [] if self.tool_choice == "none" else list(self.tools or ())

    def requires_tool_call(self) -> bool:
        """Return whether the answer must be a tool call by the request's `tool_choice`."""
        return self.tool_choice not in (None, "none", "auto") and bool(self.tools)

    def constrains_tool_calls(self) -> bool:
        """Return whether tool calls must follow a grammar: one is required or at most one allowed, or a tool is strict."""
        tools = self.list_callable_tools()
        single = self.parallel_tool_calls is False and bool(tools)
        return single or self.requires_tool_call() or any(tool.function.strict for tool in tools)

    def is_constrained(self) -> bool:
        """Return whether the answer, or a tool call in it, must follow a grammar."""
        return self.constrains_tool_calls() or super().is_constrained()

    def get_max_new_tokens(self) -> int | None:
        """Return the maximum number of tokens to generate: `max_completion_tokens`, or its older name `max_tokens`."""
        return self.max_completion_tokens or self.max_tokens

    def count_alternatives(self) -> int | None:
        """Return `top_logprobs`, the number of likely alternatives to report per token, or None if `logprobs` is false."""
        return (self.top_logprobs or 0) if self.logprobs else None


def make_chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the chat request with these `fields`, converted from another API's; a RequestValidationError if not valid.

    Raises:
        RequestValidationError: as for a request to /v1/chat/completions.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


class TokenizeRequest(RequestBody, ChatTemplateFields):
    """Body of a request to /tokenize: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[Many[ChatMessage] | None, Field(min_length=1)] = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise make_field_error("exactly one of 'prompt' and 'messages' is required")
        return self


class DetokenizeRequest(RequestBody):
    """Body of a request to /detokenize: token ids."""

    tokens: Many[TokenId]
