"""A failure as google.rpc.Status, beside the plain trailers that need no library to read.

    grpc-status-details-bin   BadRequest: the field at fault; RetryInfo: when to come back;
                              ErrorInfo: OpenAI's code, in capitals
    shoal-error-param, shoal-error-code, retry-after      the same, one text each

Knows of no call: `services.common.rpc` ends calls with what is made here.
"""

from __future__ import annotations

import math

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from services.common.errors import ErrorCode, ShoalError

DOMAIN = "shoal"
# Clients refuse trailers over 8 KiB by default. The message is in them twice, once with a
# byte as three characters and once in base64.
MAX_MESSAGE_BYTES = 1024
_MAX_PARAM_BYTES = 128
_DETAILS_KEY = "grpc-status-details-bin"
_FIELD_FAULTS = frozenset(
    {
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.NOT_FOUND,
        ErrorCode.UNSUPPORTED,
    }
)


def short_message(error: ShoalError) -> str:
    """The error's sentence, cut to what trailers hold."""
    return _cut(error.message, MAX_MESSAGE_BYTES)


def trailers(error: ShoalError) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata of a call that ends with an error."""
    found: list[tuple[str, str | bytes]] = [(_DETAILS_KEY, status(error).SerializeToString())]
    if error.param:
        param = _cut(error.param, _MAX_PARAM_BYTES)
        found.append(("shoal-error-param", param.encode("ascii", "replace").decode()))
    if error.status.code:
        found.append(("shoal-error-code", error.status.code))
    if error.retry_after_header is not None:
        found.append(("retry-after", error.retry_after_header))
    return tuple(found)


def status(error: ShoalError) -> status_pb2.Status:
    """The failure with its details, as google.rpc has them."""
    number: int = error.status.grpc.value[0]
    return status_pb2.Status(
        code=number,
        message=short_message(error),
        details=[_packed(detail) for detail in _details(error)],
    )


def _details(error: ShoalError) -> list[Message]:
    found: list[Message] = []
    if error.param and error.code in _FIELD_FAULTS:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.param, _MAX_PARAM_BYTES), description=short_message(error)
        )
        found.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        milliseconds = max(1, math.ceil(error.retry_after * 1000))
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(milliseconds)
        found.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.status.code:
        reason = error.status.code.upper()
        found.append(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    return found


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _cut(text: str, num_bytes: int) -> str:
    """The text's beginning, in at most so many bytes of UTF-8."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= num_bytes:
        return encoded.decode()
    return encoded[: num_bytes - 3].decode("utf-8", "ignore") + "..."
