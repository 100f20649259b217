"""Constraints on the text of an answer (structured output), in the fields of OpenAI, vLLM and llama.cpp.

All are converted to one string for the engine: a JSON schema or a Lark grammar (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mega_eval.server.request_validation import (
    StrictRequestModel,
    check_at_most_one_field_set,
    make_field_error,
    make_union_validator,
)

JsonObject = dict[str, Any]
SchemaField = Annotated[JsonObject | str, Field(), make_union_validator("a JSON schema, as an object or as text")]
RegexField = Annotated[str, Field(min_length=1, max_length=20_000)]
ChoiceField = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1000)]
GrammarField = Annotated[str, Field(min_length=1, max_length=20_000, description="a Lark or GBNF grammar")]
ANY_OBJECT = '{"type": "object"}'


class StructuredOutputs(StrictRequestModel):
    """Request field `structured_outputs` of vLLM's API: exactly one constraint on the answer."""

    json_schema: Annotated[SchemaField | None, Field(alias="json")] = None
    regex: RegexField | None = None
    choice: ChoiceField | None = None
    grammar: GrammarField | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_count(self) -> Self:
        if len(self._given_fields()) != 1:
            raise make_field_error(
                "'structured_outputs' must have exactly one of json, regex, choice, grammar, json_object"
            )
        return self

    def _given_fields(self) -> list[str]:
        """Return the names of the given fields."""
        return [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]

    def to_engine_grammar(self) -> str:
        """Return the constraint as the JSON schema or Lark grammar that the inference engine takes."""
        if self.json_object:
            return ANY_OBJECT
        return build_engine_grammar(self.json_schema, self.regex, self.choice, self.grammar)


class JsonSchema(StrictRequestModel):
    """Field `json_schema` of `response_format` in OpenAI's API; the schema is always enforced, whatever `strict` is."""

    name: str = ""
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[JsonObject, Field(alias="schema")]


class ResponseFormat(StrictRequestModel):
    """Request field `response_format` of OpenAI's API; with type `json_object` it may also have llama.cpp's `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: Annotated[JsonObject | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise make_field_error(
                "'json_schema' is required with type 'json_schema', and not supported with other types"
            )
        if self.object_schema is not None and self.type != "json_object":
            raise make_field_error("'schema' is supported with type 'json_object' only; use 'json_schema'")
        return self

    def to_engine_grammar(self) -> str | None:
        """Return the response format as the grammar that the inference engine takes, or None for free text.
        The grammar is a JSON schema or Lark grammar.
        """
        if self.json_schema is not None:
            return json.dumps(self.json_schema.json_schema)
        if self.object_schema is not None:
            return json.dumps(self.object_schema)
        return ANY_OBJECT if self.type == "json_object" else None


class ConstrainedRequest(StrictRequestModel):
    """Request fields that constrain the text of the answer: JSON schema, regex, choice or grammar.
    At most one may be given.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaField | None = None
    guided_regex: RegexField | None = None
    guided_choice: ChoiceField | None = None
    guided_grammar: GrammarField | None = None
    grammar: Annotated[str | None, Field(max_length=20_000, description="a JSON schema, a Lark or a GBNF grammar")] = (
        None
    )

    @property
    def constraint_field(self) -> str | None:
        """Name of the field of this request that constrains the text of the answer, or None."""
        return next((name for name in ConstrainedRequest.model_fields if getattr(self, name) not in (None, "")), None)

    @model_validator(mode="after")
    def _check_constraints(self) -> Self:
        fields = ConstrainedRequest.model_fields
        check_at_most_one_field_set(
            [name for name in fields if getattr(self, name) not in (None, "")], ", ".join(fields)
        )
        self.get_grammar_constraint()  # grammars that cannot be translated are refused here
        return self

    def get_grammar_constraint(self) -> str | None:
        """Return the JSON schema or Lark grammar that the answer must follow, or None if the request has no constraint."""
        for bound in (self.response_format, self.structured_outputs):
            if bound is not None:
                return bound.to_engine_grammar()
        if self.grammar and self.grammar.lstrip().startswith("{"):
            return self.grammar
        given = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar or self.grammar or None)
        return build_engine_grammar(*given) if any(one is not None for one in given) else None


def build_engine_grammar(
    schema: JsonObject | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> str:
    """Return the one constraint that is not None as the grammar that the inference engine takes.
    The result is a JSON schema or Lark grammar; a GBNF `grammar` is converted to Lark.
    """
    if schema is not None:
        return _schema_text(schema)
    if regex is not None:
        return f"start: /{_escape_regex(regex)}/"
    if choice is not None:
        return "start: " + " | ".join(json.dumps(one) for one in choice)
    assert grammar is not None
    return _convert_to_lark(grammar)


def _schema_text(schema: JsonObject | str) -> str:
    """Return a JSON schema as text."""
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise make_field_error(f"the JSON schema is not JSON ({error})") from None
    if not isinstance(read, dict):
        raise make_field_error("the JSON schema must be an object")
    return json.dumps(read)


def _escape_regex(regex: str) -> str:
    """Escape characters that would end a regular expression between slashes in Lark."""
    escapes = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
    return re.sub(r"\\.|[/\n\r]", lambda found: escapes.get(found[0], found[0]), regex, flags=re.DOTALL)


def _convert_to_lark(grammar: str) -> str:
    """Return a GBNF grammar (`root ::= ...`, of llama.cpp and XGrammar) as Lark; Lark grammars are returned unchanged."""
    if "::=" not in grammar:
        return grammar
    try:
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError:
        return grammar  # the engine reports the missing package
    try:
        # without blank lines: each of them costs that parser a pass over the rest of the grammar
        return str(any_to_lark(re.sub(r"\n\s*\n", "\n", grammar.strip())))
    except Exception as error:  # noqa: BLE001 - its parser raises several kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise make_field_error(f"the GBNF grammar cannot be read ({reason})") from None
