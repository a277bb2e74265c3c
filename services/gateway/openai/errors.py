"""Failures as the OpenAI API words them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.common.errors import ShoalError, Unauthenticated

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
    message = f"{error.detail}: {method} {path}"
    code = _HTTP_CODES.get(error.status_code)
    body = _encode(message, "invalid_request_error", None, code)
    return Response(body, error.status_code, error.headers, "application/json")


def _encode(message: str, type: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": type, "param": param, "code": code}}
    )
