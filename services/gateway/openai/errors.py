"""Failures as the OpenAI API words them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.common.errors import ShoalError, Unauthenticated

# Calls of OpenAI's API, and of those that resemble it, that do not generate text.
_NO_TEXT = frozenset(
    {"assistants", "audio", "batches", "classify", "containers", "conversations", "embeddings"}
    | {"evals", "files", "fine_tuning", "images", "moderations", "pooling", "realtime", "rerank"}
    | {"score", "threads", "uploads", "vector_stores", "videos"}
)
_UNDER_V1 = frozenset({"chat", "completions", "models", "responses"})

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def envelope(error: ShoalError) -> bytes:
    """The JSON body, the same in a response and in an event."""
    return _encode(error.message, error.status.type, error.param, error.status.code)


def error_response(error: ShoalError) -> Response:
    """The response for an error, with Retry-After where it is known, and how to prove oneself."""
    headers = {}
    if error.retry_after_header is not None:
        headers["retry-after"] = error.retry_after_header
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return Response(envelope(error), error.status.http, headers, "application/json")


def http_error_response(method: str, path: str, error: HTTPException) -> Response:
    """The response for what the router itself refuses: 404 and 405."""
    message = _not_here(path) if error.status_code == 404 else None
    message = message or f"{error.detail}: {method} {path}"
    code = _HTTP_CODES.get(error.status_code)
    body = _encode(message, "invalid_request_error", None, code)
    return Response(body, error.status_code, error.headers, "application/json")


def _not_here(path: str) -> str | None:
    """What a path that leads nowhere was meant for, if that is known."""
    within_v1 = path.startswith("/v1/")
    first = path.removeprefix("/v1/").strip("/").partition("/")[0]
    may_be_call = within_v1 or "." not in path.rpartition("/")[2]  # a picture of some page is none
    if first in _NO_TEXT and may_be_call:
        return f"This server generates text; it has no {path}."
    if (first in _UNDER_V1 and not within_v1) or path.startswith("/v1/v1/"):
        return f"There is no {path}; the base URL of a client of this API ends in /v1, once."
    return None


def _encode(message: str, type: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": type, "param": param, "code": code}}
    )
