"""Unary calls to a peer that goes away, or freezes, under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from services.common import rpc
from services.common.errors import PeerLost
from services.gateway.peers.detokenizer import DetokenizerPeer
from services.gateway.peers.session import SessionTimes


class Silent(tokenizer_pb2_grpc.DetokenizerServicer):
    """Greets, and then answers nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Session(
        self, requests: AsyncIterator[tokenizer_pb2.DetokenizerSessionRequest], context: object
    ) -> AsyncIterator[tokenizer_pb2.DetokenizerSessionResponse]:
        info = tokenizer_pb2.TokenizerInfo(model="byte")
        yield tokenizer_pb2.DetokenizerSessionResponse(info=info)
        await asyncio.Event().wait()

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: object
    ) -> tokenizer_pb2.DecodeResponse:
        raise AssertionError

    async def Lookup(
        self, request: tokenizer_pb2.LookupRequest, context: object
    ) -> tokenizer_pb2.LookupResponse:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def _connected(
    path: Path, times: SessionTimes
) -> tuple[rpc.Server, Silent, DetokenizerPeer, asyncio.Task[None]]:
    server, servicer = rpc.Server([]), Silent()
    tokenizer_pb2_grpc.add_DetokenizerServicer_to_server(servicer, server.grpc)
    address = await server.start(f"unix:{path}/d")
    ready = asyncio.Event()
    peer = DetokenizerPeer(address, times, ready.set)
    session = asyncio.create_task(peer.run())
    await asyncio.wait_for(ready.wait(), 20)
    return server, servicer, peer, session


async def test_the_loss_of_the_session_is_no_cancellation_of_who_waits(tmp_path: Path) -> None:
    """gRPC raises CancelledError in a call whose channel is closed; it must not end the request
    as if its client had left."""
    server, servicer, peer, session = await _connected(tmp_path, SessionTimes())
    call = asyncio.create_task(peer.lookup([65]))
    await asyncio.wait_for(servicer.asked.wait(), 20)
    session.cancel()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(call, 20)
    await asyncio.gather(session, return_exceptions=True)
    await server.stop(0)


async def test_who_is_cancelled_stays_cancelled(tmp_path: Path) -> None:
    server, servicer, peer, session = await _connected(tmp_path, SessionTimes())
    call = asyncio.create_task(peer.lookup([65]))
    await asyncio.wait_for(servicer.asked.wait(), 20)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    session.cancel()
    await asyncio.gather(session, return_exceptions=True)
    await server.stop(0)


async def test_a_call_that_a_frozen_peer_never_answers_ends(tmp_path: Path) -> None:
    times = SessionTimes(peer_timeout=0.3)
    server, _, peer, session = await _connected(tmp_path, times)
    with pytest.raises(PeerLost):
        await asyncio.wait_for(peer.lookup([65]), 20)
    session.cancel()
    await asyncio.gather(session, return_exceptions=True)
    await server.stop(0)
