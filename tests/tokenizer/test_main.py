"""The services as processes: start, load, metrics, drain, and mistakes at start."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from protos import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tests.tokenizer.services import process

PARAGRAPH = "The quick brown fox jumps over 13 lazy dogs, and 從前 there was a village. "


def question(text: str) -> tokenizer_pb2.EncodeRequest:
    message = common_pb2.ChatMessage(role="user", content=text)
    return tokenizer_pb2.EncodeRequest(chat=common_pb2.ChatPrompt(messages=[message]))


async def metrics(path: str) -> dict[str, float]:
    """The samples of a service's /metrics on a unix socket."""
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as client:
        assert (await client.get("http://service/livez")).status_code == 200
        assert (await client.get("http://service/readyz")).status_code == 200
        text = (await client.get("http://service/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def test_a_long_prompt_delays_no_short_one_and_a_drain_waits_for_it(tmp_path: Path) -> None:
    admin = f"{tmp_path}/admin"
    async with process("tokenizer", tmp_path, "--admin-address", f"unix:{admin}") as (
        child,
        channel,
    ):
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        short = question("What is the capital of France?")
        assert len((await stub.Encode(short)).token_ids) == 37
        long = asyncio.ensure_future(_encode(stub, question(PARAGRAPH * 6_000)))
        during = []
        while not long.done():
            start = time.perf_counter()
            assert len((await stub.Encode(short)).token_ids) == 37
            during.append(time.perf_counter() - start)
        assert len(long.result().token_ids) > 100_000
        # Many were answered meanwhile: they did not wait for the long one.
        assert len(during) >= 10
        print(f"short prompts meanwhile: {len(during)}, median {sorted(during)[len(during) // 2]}")
        values = await metrics(admin)
        assert values["shoal_tokenizer_jobs"] == 0
        assert values["shoal_tokenizer_tokens_total"] > 100_000
        assert values["shoal_tokenizer_encode_seconds_count"] == len(during) + 2

        last = asyncio.ensure_future(_encode(stub, question(PARAGRAPH * 6_000)))
        while (await metrics(admin))["shoal_tokenizer_jobs"] == 0:
            pass
        child.send_signal(signal.SIGTERM)
        assert len((await last).token_ids) > 100_000
        assert await child.wait() == 0


async def _encode(
    stub: tokenizer_pb2_grpc.TokenizerAsyncStub, request: tokenizer_pb2.EncodeRequest
) -> tokenizer_pb2.EncodeResponse:
    return await stub.Encode(request)


async def test_the_detokenizer_idles_without_cpu_and_forgets_who_left(tmp_path: Path) -> None:
    admin = f"{tmp_path}/admin"
    flags = ("--model", "byte", "--admin-address", f"unix:{admin}")
    async with process("detokenizer", tmp_path, *flags) as (child, channel):
        call = tokenizer_pb2_grpc.DetokenizerStub(channel).Session()  # type: ignore[call-arg]
        await call.write(
            tokenizer_pb2.DetokenizerSessionRequest(
                opens=[tokenizer_pb2.OpenText(handle=i) for i in range(500)]
            )
        )
        assert isinstance(await call.read(), tokenizer_pb2.DetokenizerSessionResponse)
        while (values := await metrics(admin))["shoal_detokenizer_open_texts"] == 0:
            pass
        assert values["shoal_detokenizer_open_texts"] == 500
        assert values["shoal_detokenizer_sessions"] == 1
        call.cancel()
        while (values := await metrics(admin))["shoal_detokenizer_sessions"]:
            pass
        assert values["shoal_detokenizer_open_texts"] == 0

        before = _cpu_seconds(child.pid)
        # A client that only listens: two heartbeats, and then it is let go.
        call = tokenizer_pb2_grpc.DetokenizerStub(channel).Session()  # type: ignore[call-arg]
        for _ in range(3):
            await call.read()
        used = _cpu_seconds(child.pid) - before
        print(f"CPU in two idle seconds: {used:.3f} s")
        assert used < 0.1
        call.cancel()
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--model", "/no/such/model"], 1, "does not exist"),
        (["--drain-timeout", "soon"], 2, "--drain-timeout"),
        (["--help"], 0, ""),
    ],
)
async def test_mistakes_at_start_are_one_sentence(
    tmp_path: Path, flags: list[str], status: int, message: str
) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.tokenizer", "--role", "detokenizer"),
        *("--address", f"unix:{tmp_path}/d", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == status
    assert message in errors.decode()
    assert "Traceback" not in errors.decode()
