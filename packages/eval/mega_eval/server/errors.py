"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}` with a status."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from mega_common.errors import MegaError
from mega_eval.server.validation import describe_value

CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "server_busy", 503: "unavailable", 504: "timeout"}


class Refusal(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: of HTTP.
        message: what is wrong.
        param: the field that is to blame.
        code: a word for programs.
        retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after
        self.code = code or CODES.get(status)

    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer to send."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        # a message may quote half a character, which UTF-8 cannot spell and JSON's escapes can
        return Response(json.dumps(self.body()), self.status, headers, media_type="application/json")


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


def refusal_of(error: Exception) -> Refusal:
    """Any error as a client sees it; of our own mistakes it learns nothing."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, StarletteHTTPException):
        return Refusal(400 if error.status_code == 422 else error.status_code, str(error.detail))
    if isinstance(error, MegaError):
        return Refusal(400 if error.exit_status == 2 else 500, str(error).replace("\n  ", "; "))
    return Refusal(500, "internal error; the server's log has more")


def _invalid(found: Sequence[Any]) -> Refusal:
    """Return one sentence for each wrong field, up to eight of them; `param` is the first."""
    if found[0]["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON ({found[0]['ctx']['error']} at character {found[0]['loc'][-1]})")
    sentences = dict.fromkeys(_sentence(one) for one in found[:8])
    return Refusal(400, "; ".join(sentences), param=_field(found[0]["loc"][:2]) or _blamed(found[0]))


def _sentence(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a field, in the words of pydantic where the schemas have none of their own."""
    field, message = _field(error["loc"]), error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{field or 'body'} is required"
    if error["type"] in ("value_error", "sentence") and not message.startswith(("must", "has")):
        return f"{field}: {message}" if field else message
    if error["type"] not in ("value_error", "sentence", "union"):
        message = re.sub(r"^(Input|List|String|Dictionary) should", "must", message, count=1)
        message += f"; found {describe_value(error['input'])}" if message.startswith("must be") else ""
    joined = " " if message.startswith(("must", "has")) else ": "
    return f"{field or 'body'}{joined}{message}"


def _blamed(error: Mapping[str, Any]) -> str | None:
    """Return the field that a check of the whole body blames."""
    context = error.get("ctx") or {}
    field = context.get("field") or getattr(context.get("error"), "field", None)
    return None if field is None else str(field)


def _field(place: Sequence[Any]) -> str:
    """Return the path of a field; names in brackets are arms of a union."""
    steps = [str(step) for step in place if step != "body"]
    return ".".join(step for step in steps if not step.startswith("["))[:200]


def install(app: FastAPI) -> None:
    """Make `app` answer in this form."""

    async def told(_: Request, error: Exception) -> Response:
        return refusal_of(error).response()

    for kind in (Refusal, MegaError, RequestValidationError, StarletteHTTPException, HTTPException, Exception):
        app.add_exception_handler(kind, told)
