"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from mega_common.errors import MegaError
from mega_eval.server.request_validation import describe_value

CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "server_busy", 503: "unavailable", 504: "timeout"}

MESSAGES_PATH = "/v1/messages"  # of Anthropic's API, whose errors have another form
ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ApiRequestError(Exception):
    """Exception that the server returns to the client as an HTTP error response.

    Attributes:
        status: HTTP status.
        message: sentence for people.
        param: field of the request that caused the error.
        code: error code for programs.
        retry_after: seconds after which the client may try again.
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

    def format_error_body(self) -> dict[str, Any]:
        """Return the error as the JSON body of OpenAI's API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def format_anthropic_body(self) -> dict[str, Any]:
        """Return the error as the JSON body of Anthropic's API."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def make_response(self, path: str) -> Response:
        """Return the HTTP response with this error's status and JSON body, in the form of the API that has `path`."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        # escaped JSON, since a message may quote a lone surrogate, which UTF-8 cannot encode
        body = self.format_anthropic_body() if path.startswith(MESSAGES_PATH) else self.format_error_body()
        return Response(json.dumps(body), self.status, headers, media_type="application/json")


def reject_lone_surrogates(text: str) -> None:
    """Raise ApiRequestError for a text with lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiRequestError(400, "a text must not have lone surrogates, which are half characters") from None


class ErrorDetail(BaseModel):
    """Object `error` in the JSON body of an error response, as in OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """JSON body of every error response, as in OpenAI's API."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """Object `error` in the JSON body of an error response of Anthropic's API."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """JSON body of every error response of /v1/messages, as in Anthropic's API."""

    type: str
    error: AnthropicErrorDetail


def convert_to_api_error(error: Exception) -> ApiRequestError:
    """Return the ApiRequestError (HTTP status and message) for any exception; internal ones get 500 and no details."""
    if isinstance(error, ApiRequestError):
        return error
    if isinstance(error, RequestValidationError):
        return _translate_validation_errors(error.errors())
    if isinstance(error, StarletteHTTPException):
        return ApiRequestError(400 if error.status_code == 422 else error.status_code, str(error.detail))
    if isinstance(error, MegaError):
        return ApiRequestError(400 if error.exit_status == 2 else 500, str(error).replace("\n  ", "; "))
    return ApiRequestError(500, "internal error; the server's log has more")


def _translate_validation_errors(found: Sequence[Any]) -> ApiRequestError:
    """Return one sentence for each wrong field, up to eight of them; `param` is the first."""
    if found[0]["type"] == "json_invalid":
        return ApiRequestError(
            400, f"the body is not JSON ({found[0]['ctx']['error']} at character {found[0]['loc'][-1]})"
        )
    sentences = dict.fromkeys(_format_field_error(error) for error in found[:8])
    return ApiRequestError(400, "; ".join(sentences), param=_field_path(found[0]["loc"][:2]) or _named_field(found[0]))


def _format_field_error(error: Mapping[str, Any]) -> str:
    """Return the error of a field as a sentence; pydantic's message if the schema has no message."""
    field, message = _field_path(error["loc"]), error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        near = difflib.get_close_matches(str(error["loc"][-1]), list(error["input"] or ())[:100], n=1, cutoff=0.8)
        return f"{field or 'body'} is required" + (f"; found {near[0]!r}" if near else "")
    if error["type"] in ("value_error", "sentence") and not message.startswith(("must", "has")):
        return f"{field}: {message}" if field else message
    if error["type"] not in ("value_error", "sentence", "union"):
        message = re.sub(r"^(Input|List|String|Dictionary) should", "must", message, count=1)
        message += f"; found {describe_value(error['input'])}" if message.startswith("must be") else ""
    joined = " " if message.startswith(("must", "has")) else ": "
    return f"{field or 'body'}{joined}{message}"


def _named_field(error: Mapping[str, Any]) -> str | None:
    """Return the field that a check of the whole body names as wrong."""
    context = error.get("ctx") or {}
    field = context.get("field") or getattr(context.get("error"), "field", None)
    return None if field is None else str(field)


def _field_path(location: Sequence[Any]) -> str:
    """Return the path of a field, without the bracketed names of union arms."""
    steps = [str(step) for step in location if step != "body"]
    return ".".join(step for step in steps if not step.startswith("["))[:200]


def _explain_route(request: Request, paths: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence about a request to an unknown path, or with a method that its path does not have.
    `paths` has the methods of each path of the server.
    """
    path = request.url.path[:200]
    if path in paths:
        return f"{request.method} {path} is not supported; use {' or '.join(paths[path])}"
    near = difflib.get_close_matches(path, paths, n=1)
    return f"the server has no path {path}; " + (
        f"did you mean {near[0]}?" if near else f"use {', '.join(sorted(paths))}"
    )


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers that turn every exception in a route of `app` into an error response in the format of its API."""

    async def send_error_response(request: Request, error: Exception) -> Response:
        if isinstance(error, StarletteHTTPException) and error.status_code in (404, 405):
            paths = {route.path: sorted(route.methods or ()) for route in app.routes if isinstance(route, APIRoute)}
            error = StarletteHTTPException(error.status_code, _explain_route(request, paths), error.headers)
        return convert_to_api_error(error).make_response(request.url.path)

    for kind in (ApiRequestError, MegaError, RequestValidationError, StarletteHTTPException, HTTPException, Exception):
        app.add_exception_handler(kind, send_error_response)
