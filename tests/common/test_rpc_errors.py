"""The end of a call whose client is gone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from services.common.errors import Unavailable
from services.common.rpc_errors import abort_with


class LostClient:
    """A context whose client left just before the status was sent."""

    async def abort(self, *status: Any) -> None:
        raise cygrpc.ExecuteBatchError("Failed", "execute_batch", ())


async def test_a_client_that_leaves_before_its_status_ends_the_handler_quietly() -> None:
    context = cast("grpc.aio.ServicerContext[Any, Any]", LostClient())
    with pytest.raises(asyncio.CancelledError):
        await abort_with(context, Unavailable("the client read nothing"))
