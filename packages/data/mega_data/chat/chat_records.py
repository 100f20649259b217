"""Conversation records in all supported formats, parsed to lists of messages.

    {"messages": [{"role": "user", "content": "Hi"}, ...], "tools": [...]}              OpenAI
    {"conversations": [{"from": "human", "value": "Hi"}, ...], "system": "..."}         ShareGPT
    {"prompt": "Hi", "completion": "Hello"}                                             or `response`; texts or messages
    {"instruction": "Add", "input": "2 + 2", "output": "4"}                             Alpaca; `input` is optional
    {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}                          a pair; texts or messages
    {"prompt": "Hi", "completion": "Hello", "label": true}                              KTO: one rated answer

Pairs and rated answers may have `instruction` and `input` instead of `prompt`; a line feed joins them. A rated answer is
the chosen (`label` true) or the rejected answer of a pair whose other answer is missing; any form of a conversation may
have a label.

In pairs of messages without `prompt`, or with a `prompt` that both repeat, the prompt is their common prefix. `tools`
are JSON schemas, or the JSON text of a list of them; `functions`, the older form, are read as tools. A message of the
assistant may have a `weight` in the loss (OpenAI's 0 or 1, or any), or a flag `train`, `training` or `loss`. Keys of
other conversations, images, videos and sounds are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from mega_common.bounded_parsing import describe_json_type, parse_json_text
from mega_common.errors import DataError
from mega_data.reading.corpus_sources import ABSENT, lookup_record_value

LossOn = Literal["answers", "last", "all"]
Message = dict[str, Any]

SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
ANSWERS = ("completion", "response", "output")
QUERIES, TAGS = ("query", "anchor"), ("tags", "ner_tags", "labels")  # of labeled records
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
FLAGS = ("train", "training", "loss")  # flags of a message for the loss, of ms-swift, XTuner and Axolotl
FORMS = (
    "messages, conversations, prompt with completion or response, instruction with output, chosen with rejected,"
    " prompt with completion and label"
)
_MESSAGE_HINT = """write messages as {"role": "user", "content": TEXT}, with the role assistant for answers"""


@dataclass(frozen=True)
class Conversation:
    """Chat messages with the loss weight of each, tool definitions, and options for the chat template.
    The loss weight is 0 for all messages that are not answers; the template gets `options`.

    `missing` marks a pair without this answer; the messages are then only the prompt.
    """

    messages: list[Message]
    weights: list[float]
    tools: list[Any] | None
    options: dict[str, Any]
    missing: bool = False


def parse_chat_record(
    text: str, *, pairs: bool, loss_on: LossOn, columns: Mapping[str, str] | None = None
) -> list[Conversation]:
    """Return the conversation of the JSON record `text`, or with `pairs` the chosen and the rejected conversation.

    `columns` names the columns of the record by their role; all others are then ignored.

    Raises:
        DataError: if the record has another form.
    """
    record = parse_json_record(text, columns)
    if media := next((key for key in MEDIA if record.get(key)), None):
        raise DataError(
            f"the key {media!r} is not supported in text conversations",
            hint="read images with --images FOLDER, or remove the key",
        )
    record = _normalize_label(record)
    tools, options = _collect_tools(record), record.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise DataError(f"'chat_template_kwargs' must be an object, found {describe_json_type(options)}")
    if pairs and "label" in record and not {"chosen", "rejected"} & record.keys():
        return _parse_rated_answer(record, tools or None, options, loss_on)
    if not pairs and record.get("label") is False:
        raise DataError(
            "a rejected answer ('label' is false) requires --kind pairs", hint="pass --kind pairs, or remove the record"
        )
    lists = _parse_pair(record) if pairs else [(0, _parse_single(record))]
    return [
        Conversation(messages, _parse_weights(messages, first, loss_on), tools or None, options)
        for first, messages in lists
    ]


def parse_json_record(text: str, columns: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the non-null values of the JSON object `text`, by key or with `columns` by role; a DataError for other texts.

    Raises:
        DataError: if the text is not a JSON object, or has no such column.
    """
    try:
        record = parse_json_text(text)
    except ValueError as error:
        raise DataError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"the record is {describe_json_type(record)}, not an object")
    record = select_record_columns(record, columns) if columns else record
    return {key: value for key, value in record.items() if value is not None}


