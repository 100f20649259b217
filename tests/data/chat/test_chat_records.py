from __future__ import annotations

import json
from typing import Any

import pytest

from mega_common.errors import DataError
from mega_data.chat.chat_records import parse_chat_record

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}


def parsed(record: object, *, pairs: bool = False, loss_on: Any = "answers") -> list[Any]:
    return [one.messages for one in parse_chat_record(json.dumps(record), pairs=pairs, loss_on=loss_on)]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [HI, HELLO]},
        {"messages": [HI, {**HELLO, "tool_calls": None}], "conversations": None},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [HI, HELLO], "id": 7},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "response": "Hello", "system": ""},
        {"prompt": [HI], "completion": [HELLO]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                HELLO,
            ]
        },
    ],
)
def test_all_forms_are_the_same_messages(record: dict[str, Any]) -> None:
    assert parsed(record) == [[HI, HELLO]]


def test_a_system_message_beside_stands_first() -> None:
    said = {"role": "system", "content": "Be brief"}
    assert parsed({"prompt": "Hi", "completion": "Hello", "system": "Be brief"}) == [[said, HI, HELLO]]
    assert parsed({"conversations": [HI, HELLO], "system": "Be brief"}) == [[said, HI, HELLO]]


def test_tools_and_their_arguments_become_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    record = {"messages": [HI, {"role": "assistant", "tool_calls": [call]}], "tools": '[{"type": "function"}]'}
    (one,) = parse_chat_record(json.dumps(record), pairs=False, loss_on="answers")
    assert one.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert one.tools == [{"type": "function"}]


@pytest.mark.parametrize("functions", [[{"name": "f"}], '[{"name": "f"}]'])
def test_functions_are_tools(functions: Any) -> None:
    (one,) = parse_chat_record(
        json.dumps({"messages": [HI, HELLO], "functions": functions}), pairs=False, loss_on="answers"
    )
    assert one.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("flags", "weight"),
    [
        ({"train": False}, 0), ({"training": False}, 0), ({"loss": False}, 0), ({"loss": True}, 1), ({"weight": 0}, 0),
        ({"train": True, "weight": 0.5}, 0.5), ({"loss": False, "weight": 0}, 0), ({}, 1),
    ],
)  # fmt: skip
def test_flags_of_a_message_are_weights(flags: dict[str, Any], weight: float) -> None:
    raw = {"messages": [{**HI, "loss": False}, {**HELLO, **flags}]}
    (one,) = parse_chat_record(json.dumps(raw), pairs=False, loss_on="answers")
    assert (one.messages, one.weights) == ([HI, HELLO], [0, weight])


def test_calls_of_tools_in_sharegpts_form() -> None:
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}
    ((asked, called, told),) = parsed(
        {"conversations": [{"from": "human", "value": "Hi"}, call, {"from": "observation", "value": "4"}]}
    )
    assert asked == HI
    assert called == {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert told == {"role": "tool", "content": "4"}
    with pytest.raises(DataError, match=r"conversations\[0\].value must be JSON"):
        parsed({"conversations": [{"from": "function_call", "value": "f(1)"}]})


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"prompt": [HI], "chosen": [HELLO], "rejected": [{"role": "assistant", "content": "No"}]},
        {"chosen": [HI, HELLO], "rejected": [HI, {"role": "assistant", "content": "No"}]},
        {"prompt": "Hi", "chosen": [HI, HELLO], "rejected": [HI, {"role": "assistant", "content": "No"}]},
        {"prompt": [HI], "chosen": [HI, HELLO], "rejected": [HI, {"role": "assistant", "content": "No"}]},
        {"prompt": "Hi", "chosen": [HELLO], "rejected": [{"role": "assistant", "content": "No"}]},
    ],
)
def test_pairs_weigh_what_they_do_not_share(record: dict[str, Any]) -> None:
    chosen, rejected = parse_chat_record(json.dumps(record), pairs=True, loss_on="answers")
    assert chosen.messages == [HI, HELLO]
    assert rejected.messages == [HI, {"role": "assistant", "content": "No"}]
    assert chosen.weights == rejected.weights == [0, 1]


