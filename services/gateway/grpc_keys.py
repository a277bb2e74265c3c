"""API keys on the public gRPC API: who is let through to a servicer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from services.common.errors import Unauthenticated
from services.common.rpc_errors import abort_with
from services.gateway.keys import KeyRing

_OPEN_PREFIX = "/grpc.health.v1.Health/"  # for probes, which have no keys

if TYPE_CHECKING:
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor  # generic in its type stubs only


class KeyInterceptor(_ServerInterceptor):
    """Answers UNAUTHENTICATED to whoever has no key; everybody may ask for the health."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if not handler_call_details.method.startswith(_OPEN_PREFIX):
            try:
                self._keys.identify(texts(handler_call_details.invocation_metadata))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """A call's metadata but for what is binary."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _refusal(error: Unauthenticated) -> Any:
    """Ends a call of any shape before a message of it is read."""

    async def refuse(requests: Any, context: Any) -> None:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
