"""The failures Shoal can report, and the one table that maps them to statuses.

Code raises a subclass of `ShoalError`; the edges (REST, gRPC servicers, session
frames) turn it into their own form. Nothing else decides a status.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import ClassVar

import grpc


class ErrorCode(enum.IntEnum):
    """The kind of a failure; the numbers are those of `shoal.v1.ErrorCode`."""

    INVALID_ARGUMENT = 1
    CONTEXT_LENGTH_EXCEEDED = 2
    NOT_FOUND = 3
    TOO_LARGE = 4
    OVERLOADED = 5
    UNAVAILABLE = 6
    DEADLINE_EXCEEDED = 7
    INTERNAL = 8
    CANCELLED = 9
    UNAUTHENTICATED = 10
    UNSUPPORTED = 11


@dataclass(frozen=True, slots=True)
class Status:
    """How one kind of failure appears at each edge."""

    http: int
    grpc: grpc.StatusCode
    type: str  # OpenAI's error.type
    code: str | None  # OpenAI's error.code


STATUSES: dict[ErrorCode, Status] = {
    ErrorCode.INVALID_ARGUMENT: Status(
        400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", "invalid_value"
    ),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Status(
        400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", "context_length_exceeded"
    ),
    ErrorCode.UNSUPPORTED: Status(
        400, grpc.StatusCode.UNIMPLEMENTED, "invalid_request_error", "unsupported_parameter"
    ),
    ErrorCode.UNAUTHENTICATED: Status(
        401, grpc.StatusCode.UNAUTHENTICATED, "invalid_request_error", "invalid_api_key"
    ),
    ErrorCode.NOT_FOUND: Status(
        404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", "model_not_found"
    ),
    ErrorCode.TOO_LARGE: Status(
        413, grpc.StatusCode.RESOURCE_EXHAUSTED, "invalid_request_error", "request_too_large"
    ),
    ErrorCode.OVERLOADED: Status(
        429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "overloaded"
    ),
    ErrorCode.CANCELLED: Status(499, grpc.StatusCode.CANCELLED, "cancelled_error", "cancelled"),
    ErrorCode.INTERNAL: Status(500, grpc.StatusCode.INTERNAL, "server_error", "internal_error"),
    ErrorCode.UNAVAILABLE: Status(
        503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error", "unavailable"
    ),
    ErrorCode.DEADLINE_EXCEEDED: Status(
        504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", "deadline_exceeded"
    ),
}


class ShoalError(Exception):
    """A failure with a sentence for the person who sent the request.

    `param` names the request field at fault; `retry_after` is in seconds.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def status(self) -> Status:
        return STATUSES[self.code]

    @property
    def reason(self) -> str:
        """What a log says of it: perhaps more than a client is to know."""
        return self.message

    @property
    def retry_after_header(self) -> str | None:
        """Retry-After, in HTTP and in gRPC trailers: whole seconds, never too few, never 0."""
        if self.retry_after is None:
            return None
        return str(max(1, math.ceil(self.retry_after)))


class InvalidRequest(ShoalError):
    """The input is wrong, and the same input will always fail."""

    code = ErrorCode.INVALID_ARGUMENT


class ContextLengthExceeded(ShoalError):
    """The prompt does not fit the context or the KV pool."""

    code = ErrorCode.CONTEXT_LENGTH_EXCEEDED

    @classmethod
    def of(
        cls, num_prompt_tokens: int, max_model_len: int, *, param: str, at_least: bool = False
    ) -> ContextLengthExceeded:
        """`at_least`: the prompt was not counted to its end."""
        number = f"at least {num_prompt_tokens}" if at_least else f"{num_prompt_tokens}"
        return cls(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{number} tokens and needs room for at least one more.",
            param=param,
        )


class Unsupported(ShoalError):
    """Understood, and refused because Shoal does not do it."""

    code = ErrorCode.UNSUPPORTED


class Unauthenticated(ShoalError):
    """The API key is missing or wrong."""

    code = ErrorCode.UNAUTHENTICATED


class ModelNotFound(ShoalError):
    """No such model is served."""

    code = ErrorCode.NOT_FOUND


class TooLarge(ShoalError):
    """The body or message is over the limit."""

    code = ErrorCode.TOO_LARGE


class Overloaded(ShoalError):
    """A queue is full."""

    code = ErrorCode.OVERLOADED


class Cancelled(ShoalError):
    """The client left or reads too slowly."""

    code = ErrorCode.CANCELLED


class Unavailable(ShoalError):
    """No instance can serve this now."""

    code = ErrorCode.UNAVAILABLE


class PeerLost(Unavailable):
    """The instance that served this is gone; another may take it over.

    `reason` has the instance's address, which is for logs and not for a client.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self._reason = reason

    @property
    def reason(self) -> str:
        return self._reason or self.message


class HandedBack(Unavailable):
    """The instance is going away in order; another continues at once."""


class DeadlineExceeded(ShoalError):
    """The request's deadline passed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class InternalError(ShoalError):
    """A fault of Shoal itself."""


_BY_CODE: dict[ErrorCode, type[ShoalError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextLengthExceeded,
        Unsupported,
        Unauthenticated,
        ModelNotFound,
        TooLarge,
        Overloaded,
        Cancelled,
        Unavailable,
        DeadlineExceeded,
        InternalError,
    )
}


def error_class(code: int) -> type[ShoalError]:
    """The class for a code from the wire; an unknown one is an internal error."""
    try:
        return _BY_CODE[ErrorCode(code)]
    except ValueError:
        return InternalError


class StartupError(Exception):
    """A mistake of the person who starts a process: one sentence, no traceback, exit 1."""
