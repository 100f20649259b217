"""Validation of request bodies with one error sentence for each field, unions included."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, Self, TypeVar

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

from mega_eval.server.fields import refuse_extra

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # the first error ends it: a body may hold a hundred thousand
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def field_error(message: str, field: str | None = None) -> PydanticCustomError:
    """Return the error of a whole sentence; `field` is the one to blame where the location does not say it."""
    return PydanticCustomError("sentence", "{message}", {"message": message, "field": field})


def expecting(expected: str) -> WrapValidator:
    """Return a validator that replaces the errors of all arms of a union with "must be `expected`; found ..."."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            context = {"expected": expected, "found": describe_value(value)}
            raise PydanticCustomError("union", "must be {expected}; found {found}", context) from None

    return WrapValidator(check)


def describe_value(value: Any) -> str:
    """Return a short description of a JSON value: its type, and the value itself where that is short."""
    if isinstance(value, list):
        kinds = sorted({_kind(item) for item in value})
        if not kinds:
            return "an empty list"
        return f"a list of {kinds[0]}" if len(kinds) == 1 else f"a list that mixes {' and '.join(kinds)}"
    if isinstance(value, dict):
        return "an object"
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 60 else f"{shown[:50]}... ({len(value)} characters)"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "booleans"
    if isinstance(value, int | float):
        return "numbers"
    names: dict[type, str] = {str: "texts", list: "lists", dict: "objects"}
    return names.get(type(value), "nulls")


class StrictModel(BaseModel):
    """Part of a request body. Types are exact, and fields that are not known are refused unless they are harmless."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    @model_validator(mode="after")
    def _refuse_extra(self) -> Self:
        refuse_extra(self.model_extra or {}, type(self).model_fields)
        return self


def only_one(given: Collection[str], names: str) -> None:
    """Raise a validation error when more than one of several fields is given."""
    if len(given) > 1:
        raise field_error(f"at most one of {names} is supported in a request; found {' and '.join(sorted(given))}")
