"""A fleet under attack: the stream beside it, and how to see that it is unharmed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import psutil

from protos import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    tokenizer_pb2_grpc,
    worker_pb2_grpc,
)
from services.worker.engine.fake import allowed_ids, fake_tokens
from tests.integration import raw_http2 as http2
from tests.integration.served import ServedFleet
from tests.integration.test_fleet_life import assert_nothing_is_held
from tests.programs import eventually

ROLES = ("gateway", "tokenizer", "detokenizer", "worker")
UNREAD_SECONDS = 2.0  # the gateway's --unread-timeout
BYTE_BOS = 256

LONG = common_pb2.SamplingParams(max_tokens=4000, ignore_eos=True)
GENERATE = inference_pb2.GenerateRequest(
    text="never read", options=inference_pb2.GenerationOptions(sampling=LONG)
)


class Oracle:
    """Streams beside the attacks, one after the other, each held against what it must be."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._stop = threading.Event()
        self._rounds = threading.Semaphore(0)
        self._round_lock = threading.Lock()
        self._allowed = allowed_ids("byte")
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            with self._round_lock:
                try:
                    self._round(f"beside {number}")
                except grpc.RpcError as error:
                    # A queue that somebody filled is told; the client comes back.
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        self.wrong.append(f"round {number}: {error}")
                        self._rounds.release()
                    continue
                self._rounds.release()

    def _round(self, prompt: str) -> None:
        ids = [BYTE_BOS, *prompt.encode()]
        options = inference_pb2.GenerationOptions(
            sampling=common_pb2.SamplingParams(max_tokens=60, ignore_eos=True)
        )
        request = inference_pb2.GenerateRequest(text=prompt, options=options)
        pieces = [p for answer in self._stub.Generate(request, timeout=60) for p in answer.pieces]
        text = "".join(piece.text for piece in pieces)
        expected = fake_tokens(ids, 60, self._allowed)
        if text != bytes(expected).decode():
            self.wrong.append(f"{prompt}: {text!r}")

    def check(self) -> None:
        """A whole round from now on was exact, and so were all before."""
        while self._rounds.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have been under way
            assert self._rounds.acquire(timeout=60), "the stream beside hangs"
        wrong, self.wrong = self.wrong, []
        assert not wrong, wrong[:3]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Between two rounds."""
        with self._round_lock:
            yield

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._channel.close()


class Victims:
    """A fleet under attack, the stream beside it, and what it was like before."""

    def __init__(self, fleet: ServedFleet, oracle: Oracle) -> None:
        self.fleet = fleet
        self.oracle = oracle

    def address(self, role: str) -> str:
        address: str = self.fleet.processes(role)[0]["address"]
        return address

    def pids(self) -> set[int]:
        return {process.pid for process in self.fleet.tree()}

    def num_fds(self) -> dict[str, int]:
        return {
            entry["name"]: psutil.Process(entry["pid"]).num_fds()
            for entry in self.fleet.processes()
        }

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Around an attack."""
        self.oracle.check()
        pids, fds, printed = self.pids(), self.num_fds(), len(self.fleet.log)
        yield
        self.oracle.check()
        with self.oracle.paused():
            assert_nothing_is_held(self.fleet, timeout=60)
        assert self.pids() == pids
        slack = 4  # a scrape in progress, gRPC's own
        eventually(
            lambda: all(now <= fds[name] + slack for name, now in self.num_fds().items()),
            timeout=30,
            what=lambda: f"descriptors: {fds} before, {self.num_fds()} after",
        )
        tracebacks = [line for line in self.fleet.log[printed:] if "Traceback" in line]
        assert not tracebacks, tracebacks[:3]

    @contextmanager
    def channel(self, role: str) -> Iterator[grpc.Channel]:
        options = (("grpc.max_receive_message_length", -1), ("grpc.max_metadata_size", 1 << 24))
        with grpc.insecure_channel(self.address(role), options=options) as channel:
            yield channel


def attack(victims: Victims, role: str, payloads: Iterable[bytes]) -> int:
    """Sends each on a connection of its own, reads what comes, and leaves."""
    count = 0
    for payload in payloads:
        with http2.connect(victims.address(role)) as connection:
            with contextlib.suppress(OSError):  # it may be closed under the sending
                connection.sendall(payload)
            if count % 8 == 0:
                http2.drain(connection)
        count += 1
    return count


def code_of(call: Iterable[object]) -> grpc.StatusCode:
    """How a call ends, whatever it answers before."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def raw_call(channel: grpc.Channel, path: str, *requests: bytes, **options: Any) -> Any:
    """A call of any method, with bytes for messages."""
    call = channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)
    return call(iter(requests), **options)


def session_of(channel: grpc.Channel, role: str, requests: Sequence[Any]) -> Iterator[Any]:
    """A session with a peer behind the gateway, which stays, and beats, after its last request."""
    stubs: dict[str, Any] = {
        "tokenizer": tokenizer_pb2_grpc.TokenizerStub,
        "detokenizer": tokenizer_pb2_grpc.DetokenizerStub,
        "worker": worker_pb2_grpc.WorkerStub,
    }
    closed = threading.Event()

    def all_requests() -> Iterator[Any]:
        yield from requests
        while not closed.wait(2):
            yield type(requests[0])()

    call = stubs[role](channel).Session(all_requests())
    try:
        yield from call
    finally:
        call.cancel()
        closed.set()