def test_answers_that_a_pair_shares_do_not_count() -> None:
    chosen, _ = parse_chat_record(
        json.dumps({"chosen": [HI, HELLO, HI, HELLO], "rejected": [HI, HELLO, HI, {**HELLO, "content": "No"}]}),
        pairs=True,
        loss_on="answers",
    )
    assert chosen.weights == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("record", "pairs", "said"),
    [
        ([], False, "not an object"),
        ({"text": "a"}, False, "the keys text form no supported conversation"),
        ({"messages": []}, False, "'messages' must be a list of messages, found an empty list"),
        ({"messages": ["Hi"]}, False, r"messages\[0\] is a text, not an object"),
        ({"messages": [{"content": "Hi"}]}, False, r"messages\[0\] has no 'role'"),
        ({"messages": [{"role": "user"}]}, False, r"messages\[0\] has no 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, False, "only text is supported"),
        ({"conversations": [{"from": "bing", "value": "Hi"}]}, False, r"conversations\[0\].from = 'bing'"),
        ({"messages": [HI, {**HELLO, "weight": "much"}]}, False, "weight must be a number of at least 0, not 'much'"),
        ({"messages": [HI, {**HELLO, "weight": -1}]}, False, "weight must be a number of at least 0, not -1"),
        ({"messages": [HI, HELLO], "tools": "no"}, False, "'tools' is not JSON"),
        (
            {"messages": [HI, HELLO], "chat_template_kwargs": 3},
            False,
            "'chat_template_kwargs' must be an object, found a number",
        ),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, False, "--kind pairs"),
        ({"messages": [HI, HELLO], "images": ["a.png"]}, False, "the key 'images' is not supported in text"),
        ({"conversations": [HI, HELLO], "image": "a.png"}, False, "the key 'image' is not supported in text"),
        (
            {"prompt": "Hi", "chosen": "a", "rejected": "b", "images": [{"path": "a"}]},
            True,
            "the key 'images' is not supported",
        ),
        ({"messages": [HI, HELLO], "videos": ["a.mp4"]}, False, "the key 'videos' is not supported in text"),
        ({"messages": [HI, HELLO], "audios": ["a.wav"]}, False, "the key 'audios' is not supported in text"),
        ({"messages": [HI, HELLO], "functions": "no"}, False, "'functions' is not JSON"),
        ({"messages": [HI, HELLO], "functions": [{"name": "f"}], "tools": [{"name": "g"}]}, False, "both given"),
        ({"messages": [HI, HELLO], "kto_tag": False}, False, "a rejected answer"),
        ({"messages": [HI, HELLO], "kto_tag": False, "label": True}, True, "'label' and 'kto_tag' differ"),
        ({"messages": [{**HI, "loss": True}, HELLO]}, False, "message 0: 'loss' = true requires"),
        (
            {"messages": [HI, {**HELLO, "train": False, "weight": 1}]},
            False,
            "'train' is false, which conflicts with weight = 1",
        ),
        (
            {"messages": [HI, {**HELLO, "training": True, "weight": 0}]},
            False,
            "'training' is true, which conflicts with weight = 0",
        ),
        ({"prompt": "Hi", "response": "a", "history": [["b", "c"]]}, False, "'history' is not supported with 'prompt'"),
        ({"prompt": "Hi", "output": "a", "input": "b"}, False, "'input' is not supported with 'prompt'"),
        ({"prompt": "Hi", "output": "a", "instruction": "b"}, False, "'instruction' is not supported with 'prompt'"),
        ({"instruction": "Hi", "query": "x", "output": "a"}, False, "'query' is not supported with 'instruction'"),
        ({"messages": [HI, HELLO]}, True, "no key 'chosen'"),
        ({"chosen": "a", "rejected": "b"}, True, "require the key 'prompt'"),
    ],
)
def test_what_is_refused(record: object, pairs: bool, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parsed(record, pairs=pairs)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(DataError, match="not JSON"):
        parse_chat_record("Hello", pairs=False, loss_on="answers")


BRIEF = {"role": "system", "content": "Be brief"}
NO = {"role": "assistant", "content": "No"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"instruction": "Hi", "input": "", "output": "Hello"}, [HI, HELLO]),
        ({"instruction": "Hi", "output": "Hello"}, [HI, HELLO]),
        ({"instruction": "Hi", "input": None, "output": "Hello", "text": "### Hi"}, [HI, HELLO]),
        ({"instruction": "Add", "input": "2 + 2", "output": "Hello"}, [{**HI, "content": "Add\n2 + 2"}, HELLO]),
        ({"instruction": "Hi", "output": "Hello", "system": "Be brief"}, [BRIEF, HI, HELLO]),
        ({"instruction": "Hi", "response": "Hello", "context": ""}, [HI, HELLO]),
        ({"instruction": "Hi", "output": "Hello", "response": "Hello", "history": []}, [HI, HELLO]),
        ({"messages": [HI, HELLO], "system": "Be brief"}, [BRIEF, HI, HELLO]),
        ({"messages": [BRIEF, HI, HELLO], "system": "Be brief"}, [BRIEF, HI, HELLO]),
        ({"prompt": "Hi", "completion": "Hello", "label": True}, [HI, HELLO]),
        ({"prompt": "Hi", "completion": "Hello", "label": 3}, [HI, HELLO]),
    ],
)
def test_records_of_alpaca_and_their_like(record: dict[str, Any], messages: list[Any]) -> None:
    assert parsed(record) == [messages]


