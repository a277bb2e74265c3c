"""The worker's process around its parts, where one of them fails at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from services.common.rpc import open_channel
from services.worker.__main__ import serve
from services.worker.config import WorkerConfig
from services.worker.supervisor import Ranks


async def test_ranks_that_cannot_start_leave_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*arguments: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(Ranks, "start", start)
    config = WorkerConfig(engine="fake", address=f"unix:{tmp_path}/worker.sock")
    with pytest.raises(OSError, match="no more processes"):
        await serve(config, asyncio.Event())
    async with open_channel(config.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest())
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
