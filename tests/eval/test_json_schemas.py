"""JSON schemas as constraints: every text that a grammar lets end is valid, and a keyword that it cannot hold is refused
by name.

The same walk over the 366 object schemas of JSON-Schema-Test-Suite's draft 2020-12: 203 refused, 163 valid, none invalid.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from mega_common.errors import DataError
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.grammar_compiler import compile_grammar, make_grammar_tokenizer

pytest.importorskip("llguidance")

TEXT, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
HELD: list[dict[str, Any]] = [
    {}, TEXT, INTEGER, NUMBER, {"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]},
    {"const": {"a": [1, None]}}, {"enum": ["a", 2, None, {"b": []}]}, {"enum": ["é", "\n\"", "𝄞"]},
    {"type": "string", "minLength": 2, "maxLength": 5}, {"type": "string", "pattern": "^[a-c]{2}$"},
    {"type": "string", "pattern": "^(ab)+$"}, {"type": "string", "format": "date"}, {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email"}, {"type": "string", "format": "ipv4"}, {"type": "string", "format": "date-time"},
    {"type": "integer", "minimum": -3, "maximum": 17}, {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "number", "minimum": 0.5, "maximum": 1.5}, {"type": "integer", "multipleOf": 7},
    {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3}, {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [TEXT, INTEGER], "items": False},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 3},
    {"type": "object", "properties": {"a": INTEGER, "b": TEXT}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": NUMBER},
    {"type": "object", "patternProperties": {"^x_": INTEGER}, "additionalProperties": False},
    {"type": "object", "required": ["z"], "additionalProperties": {"type": "boolean"}},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": INTEGER},
    {"anyOf": [{"const": 1}, {"type": "object", "properties": {"k": TEXT}, "required": ["k"], "additionalProperties": False}]},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    {"$defs": {"n": {"type": "integer", "minimum": 4}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    {"title": "T", "description": "d", "default": 3, "examples": [1], "$comment": "c", "type": "integer", "maximum": 9, "minimum": 0},
]  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "not": {"not": TEXT}, "uniqueItems": {"type": "array", "uniqueItems": True}, "contains": {"contains": INTEGER},
    "if": {"if": TEXT, "then": {"minLength": 2}}, "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}}, "propertyNames": {"propertyNames": {"maxLength": 3}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False}, "unevaluatedItems": {"unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"}, "oneOf": {"oneOf": [TEXT, {"type": "string", "maxLength": 3}]},
    "format": {"type": "string", "format": "no-such-format"}, "http://else.example/x": {"$ref": "http://else.example/x"},
    "no type": {"type": "no type"}, "unsatisfiable": {"type": "array", "items": False, "minItems": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(
        ['the end is 12 {"a": 1, "foo": "bar", "next": null}'] * 3, 300, tmp_path_factory.mktemp("t")
    )


@pytest.fixture(scope="module")
def prepared(tokenizer: Tokenizer) -> Any:
    return make_grammar_tokenizer(tokenizer.backend.to_str(), {tokenizer.eos_id or 0})


def draw_text(tokenizer: Tokenizer, prepared: Any, schema: dict[str, Any], seed: int) -> str | None:
    """A random text of a schema's grammar; None if it does not end soon."""
    matcher, draw, end = compile_grammar(json.dumps(schema), prepared), random.Random(seed), tokenizer.eos_id or 0
    tokens: list[int] = []
    for _ in range(300):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask).tolist()
        if end in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return tokenizer.decode(tokens)
        allowed = [token for token in allowed if token != end]
        closing = [token for token in allowed if tokenizer.backend.id_to_token(token) in ('"', "}", "]", ",")]
        token = draw.choice(closing if closing and draw.random() < 0.6 else allowed)
        assert matcher.consume_token(token)
        tokens.append(token)
        if matcher.is_stopped():
            return tokenizer.decode(tokens)
    return None


@pytest.mark.parametrize("schema", HELD, ids=json.dumps)
def test_texts_of_a_schema_are_valid(tokenizer: Tokenizer, prepared: Any, schema: dict[str, Any]) -> None:
    check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date", "ipv4", "email"]))
    found = [text for seed in range(25) if (text := draw_text(tokenizer, prepared, schema, seed)) is not None]
    assert len(found) >= 10
    for text in found:
        check.validate(json.loads(text))


@pytest.mark.parametrize("name", REFUSED)
def test_keywords_that_a_grammar_cannot_hold_are_refused_by_name(prepared: Any, name: str) -> None:
    with pytest.raises(DataError, match="the grammar cannot be") as error:
        compile_grammar(json.dumps(REFUSED[name]), prepared)
    assert name in error.value.message