@pytest.mark.parametrize(
    ("record", "pairs", "said"),
    [
        ({"instruction": "", "output": "a"}, False, "'instruction' not empty"),
        ({"instruction": ["Hi"], "output": "a"}, False, "'instruction' and 'input' must be texts"),
        ({"instruction": "Hi", "input": 3, "output": "a"}, False, "'instruction' and 'input' must be texts"),
        ({"instruction": "Hi", "output": ""}, False, "'output' is empty, and an answer must have a text"),
        ({"instruction": "Hi", "output": 4}, False, "'output' must be a list of messages, found a number"),
        ({"instruction": "Hi", "input": "x"}, False, "form no supported conversation"),
        ({"output": "Hi"}, False, "form no supported conversation"),
        ({"instruction": "Hi", "output": "a", "history": [["b", "c"]]}, False, "'history' is not supported with 'instruction'"),
        ({"instruction": "Hi", "response": "a", "context": "b"}, False, "'context' is not supported with 'instruction'"),
        ({"prompt": "Hi", "completion": "a", "response": "b"}, False, "the answers completion, response differ"),
        ({"prompt": "Hi", "completion": ""}, False, "'completion' is empty"),
        ({"messages": [BRIEF, HI, HELLO], "system": "Be long"}, False, "two system messages that differ"),
        ({"conversations": [{"from": "human"}]}, False, r"conversations\[0\] has no 'value'"),
        ({"prompt": "Hi", "completion": "a", "label": False}, False, "a rejected answer .*--kind pairs"),
        ({"prompt": "Hi", "completion": "a", "label": "good"}, True, "'label' must be true or false, not 'good'"),
        ({"prompt": "Hi", "completion": "a", "label": 1}, True, "must be true or false"),
        ({"prompt": "Hi", "label": True}, True, "form no supported conversation"),
        ({"prompt": "Hi", "completion": "", "label": True}, True, "'completion' is empty"),
        ({"completion": "a", "label": True}, True, "form no supported conversation"),
        ({"messages": [HI], "label": True}, True, "'label' requires an answer"),
        ({"prompt": "Hi", "completion": "a"}, True, "no key 'chosen'"),
    ],
)  # fmt: skip
def test_malformed_records_are_refused(record: dict[str, Any], pairs: bool, said: str) -> None:
    with pytest.raises(DataError, match=f"(?s){said}"):
        parsed(record, pairs=pairs)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": [HI], "completion": [HELLO]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"messages": [HI, HELLO]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ],
)
@pytest.mark.parametrize("key", ["label", "kto_tag"])
@pytest.mark.parametrize("label", [True, False])
def test_a_rated_answer_is_a_pair_that_misses_the_other(record: dict[str, Any], label: bool, key: str) -> None:
    both = parse_chat_record(json.dumps({**record, key: label}), pairs=True, loss_on="answers")
    rated, other = both if label else reversed(both)
    assert (rated.messages, rated.weights, rated.missing) == ([HI, HELLO], [0, 1], False)
    assert (other.messages, other.weights, other.missing) == ([HI], [0], True)


def test_alpacas_prompt_of_a_pair() -> None:
    record = {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "No"}
    assert parsed(record, pairs=True) == [[HI, HELLO], [HI, NO]]
