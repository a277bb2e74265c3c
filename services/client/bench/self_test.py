"""How much this client can take in: its own CPU time a token, from a stub that costs it nothing.

The stub is a thread with prepared bytes that steps as an engine does: at each step it sends
every stream one event. Only the CPU time of the client's own thread is counted, so the figure
holds on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass

from services.client.connection import Origin, Pool

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1796030554,"model":"stub","system_fingerprint":null,"choices":[{"index":0,'
    b'"delta":{"content":" word"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
_END = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What one shape of stream cost the client."""

    streams: int
    events_a_read: int
    tokens: int
    cpu_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The most that one core could take in."""
        return self.tokens / self.cpu_seconds

    def __str__(self) -> str:
        shape = "one event a read" if self.events_a_read == 1 else f"{self.events_a_read} a read"
        return (
            f"{self.streams} streams, {shape}: {self.cpu_seconds / self.tokens * 1e6:.1f} us of"
            f" CPU a token, at most {self.tokens_per_second:,.0f} tokens/s on one core"
            f" ({self.tokens:,} tokens in {self.seconds:.2f} s)"
        )


async def self_test(
    *, streams: int = 64, steps: int = 400, events_a_read: int = 1, step_seconds: float = 0.004
) -> SelfTest:
    """Takes in `streams * steps * events_a_read` tokens."""
    with _Stub(streams, steps, events_a_read, step_seconds) as stub:
        pool = Pool(Origin("127.0.0.1", stub.port))
        try:
            started, cpu = time.perf_counter(), time.thread_time()
            posts = (pool.post("/v1/chat/completions", b"{}") for _ in range(streams))
            answers = await asyncio.gather(*posts)
            cpu, seconds = time.thread_time() - cpu, time.perf_counter() - started
        finally:
            pool.close()
    tokens = sum(answer.tokens for answer in answers)
    assert tokens == streams * steps * events_a_read, "every event was taken in"
    return SelfTest(streams, events_a_read, tokens, cpu, seconds)


class _Stub:
    """A server of a fixed number of equal streams, then it ends."""

    def __init__(self, streams: int, steps: int, events: int, step_seconds: float) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=streams)
        self.port: int = self._listener.getsockname()[1]
        self._streams = streams
        self._steps = steps
        self._piece = _chunk(_EVENT) * events
        self._step_seconds = step_seconds
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> _Stub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # some systems refuse it, and wake at the closing
            self._listener.shutdown(socket.SHUT_RDWR)  # Linux: closing alone wakes no accept()
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        clients: list[socket.socket] = []
        try:
            for _ in range(self._streams):
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                clients.append(client)
                client.recv(65536)
                client.sendall(_HEAD)
            for _ in range(self._steps):
                for client in clients:
                    client.sendall(self._piece)
                time.sleep(self._step_seconds)  # the engine's step
            for client in clients:
                client.sendall(_chunk(_END) + b"0\r\n\r\n")
        except OSError:
            return  # the client has left
        finally:
            for client in clients:
                client.close()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
