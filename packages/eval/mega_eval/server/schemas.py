"""What clients send, in the words of OpenAI's API, with bounds: a body that breaks one is refused before any work.

Fields that are not known change nothing and are named in the log; fields of OpenAI's that would change the answer, and
that this server does not have, are refused.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mega_common.log import logger
from mega_eval.sampling import Sampling
from mega_eval.text import Limits

Token = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TOP = 20  # alternatives that may be asked for with each token

UNSUPPORTED = ("tools", "functions", "logit_bias", "suffix", "audio", "prediction", "web_search_options")


class Body(BaseModel):
    """What all have in common. Types are taken as they are: `"1"` is no number."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    model: Annotated[str | None, Field(description="the served model, as /v1/models names it")] = None

    @model_validator(mode="after")
    def _tell_unknown(self) -> Self:
        extra = self.model_extra or {}
        refused = [name for name in UNSUPPORTED if extra.get(name)]
        if refused:
            raise ValueError(f"{refused[0]!r} is not supported by this server")
        if extra:
            logger.debug("fields without effect: %s", ", ".join(repr(name)[:50] for name in list(extra)[:10]))
        return self


class StreamOptions(BaseModel):
    """What a stream tells besides."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Generation(Body):
    """How to continue a text. `top_k`, `min_p`, `repetition_penalty`, `ignore_eos` and `grammar` are extensions.

    What is left out of the settings of sampling is what the model's generation_config.json says, or else OpenAI's default.
    """

    n: Annotated[int | None, Field(ge=1, le=128)] = 1
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31, description="0 or -1: all")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    stop: Annotated[Stop | Annotated[list[Stop], Field(max_length=16)] | None, Field()] = None
    ignore_eos: bool | None = False
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    grammar: Annotated[str | None, Field(max_length=20_000, description="a JSON schema or a Lark grammar")] = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' wants 'stream': true")
        return self

    def sampling(self, own: Mapping[str, Any]) -> Sampling:
        """How tokens are drawn, by the model's `own` settings where nothing else is said; without a seed by any."""
        names = Sampling.model_fields.keys() & self.model_fields_set - (self.model_extra or {}).keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if given.get("top_k", 1) < 1:
            given["top_k"] = None
        return Sampling(**{"temperature": 1.0, "seed": secrets.randbits(63), **own, **given})

    def limits(self, most: int, ends: Collection[int]) -> Limits:
        """When a text ends: after `most` tokens, at a stop string, or at one of the model's `ends`."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Limits(most, stop, () if self.ignore_eos else ends)

    def new_tokens(self) -> int | None:
        """How many tokens at most; None: as many as the model has room for."""
        raise NotImplementedError

    def alternatives(self) -> int | None:
        """How many to tell with each token; None: no log-probabilities at all."""
        raise NotImplementedError

    def constraint(self) -> str | None:
        """What the text has to obey."""
        return self.grammar


class CompletionRequest(Generation):
    """Body of /v1/completions."""

    prompt: Annotated[str | list[str] | list[Token] | list[list[Token]], Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = 16
    echo: bool | None = False
    logprobs: Annotated[int | None, Field(ge=0, le=TOP)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("'best_of' is not supported by this server")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or tokens."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def new_tokens(self) -> int | None:
        """`max_tokens`."""
        return self.max_tokens

    def alternatives(self) -> int | None:
        """`logprobs`."""
        return self.logprobs


class ContentPart(BaseModel):
    """A part of a message; texts are all that there is here."""

    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a conversation; further fields are for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: one text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class JsonSchema(BaseModel):
    """A schema that the answer has to obey."""

    model_config = ConfigDict(strict=True)
    name: str = ""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    """What form an answer has."""

    model_config = ConfigDict(strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' and type 'json_schema' go together")
        return self

    def grammar(self) -> str | None:
        """As the engine wants it."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.json_schema)
        return '{"type": "object"}' if self.type == "json_object" else None


class ChatRequest(Generation):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=TOP)] = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("'top_logprobs' wants 'logprobs': true")
        if self.grammar and self.response_format:
            raise ValueError("'grammar' and 'response_format' are one too many")
        return self

    def new_tokens(self) -> int | None:
        """`max_completion_tokens`, or `max_tokens` as it was called."""
        return self.max_completion_tokens or self.max_tokens

    def alternatives(self) -> int | None:
        """`top_logprobs`, where `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def constraint(self) -> str | None:
        """`response_format`, or `grammar`."""
        return self.response_format.grammar() if self.response_format else self.grammar


class TokenizeRequest(Body):
    """Body of /tokenize: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of 'prompt' and 'messages' is wanted")
        return self


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    tokens: list[Token]