def select_record_columns(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a record by role, from the columns that name them (`a.b`: nested); a DataError if one is missing.

    Raises:
        DataError: if the record has no such column.
    """
    values = {role: lookup_record_value(record, column) for role, column in columns.items()}
    for role, column in columns.items():
        if values[role] is ABSENT:
            raise DataError(f"no column {column!r}, which is mapped to {role!r}; the columns are {', '.join(record)}")
    return values


def detect_record_form(record: Any) -> tuple[str, str | None]:
    """Return a description of a JSON record's form, by its keys, and the dataset kind that reads it, or None.
    A form is for example `messages (OpenAI)`. The kind is `conversations`, `pairs`, `labels`, `token_labels`,
    `groups` or `text`.
    """
    keys = {key for key, value in record.items() if value is not None} if isinstance(record, dict) else set()
    answer = next((key for key in ANSWERS if key in keys), None)
    if {"chosen", "rejected"} <= keys:
        return "chosen and rejected (preference)", "pairs"
    if keys & {"label", "kto_tag"} and (answer or keys & {"messages", "conversations"}):
        return f"{answer or 'messages'} and label (KTO)", "pairs"
    for key, name in (("messages", "OpenAI"), ("conversations", "ShareGPT")):
        if key in keys:
            return f"{key} ({name})", "conversations"
    for key, name in (("prompt", ""), ("instruction", " (Alpaca)")):
        if key in keys and answer:
            return f"{key} and {answer}{name}", "conversations"
    if "tokens" in keys and keys & {*TAGS}:
        return "tokens and tags (token classification)", "token_labels"
    if keys & {*QUERIES} and "positive" in keys:
        return "query and positive (retrieval)", "groups"
    if {"query", "passage", "label"} <= keys:
        return "query, passage and label (reranking)", "labels"
    if "text" in keys:
        return ("text and label (classification)", "labels") if "label" in keys else ("text", "text")
    return f"{', '.join(sorted(keys)) or 'no columns'} (unknown)", None


def _normalize_label(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its label under `label`; LLaMA-Factory names it `kto_tag`."""
    if "kto_tag" not in record:
        return record
    if record.get("label", record["kto_tag"]) != record["kto_tag"]:
        raise DataError("'label' and 'kto_tag' differ", hint="keep one of them")
    return {**record, "label": record["kto_tag"]}


def _collect_tools(record: dict[str, Any]) -> list[Any]:
    """Return the tools of a record; `functions` is OpenAI's older form."""
    tools, functions = _parse_tools(record.get("tools")), _parse_tools(record.get("functions"), "functions")
    if tools and functions:
        raise DataError("'tools' and 'functions' are both given", hint="keep one of them")
    return tools or [{"type": "function", "function": function} for function in functions]


def _parse_rated_answer(
    record: dict[str, Any], tools: list[Any] | None, options: dict[str, Any], loss_on: LossOn
) -> list[Conversation]:
    """Return the pair of an answer rated good or bad, whose other answer is missing."""
    if not isinstance(record["label"], bool):
        raise DataError(f"'label' must be true or false, not {record['label']!r}")
    messages = _parse_single(record)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError("'label' requires an answer, and no message has the role 'assistant'")
    first = answers[-1]
    rated = Conversation(messages, _parse_weights(messages, first, loss_on), tools, options)
    other = Conversation(messages[:first], [0.0] * first, tools, options, missing=True)
    return [rated, other] if record["label"] else [other, rated]


def _parse_single(record: dict[str, Any]) -> list[Message]:
    for key in ("messages", "conversations"):
        if key in record:
            return _prepend_system(record, _parse_messages(record[key], key))
    given = [key for key in ANSWERS if key in record]
    if ("prompt" in record or "instruction" in record) and given:
        if any(record[key] != record[given[0]] for key in given):
            raise DataError(f"the answers {', '.join(given)} differ", hint="keep one of them")
        return [*_parse_prompt(record), *_parse_messages_or_text(record, given[0], "assistant")]
    if "chosen" in record:
        raise DataError("a pair of answers (chosen and rejected) requires --kind pairs", hint="pass --kind pairs")
    raise DataError(
        f"the keys {', '.join(record) or '(none)'} form no supported conversation",
        hint=f"supported are {FORMS}; name other columns, e.g. --map prompt=question --map completion=answer",
    )


def _parse_pair(record: dict[str, Any]) -> list[tuple[int, list[Message]]]:
    """Return the chosen and the rejected conversation, each with the number of messages before the answer."""
    for key in ("chosen", "rejected"):
        if key not in record:
            raise DataError(
                f"no key {key!r}; the keys are {', '.join(record) or 'none'}",
                hint="a pair has the keys prompt, chosen and rejected; for chats with one answer, pass --kind conversations",
            )
    repeats = isinstance(record["chosen"], list) and isinstance(record["rejected"], list) and _repeats_prompt(record)
    if ("prompt" in record or "instruction" in record) and not repeats:
        prompt = _parse_prompt(record)
        both = [prompt + _parse_messages_or_text(record, key, "assistant") for key in ("chosen", "rejected")]
        return [(len(prompt), messages) for messages in both]
    if isinstance(record["chosen"], str) or isinstance(record["rejected"], str):
        raise DataError("'chosen' and 'rejected' as texts require the key 'prompt'")
    chosen, rejected = (_prepend_system(record, _parse_messages(record[key], key)) for key in ("chosen", "rejected"))
    common = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
    return [(common, chosen), (common, rejected)]


def _repeats_prompt(record: dict[str, Any]) -> bool:
    """Return whether both answers of a pair begin with the record's `prompt`, as in UltraFeedback."""
    if "prompt" not in record:
        return False
    prompt = [message for message in _parse_messages_or_text(record, "prompt", "user") if message["role"] != "system"]
    both = [_parse_messages(record[key], key) for key in ("chosen", "rejected")]
    heads = [[message for message in answer if message["role"] != "system"][: len(prompt)] for answer in both]
    return bool(prompt) and all(head == prompt for head in heads)


def _parse_prompt(record: dict[str, Any]) -> list[Message]:
    """Return the messages before an answer, from `prompt` or from Alpaca's `instruction` and `input`."""
    form = "prompt" if "prompt" in record else "instruction"
    for key in ("history", "context", *(("instruction", "input") if form == "prompt" else ("query",))):
        if record.get(key):
            raise DataError(f"{key!r} is not supported with {form!r}", hint="use 'input', or 'messages'")
    if form == "prompt":
        return _prepend_system(record, _parse_messages_or_text(record, "prompt", "user"))
    parts = [record["instruction"], record.get("input", "")]
    if not all(isinstance(part, str) for part in parts) or not parts[0]:
        raise DataError("'instruction' and 'input' must be texts, and 'instruction' not empty")
    return _prepend_system(record, [{"role": "user", "content": "\n".join(part for part in parts if part)}])


def _prepend_system(record: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Return the messages after the record's `system` message, if it has one."""
    if not record.get("system"):
        return messages
    system = _parse_messages_or_text(record, "system", "system")
    if messages[0]["role"] != "system":
        return system + messages
    if messages[0] != system[0]:
        raise DataError("'system' and the first message are two system messages that differ", hint="keep one of them")
    return messages


def _parse_messages_or_text(record: dict[str, Any], key: str, role: str) -> list[Message]:
    """Return the messages under a key, or one message for a text."""
    value = record[key]
    if value == "" and role == "assistant":
        raise DataError(f"{key!r} is empty, and an answer must have a text")
    return [{"role": role, "content": value}] if isinstance(value, str) else _parse_messages(value, key)


def _parse_messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else describe_json_type(value)
        raise DataError(f"{key!r} must be a list of messages, found {found}", hint=_MESSAGE_HINT)
    return [_parse_message(raw, f"{key}[{number}]") for number, raw in enumerate(value)]


def _parse_message(raw: Any, name: str) -> Message:
    """Return one message in OpenAI's form, as templates expect it: no keys without a value, tool arguments as objects."""
    if not isinstance(raw, dict):
        raise DataError(f"{name} is {describe_json_type(raw)}, not an object", hint=_MESSAGE_HINT)
    message = {key: value for key, value in raw.items() if value is not None}
    if "from" in message and "role" not in message:
        message = _convert_sharegpt(message, name)
    if not isinstance(message.get("role"), str):
        raise DataError(f"{name} has no 'role'; its keys are {', '.join(message) or 'none'}", hint=_MESSAGE_HINT)
    if isinstance(message.get("content"), list):
        message["content"] = _join_text_parts(message["content"], name)
    if "content" not in message and not message.get("tool_calls"):
        raise DataError(f"{name} has no 'content'; its keys are {', '.join(message)}", hint=_MESSAGE_HINT)
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_parse_call_arguments(call) for call in message["tool_calls"]]
    return message


def _convert_sharegpt(message: Message, name: str) -> Message:
    if "value" not in message and "content" not in message:
        raise DataError(f"{name} has no 'value'")
    role, value = message.pop("from"), message.pop("value", message.get("content"))
    if role not in SHAREGPT:
        raise DataError(
            f"{name}.from = {role!r}: must be one of {', '.join(SHAREGPT)}",
            hint="rename it: gpt for the model's answers, human for questions",
        )
    content = {"tool_calls": _parse_sharegpt_calls(value, name)} if role == "function_call" else {"content": value}
    return {"role": SHAREGPT[role], **content, **message}


def _parse_sharegpt_calls(value: Any, name: str) -> list[Any]:
    """Return the tool calls that ShareGPT's form stores as JSON text: one or a list, each with a name and arguments."""
    try:
        calls = parse_json_text(value)
    except (ValueError, TypeError) as error:
        raise DataError(f"{name}.value must be JSON for a function_call ({error})") from None
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def _join_text_parts(parts: list[Any], name: str) -> str:
    """Return the text of a message in parts."""
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise DataError(f"{name}.content has a part that is not text; only text is supported")
    return "".join(part["text"] for part in parts)


def _parse_call_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object; OpenAI stores them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": parse_json_text(function["arguments"])}}
    except ValueError:
        return call


def _parse_tools(raw: Any, key: str = "tools") -> list[Any]:
    try:
        tools = parse_json_text(raw) if isinstance(raw, str) and raw else raw or []
    except ValueError as error:
        raise DataError(f"{key!r} is not JSON ({error})") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{key!r} is not a list of JSON schemas")
    return tools


def _parse_weights(messages: Sequence[Message], first: int, loss_on: LossOn) -> list[float]:
    """Return the loss weight of each message, 0 before number `first`, and remove the weights from the messages."""
    weights = [_parse_weight(message, number, first) for number, message in enumerate(messages)]
    if loss_on == "last":
        last = max((number for number, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        weights = [weight if number == last else 0.0 for number, weight in enumerate(weights)]
    return weights


def _parse_weight(message: Message, number: int, first: int) -> float:
    weight = _pop_weight(message, number)
    if message["role"] != "assistant" or number < first:
        return 0.0
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
        raise DataError(f"message {number}: weight must be a number of at least 0, not {weight!r}")
    return float(weight)


def _pop_weight(message: Message, number: int) -> Any:
    """Remove the weight of a message, or the flags that include it in or exclude it from the loss; return the weight.

    Raises:
        DataError: if a flag conflicts with the role or another weight.
    """
    weight = message.pop("weight", None)
    for key in FLAGS:
        if not isinstance(message.get(key), bool):
            continue
        flag = message.pop(key)
        if flag and message["role"] != "assistant":
            raise DataError(f"message {number}: {key!r} = true requires the role 'assistant'")
        if weight is not None and bool(weight) != flag:
            raise DataError(
                f"message {number}: {key!r} is {str(flag).lower()}, which conflicts with weight = {weight!r}",
                hint="keep one of them",
            )
        weight = (weight or 1) if flag else 0
    return weight
