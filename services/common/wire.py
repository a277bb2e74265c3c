"""Conversions between domain types and the messages that several services use."""

from __future__ import annotations

from protos import common_pb2
from services.common.errors import ShoalError, error_class


def error_to_proto(error: ShoalError) -> common_pb2.Error:
    """The message for an error."""
    proto = common_pb2.Error(
        code=common_pb2.ErrorCode.ValueType(int(error.code)),
        message=error.message,
        param=error.param or "",
    )
    if error.retry_after is not None:
        proto.retry_after_ms = round(error.retry_after * 1000)
    return proto


def error_from_proto(proto: common_pb2.Error) -> ShoalError:
    """The error a message tells of."""
    return error_class(proto.code)(
        proto.message,
        param=proto.param or None,
        retry_after=proto.retry_after_ms / 1000 if proto.HasField("retry_after_ms") else None,
    )
