"""The failure types and their one table of statuses."""

from __future__ import annotations

import pytest

from protos import common_pb2
from services.common import errors
from services.common.errors import STATUSES, ErrorCode, ShoalError, error_class
from services.common.wire import error_from_proto, error_to_proto


def test_the_codes_are_those_of_the_wire() -> None:
    wire = {name.removeprefix("ERROR_CODE_"): n for name, n in common_pb2.ErrorCode.items() if n}
    assert wire == {code.name: code.value for code in ErrorCode}


def test_every_code_has_a_status_and_a_class() -> None:
    assert set(STATUSES) == set(ErrorCode)
    for code in ErrorCode:
        assert error_class(code).code is code


def test_an_unknown_code_is_an_internal_error() -> None:
    assert error_class(99) is errors.InternalError


@pytest.mark.parametrize("code", list(ErrorCode))
@pytest.mark.parametrize("retry_after", [None, 0.0, 1.5])
def test_an_error_survives_the_wire(code: ErrorCode, retry_after: float | None) -> None:
    error = error_class(code)("what happened", param="stop", retry_after=retry_after)
    again = error_from_proto(error_to_proto(error))
    assert type(again) is type(error)
    assert (again.message, again.param) == ("what happened", "stop")
    assert again.retry_after == retry_after


@pytest.mark.parametrize(
    ("retry_after", "header"), [(None, None), (0.0, "1"), (0.2, "1"), (1.2, "2"), (2.0, "2")]
)
def test_a_client_is_never_told_to_retry_too_soon(
    retry_after: float | None, header: str | None
) -> None:
    assert errors.Overloaded("full", retry_after=retry_after).retry_after_header == header


def test_a_lost_peer_is_unavailable_to_others() -> None:
    assert errors.PeerLost("gone").status is STATUSES[ErrorCode.UNAVAILABLE]


def test_context_length_names_both_numbers() -> None:
    error: ShoalError = errors.ContextLengthExceeded.of(9000, 8192, param="prompt")
    assert "9000" in error.message
    assert "8192" in error.message
    assert error.status.code == "context_length_exceeded"
