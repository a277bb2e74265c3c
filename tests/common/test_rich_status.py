"""A failure as google.rpc.Status, read as a client's library reads it."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from services.common import rich_status
from services.common.errors import (
    STATUSES,
    ContextLengthExceeded,
    ErrorCode,
    InternalError,
    InvalidRequest,
    Overloaded,
    ShoalError,
    error_class,
)


def details_of(error: ShoalError) -> dict[str, object]:
    """The details by name, each at most once, from the trailer's bytes."""
    (value,) = [v for key, v in rich_status.trailers(error) if key == "grpc-status-details-bin"]
    assert isinstance(value, bytes)
    found: dict[str, object] = {}
    for packed in status_pb2.Status.FromString(value).details:
        name = packed.TypeName().rpartition(".")[2]
        detail = getattr(error_details_pb2, name)()
        assert packed.Unpack(detail)
        assert name not in found
        found[name] = detail
    return found


@pytest.mark.parametrize("code", list(ErrorCode))
def test_the_status_repeats_the_calls_own(code: ErrorCode) -> None:
    error = error_class(code)("what happened")
    status = rich_status.status(error)
    assert code_pb2.Code.Name(status.code) == STATUSES[code].grpc.name
    assert status.message == "what happened"
    info = details_of(error)["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("shoal", str(STATUSES[code].code).upper())


def test_a_field_error_names_the_field() -> None:
    error = InvalidRequest("top_p must be above 0", param="top_p")
    request = details_of(error)["BadRequest"]
    assert isinstance(request, error_details_pb2.BadRequest)
    (violation,) = request.field_violations
    assert (violation.field, violation.description) == ("top_p", "top_p must be above 0")
    long = details_of(ContextLengthExceeded.of(9, 8, param="prompt"))
    assert "BadRequest" in long
    assert "BadRequest" not in details_of(InternalError("internal error"))


def test_an_overload_says_when_to_come_back() -> None:
    retry = details_of(Overloaded("full", retry_after=1.25))["RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 1250
    assert "RetryInfo" not in details_of(Overloaded("full"))


@pytest.mark.parametrize("text", ["x", "é", "漢", "🙂"])
def test_trailers_stay_small_whatever_the_message(text: str) -> None:
    error = InvalidRequest(text * 100_000, param=text * 100_000)
    total = len(rich_status.short_message(error).encode()) * 3
    total += sum(len(key) + len(value) * 4 // 3 for key, value in rich_status.trailers(error))
    assert total < 8192 - 512  # what gRPC's clients take, less HTTP/2's own
    assert rich_status.short_message(error).endswith("...")
