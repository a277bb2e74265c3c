"""What no well-meant client sends, to every gRPC port of a fleet, with a stream beside it.

After each: the processes are the ones they were, the stream beside was exact all the time,
nothing of the attack is held, and the file descriptors are back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc, tokenizer_pb2, worker_pb2
from tests.integration import raw_http2 as http2
from tests.integration.hostile import GENERATE, LONG, ROLES, Victims, attack, code_of, raw_call
from tests.integration.test_fleet_life import assert_nothing_is_held

SEED = 20260
SESSIONS = {
    "gateway": "/shoal.v1.Inference/Session",
    "tokenizer": "/shoal.v1.Tokenizer/Session",
    "detokenizer": "/shoal.v1.Detokenizer/Session",
    "worker": "/shoal.v1.Worker/Session",
}
METHODS = {
    "gateway": ("Inference", ("Generate", "Chat", "Session", "Tokenize", "Detokenize")),
    "tokenizer": ("Tokenizer", ("Encode", "Session")),
    "detokenizer": ("Detokenizer", ("Decode", "Lookup", "Session")),
    "worker": ("Worker", ("Session", "Generate")),
}


# -- bytes


@pytest.mark.parametrize("role", ROLES)
def test_random_bytes(victims: Victims, role: str) -> None:
    rng = random.Random(SEED)
    preludes = (b"", http2.PREFACE, http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, b""))
    payloads = (
        preludes[number % 3] + rng.randbytes(rng.choice((1, 9, 100, 20_000)))
        for number in range(48)
    )
    with victims.unharmed():
        count = attack(victims, role, payloads)
    print(f"{role}: {count} connections of random bytes, seed {SEED}")


def bad_frames(path: str) -> Iterator[bytes]:
    start = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, b"")
    headers = http2.call_headers(path)
    opened = start + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, headers)
    whole = http2.opened(path, b"\x0a\x02\x08\x01")
    yield from (whole[:cut] for cut in range(1, len(whole), 7))  # cut anywhere
    yield opened + http2.frame(http2.DATA, 0, 1, b"", length=1000)  # never comes
    yield opened + http2.frame(http2.DATA, 0, 1, http2.message(b"abc", length=1 << 31))
    yield opened + http2.frame(http2.DATA, 0, 1, http2.message(b"abc", compressed=1))
    yield opened + http2.frame(http2.DATA, 0, 1, http2.message(b"abc", compressed=9))
    yield opened + http2.frame(http2.DATA, http2.END_STREAM, 1, b"\0\0")  # half an envelope
    yield opened + http2.frame(http2.DATA, 0, 99, http2.message(b""))  # no such stream
    yield opened + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, headers)  # once more
    yield opened + http2.frame(http2.WINDOW_UPDATE, 0, 0, (0).to_bytes(4, "big"))
    yield opened + http2.frame(http2.WINDOW_UPDATE, 0, 1, ((1 << 31) - 1).to_bytes(4, "big")) * 2
    yield start + http2.frame(http2.HEADERS, 0, 1, headers)  # the rest never comes
    yield (
        start
        + http2.frame(http2.HEADERS, 0, 1, b"")
        + b"".join(http2.frame(http2.CONTINUATION, 0, 1, b"") for _ in range(2000))
    )
    yield start + http2.frame(http2.HEADERS, http2.END_HEADERS, 2, headers)  # a server's number
    yield start + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xff" * 50)  # no HPACK
    yield start + http2.frame(http2.DATA, 0, 1, b"x" * 70_000)  # longer than allowed
    yield start + http2.frame(http2.SETTINGS, 0, 0, b"\0\x04\xff\xff\xff\xff")
    yield start + http2.frame(http2.SETTINGS, 0, 0, b"\0")
    yield start + http2.frame(http2.PING, 0, 0, b"12345678") * 2000
    yield start + http2.frame(77, 0xFF, 1, b"what?") * 100
    yield start + b"".join(  # opened and reset at once
        http2.frame(http2.HEADERS, http2.END_HEADERS, 2 * number + 1, headers)
        + http2.frame(http2.RST_STREAM, 0, 2 * number + 1, b"\0\0\0\x08")
        for number in range(500)
    )
    yield b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)  # TLS


@pytest.mark.parametrize("role", ROLES)
def test_broken_frames(victims: Victims, role: str) -> None:
    with victims.unharmed():
        count = attack(victims, role, bad_frames(SESSIONS[role]))
    print(f"{role}: {count} connections of broken frames")


@pytest.mark.parametrize("role", ROLES)
def test_connections_that_say_nothing_more(victims: Victims, role: str) -> None:
    whole = http2.opened(SESSIONS[role], b"")
    with victims.unharmed(), ExitStack() as stack:
        for number in range(100):
            connection = stack.enter_context(http2.connect(victims.address(role)))
            connection.sendall(whole[: number * len(whole) // 100])
        victims.oracle.check()  # while they stand


# -- calls


@pytest.mark.parametrize("role", ROLES)
def test_bytes_that_are_no_messages(victims: Victims, role: str) -> None:
    rng = random.Random(SEED)
    service, methods = METHODS[role]
    with victims.unharmed(), victims.channel(role) as channel:
        for method in methods:
            for _ in range(12):
                garbage = b"\xff" + rng.randbytes(rng.randrange(1, 200))
                code = code_of(raw_call(channel, f"/shoal.v1.{service}/{method}", garbage))
                assert code is grpc.StatusCode.INVALID_ARGUMENT, method


@pytest.mark.parametrize("role", ROLES)
def test_unknown_methods_and_huge_metadata(victims: Victims, role: str) -> None:
    with victims.unharmed(), victims.channel(role) as channel:
        for path in ("/shoal.v1.Nothing/Nothing", f"{SESSIONS[role]}s", "/", "/a/b/c"):
            code = code_of(raw_call(channel, path, b""))
            assert code is grpc.StatusCode.UNIMPLEMENTED
        for metadata in (
            (("x-huge", "x" * 1_000_000),),
            tuple((f"x-{number}", "y" * 100) for number in range(5000)),
        ):
            code = code_of(raw_call(channel, SESSIONS[role], metadata=metadata))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


# -- clients that do not read


def unread(path: str, body: bytes) -> bytes:
    """A client that allows not one byte of messages to be sent to it."""
    no_window = b"\0\4\0\0\0\0"
    return (
        http2.PREFACE
        + http2.frame(http2.SETTINGS, 0, 0, no_window)
        + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call_headers(path))
        + http2.frame(http2.DATA, 0, 1, http2.message(body))
    )


SUBMIT = worker_pb2.Submit(handle=1, prompt_ids=[1, 2, 3], sampling=LONG)
UNREAD: tuple[tuple[str, str, Any], ...] = (
    ("gateway", "/shoal.v1.Inference/Generate", GENERATE),
    (
        "gateway",
        "/shoal.v1.Inference/Session",
        inference_pb2.SessionRequest(
            starts=[inference_pb2.SessionStart(id=i, generate=GENERATE) for i in range(20)]
        ),
    ),
    ("worker", "/shoal.v1.Worker/Session", worker_pb2.WorkerSessionRequest(submits=[SUBMIT])),
    ("worker", "/shoal.v1.Worker/Generate", worker_pb2.WorkerGenerateRequest(submit=SUBMIT)),
    (
        "tokenizer",
        "/shoal.v1.Tokenizer/Session",
        tokenizer_pb2.TokenizerSessionRequest(
            jobs=[
                tokenizer_pb2.EncodeJob(handle=i, request=tokenizer_pb2.EncodeRequest(text="x"))
                for i in range(100)
            ]
        ),
    ),
    (
        "detokenizer",
        "/shoal.v1.Detokenizer/Session",
        tokenizer_pb2.DetokenizerSessionRequest(
            opens=[tokenizer_pb2.OpenText(handle=i) for i in range(100)]
        ),
    ),
)


def test_clients_that_never_read(victims: Victims) -> None:
    """They stay connected and acknowledge what HTTP/2 asks, and still lose what they hold."""
    with victims.unharmed(), ExitStack() as stack:
        for role, path, body in UNREAD:
            connection = stack.enter_context(http2.connect(victims.address(role)))
            connection.sendall(unread(path, body.SerializeToString()))
        victims.oracle.check()
        with victims.oracle.paused():  # the connections still stand
            assert_nothing_is_held(victims.fleet, timeout=90)


def test_a_client_that_stalls_gets_what_came_and_the_reason(victims: Victims) -> None:
    options = (("grpc.http2.bdp_probe", 0),)  # its window stays at 64 KiB
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(GENERATE)
    request.options.n = 32
    with (
        victims.unharmed(),
        grpc.insecure_channel(victims.address("gateway"), options=options) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        next(iter(call))
        with victims.oracle.paused():
            assert_nothing_is_held(victims.fleet, timeout=60)
        assert code_of(call) is grpc.StatusCode.CANCELLED
        assert "read nothing" in str(call.details())
