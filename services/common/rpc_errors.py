"""How a call ends that went wrong: errors of handlers, and requests that are no messages.

An interceptor around every servicer of Shoal. Statuses and details are those of
`services.common.errors` and `services.common.rich_status`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has the error of a lost client

from services.common import rich_status
from services.common.errors import InternalError, InvalidRequest, ShoalError

log = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0  # in which a client that reads at all takes a status


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: ShoalError) -> None:
    """Ends a call with an error's status, message and rich details.

    The status goes out behind the messages before it, so that a client which does not
    read holds it up. The handler does not stay for such a client: it ends as cancelled,
    and gRPC keeps the status until the client reads, or is gone.
    """
    try:
        async with asyncio.timeout(_STATUS_SECONDS):
            await context.abort(
                error.status.grpc, rich_status.short_message(error), rich_status.trailers(error)
            )
    except TimeoutError:
        raise asyncio.CancelledError
    except cygrpc.ExecuteBatchError:  # the client went in this moment: nobody is left to tell
        raise asyncio.CancelledError
    except grpc.aio.AbortError as aborted:
        aborted.__context__ = None
        raise
    finally:  # the context keeps the AbortError, and that these frames: no cycle through them
        del context, error


if TYPE_CHECKING:
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor  # generic in its type stubs only


class ErrorInterceptor(_ServerInterceptor):
    """Turns errors that leave a handler into statuses. One of two broad excepts in Shoal."""

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        requests = "stream" if handler.request_streaming else "unary"
        responses = "stream" if handler.response_streaming else "unary"
        inner = getattr(handler, f"{requests}_{responses}")
        if not (inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)):
            return handler  # health and reflection bring their own kinds of handlers
        wrap = _wrap_generator if inspect.isasyncgenfunction(inner) else _wrap_coroutine
        check = _checked_stream if handler.request_streaming else _checked
        make = getattr(grpc, f"{requests}_{responses}_rpc_method_handler")
        return make(
            wrap(inner, check, handler_call_details.method),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _wrap_coroutine(inner: Any, check: Callable[[Any], Any], method: str) -> Any:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await inner(check(request), context)
        except ShoalError as error:
            await abort_with(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("fault in %s", method)
            await abort_with(context, InternalError("internal error"))
        finally:
            del request, context  # as in `abort_with`

    return call


def _wrap_generator(inner: Any, check: Callable[[Any], Any], method: str) -> Any:
    async def iterate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in inner(check(request), context):
                yield response
        except ShoalError as error:
            await abort_with(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("fault in %s", method)
            await abort_with(context, InternalError("internal error"))
        finally:
            del request, context  # as in `abort_with`

    return iterate


# gRPC would answer bytes that are no message with INTERNAL, and log a traceback.


class _NoMessage:
    """Stands for a request that could not be decoded."""


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def deserialize_or_tell(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _NoMessage()

    return deserialize_or_tell


def _checked(request: Any) -> Any:
    if isinstance(request, _NoMessage):
        raise InvalidRequest("the request is not a message of this method")
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
