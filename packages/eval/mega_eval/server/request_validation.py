"""Validation of request bodies with one error sentence for each field, unions included.

Fields that the schemas declare are implemented. Every other field is refused with status 400, unless it is harmless or
its value equals the server's behaviour. Unknown fields are refused, as in OpenAI's API: a field may constrain the answer,
and a client could not see that it was ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "request_id", "rid", "priority", "cache_salt", "cache_prompt",
    "spaces_between_special_tokens", "id_slot", "n_keep", "keep_alive", "extra_key", "stream_reasoning",
})  # fmt: skip
"""Fields that do not change the answer: accepted and ignored."""


class RefusedField(NamedTuple):
    """Request field that the server refuses unless its value is harmless.
    The value must be one of the `neutral` values; `fix` is the instruction in the error message.
    """

    neutral: tuple[Any, ...] = ()
    fix: str = "remove it"


_GRAMMAR = "use 'structured_outputs', 'response_format' or 'grammar'"
_MAXIMUM = "use 'max_tokens'"
_SAMPLER = "use 'temperature', 'top_k', 'top_p' or 'min_p'"
_TEMPLATE = "use 'chat_template_kwargs'"
_SCORES = "use 'logprobs', with 'echo' in /v1/completions for the prompt"
_AUDIO = "this server reads text and images, and writes text"
_IMAGES = "send images in the content of messages, as parts of type 'image_url'"

REFUSED: Mapping[str, RefusedField] = {
    # OpenAI
    "functions": RefusedField(([],), "use 'tools'"),
    "function_call": RefusedField(("none", "auto"), "use 'tool_choice'"),
    "suffix": RefusedField(("",), "put the text around the gap into 'prompt' as the model was trained on it"),
    "audio": RefusedField(fix=_AUDIO),
    "modalities": RefusedField((["text"],), _AUDIO),
    "prediction": RefusedField(),
    "web_search_options": RefusedField(),
    "moderation": RefusedField(),
    "verbosity": RefusedField(("medium",)),
    "reasoning_effort": RefusedField(("none",), _TEMPLATE),
    "previous_response_id": RefusedField(fix="send the whole conversation in 'input'"),
    "conversation": RefusedField(fix="send the whole conversation in 'input'"),
    "background": RefusedField((False,)),
    "background_options": RefusedField(({},)),
    "include": RefusedField(([],)),
    "truncation": RefusedField(("disabled",), "shorten the input"),
    "max_tool_calls": RefusedField(fix="remove it"),
    "context_management": RefusedField(([],), "shorten the input"),
    "image": RefusedField(fix=_IMAGES),
    # vLLM
    "use_beam_search": RefusedField((False,), "use sampling or temperature 0"),
    "length_penalty": RefusedField((1, 1.0), "it requires beam search, which is not supported"),
    "early_stopping": RefusedField((False,), "it requires beam search, which is not supported"),
    "prompt_logprobs": RefusedField(fix=_SCORES),
    "documents": RefusedField(([],), _TEMPLATE),
    "chat_template": RefusedField(fix="start the server with --chat-template FILE"),
    "structural_tag": RefusedField(fix=_GRAMMAR),
    "guided_decoding_backend": RefusedField(("auto", "guidance"), "grammars always use llguidance"),
    "guided_whitespace_pattern": RefusedField(fix=_GRAMMAR),
    "logits_processors": RefusedField(([],), "use 'logit_bias', 'bad_words' or 'allowed_token_ids'"),
    "mm_processor_kwargs": RefusedField(({},)),
    "media_io_kwargs": RefusedField(({},)),
    "prompt_embeds": RefusedField(fix="send 'prompt'"),
    "kv_transfer_params": RefusedField(({},)),
    "vllm_xargs": RefusedField(({},)),
    "return_token_ids": RefusedField((False,), "POST the text to /tokenize"),
    "return_tokens_as_token_ids": RefusedField((False,), "POST the text to /tokenize"),
    "thinking_token_budget": RefusedField(fix=_TEMPLATE),
    "truncation_side": RefusedField(("left",), "only the start of a prompt can be cut off"),
    # SGLang
    "regex": RefusedField(fix="use 'structured_outputs': {\"regex\": ...}"),
    "ebnf": RefusedField(fix="use 'structured_outputs': {\"grammar\": ...}"),
    "json_schema": RefusedField(({},), "use 'structured_outputs': {\"json\": ...}"),
    "stop_regex": RefusedField(([],), "use 'stop'"),
    "no_stop_trim": RefusedField((False,), "use 'include_stop_str_in_output'"),
    "lora_path": RefusedField(fix="name the adapter as 'model'"),
    "custom_logit_processor": RefusedField(fix="use 'logit_bias', 'bad_words' or 'allowed_token_ids'"),
    "custom_params": RefusedField(({},)),
    "session_params": RefusedField(({},)),
    "return_hidden_states": RefusedField((False,), "use /v1/embeddings"),
    # llama.cpp and Text Generation Inference
    "n_predict": RefusedField((-1,), _MAXIMUM),
    "max_new_tokens": RefusedField(fix=_MAXIMUM),
    "n_probs": RefusedField((0,), _SCORES),
    "repeat_penalty": RefusedField((1, 1.0), "use 'repetition_penalty'"),
    "repeat_last_n": RefusedField(fix="use 'repetition_penalty', which counts all tokens"),
    "typical_p": RefusedField((1, 1.0), _SAMPLER),
    "tfs_z": RefusedField((1, 1.0), _SAMPLER),
    "top_a": RefusedField((0, 0.0), _SAMPLER),
    "top_n_sigma": RefusedField((-1, -1.0, 0, 0.0), _SAMPLER),
    "min_keep": RefusedField((0, 1), _SAMPLER),
    "mirostat": RefusedField((0,), _SAMPLER),
    "mirostat_tau": RefusedField((5, 5.0), _SAMPLER),
    "mirostat_eta": RefusedField((0.1,), _SAMPLER),
    "dynatemp_range": RefusedField((0, 0.0), _SAMPLER),
    "dynatemp_exponent": RefusedField((1, 1.0), _SAMPLER),
    "xtc_probability": RefusedField((0, 0.0), _SAMPLER),
    "xtc_threshold": RefusedField((0.1,), _SAMPLER),
    "dry_multiplier": RefusedField((0, 0.0), "use 'frequency_penalty' or 'repetition_penalty'"),
    "dry_base": RefusedField((1.75,), "use 'frequency_penalty' or 'repetition_penalty'"),
    "samplers": RefusedField(fix=_SAMPLER),
    "do_sample": RefusedField(fix="use 'temperature', which is 0 for greedy decoding"),
    "watermark": RefusedField((False,)),
    "random_seed": RefusedField(fix="use 'seed'"),
    "lora": RefusedField(([],), "name the adapter as 'model'"),
    "image_data": RefusedField(([],), _IMAGES),
    "images": RefusedField(([],), _IMAGES),
    # Ollama and hosted services
    "options": RefusedField(({},), "send its fields at the top level of the body"),
    "format": RefusedField(("",), "use 'response_format'"),
    "system": RefusedField(("",), "send a message with role 'system'"),
    "think": RefusedField((False,), _TEMPLATE),
    "enable_thinking": RefusedField(fix=_TEMPLATE),
    "thinking": RefusedField(fix=_TEMPLATE),
    "reasoning": RefusedField(({},), _TEMPLATE),
    "models": RefusedField(([],), "name one 'model'"),
    "transforms": RefusedField(([],)),
    "plugins": RefusedField(([],)),
    "safe_prompt": RefusedField((False,), "send a message with role 'system'"),
}  # fmt: skip
"""Fields of other servers, which would change the answer or its form."""


class UnsupportedFieldError(ValueError):
    """Error for a request field that this server does not implement."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def refuse_extra_fields(extra: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `UnsupportedFieldError` for the first undeclared request field that may change the answer.
    Its one-sentence message suggests a fix.

    Args:
        extra: fields that the schema does not declare; a null stands for an absent field.
        known: names of the fields that it declares.
    """
    for name, value in extra.items():
        refused = REFUSED.get(name, RefusedField())
        if value is None or name in HARMLESS or any(_equal_with_type(value, neutral) for neutral in refused.neutral):
            continue
        shown = name[:80]
        if name in REFUSED:
            raise UnsupportedFieldError(shown, f"{shown!r} is not supported by this server; {refused.fix}")
        near = difflib.get_close_matches(shown, known, n=1, cutoff=0.8)
        fix = f"use {near[0]!r}" if near else "remove it"
        raise UnsupportedFieldError(shown, f"{shown!r} is not a known field; {fix}")


def _equal_with_type(value: Any, neutral: Any) -> bool:
    """Return whether two values are equal and of the same type."""
    return type(value) is type(neutral) and bool(value == neutral)


T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # reports the first error only: a list may have 100,000 items
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def make_field_error(message: str, field: str | None = None) -> PydanticCustomError:
    """Return a pydantic validation error whose message is a whole sentence.
    `field` names the wrong field if pydantic's location does not.
    """
    return PydanticCustomError("sentence", "{message}", {"message": message, "field": field})


def make_union_validator(expected: str) -> WrapValidator:
    """Return a pydantic validator that reports one error for a union type.
    It replaces the errors of all members of the union with one: "must be `expected`; found ...".
    """

    def validate_union(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            context = {"expected": expected, "found": describe_value(value)}
            raise PydanticCustomError("union", "must be {expected}; found {found}", context) from None

    return WrapValidator(validate_union)


def describe_value(value: Any) -> str:
    """Return a short description of a JSON value: its type, and the value itself if it is short."""
    if isinstance(value, list):
        kinds = sorted({_describe_type(item) for item in value})
        if not kinds:
            return "an empty list"
        return f"a list of {kinds[0]}" if len(kinds) == 1 else f"a list that mixes {' and '.join(kinds)}"
    if isinstance(value, dict):
        return "an object"
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 60 else f"{shown[:50]}... ({len(value)} characters)"


def _describe_type(value: Any) -> str:
    """Return the plural name of the type of a JSON value."""
    if isinstance(value, bool):
        return "booleans"
    if isinstance(value, int | float):
        return "numbers"
    names: dict[type, str] = {str: "texts", list: "lists", dict: "objects"}
    return names.get(type(value), "nulls")


class StrictRequestModel(BaseModel):
    """Base class of request bodies and their parts, with strict types.
    Values must have exact types, and unknown fields are refused unless they are harmless.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    @model_validator(mode="after")
    def _refuse_extra(self) -> Self:
        refuse_extra_fields(self.model_extra or {}, type(self).model_fields)
        return self


def check_at_most_one_field_set(given: Collection[str], names: str) -> None:
    """Raise a validation error if a request has set more than one of several fields.
    `given` are the names of the fields that it has set; `names` lists all of them for the message.
    """
    if len(given) > 1:
        raise make_field_error(f"at most one of {names} is supported in a request; found {' and '.join(sorted(given))}")
