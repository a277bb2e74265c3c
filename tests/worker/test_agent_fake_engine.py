"""The agent with the real rank and the fake engine: the pod as the fleet's tests use it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from protos import common_pb2, worker_pb2
from tests.worker.agent_client import AgentProcess, SessionClient, agent, session

pytestmark = pytest.mark.integration

LABEL = '{model_name="byte"}'
FLAGS = ("--model=byte", "--fake-step-ms=1", "--num-pages=512")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[AgentProcess]:
    async with agent(tmp_path, *FLAGS, settings={}) as process:
        yield process


async def _assert_all_free(running: AgentProcess) -> None:
    """No request and no page of one is left; the prefix cache may keep its own."""
    for series in (
        f"shoal_worker_handles{LABEL}",
        f"shoal_worker_engine_requests{LABEL}",
        f"vllm:num_requests_running{LABEL}",
        f"vllm:num_requests_waiting{LABEL}",
        f"vllm:kv_cache_usage_perc{LABEL}",
        'shoal_worker_pages{model_name="byte",state="locked"}',
        'shoal_worker_pages{model_name="byte",state="in_flight"}',
    ):
        await running.wait_for_metric(series, lambda value: value == 0)


async def _generate(client: SessionClient, handle: int, prompt: list[int], length: int) -> None:
    submit = worker_pb2.Submit(handle=handle, prompt_ids=prompt)
    submit.sampling.max_tokens = length
    submit.sampling.ignore_eos = True
    await client.call.write(worker_pb2.WorkerSessionRequest(submits=[submit]))


async def test_many_requests_leave_nothing_behind(running: AgentProcess) -> None:
    async with session(running) as client:
        for handle in range(200):
            await _generate(client, handle, [handle, handle, 7], 5 + handle % 20)
        await client.until(lambda: len(client.finished) == 200)
        for handle in range(200):
            assert len(client.token_ids[handle]) == 5 + handle % 20
            assert client.finished[handle].reason == common_pb2.FINISH_REASON_LENGTH
        await _assert_all_free(running)
        sent = sum(len(tokens) for tokens in client.token_ids.values())
        assert await running.metric(f"vllm:generation_tokens_total{LABEL}") == sent
        for name in ("steps_total", "busy_seconds_total", "prefix_query_tokens_total"):
            assert await running.metric(f"shoal_worker_{name}{LABEL}") > 0
        for name in ("preemptions_total", "late_requests_total", "bubble_seconds_total"):
            assert await running.metric(f"shoal_worker_{name}{LABEL}") >= 0
        for state in ("running", "waiting"):
            series = f'shoal_worker_requests{{model_name="byte",state="{state}"}}'
            assert await running.metric(series) == 0
    await running.wait_for_metric(f"shoal_worker_sessions{LABEL}", lambda value: value == 0)


async def test_aborts_before_and_after_the_first_token_free_the_pages(
    running: AgentProcess,
) -> None:
    async with session(running) as client:
        for handle in range(40):
            await _generate(client, handle, [handle] * 50, 5000)
        await client.abort(*range(20))
        await client.until(lambda: client.finished.keys() >= set(range(20)))
        await client.until(lambda: 39 in client.token_ids)
        await client.abort(*range(20, 40))
        await client.until(lambda: len(client.finished) == 40)
        await _assert_all_free(running)
        flushed = await running.stub.FlushCache(worker_pb2.FlushCacheRequest())
        assert flushed.num_pages > 0
        free = 'shoal_worker_pages{model_name="byte",state="free"}'
        await running.wait_for_metric(free, lambda value: value == 512)


async def test_a_session_that_breaks_frees_its_pages(running: AgentProcess) -> None:
    async with session(running) as client:
        for handle in range(20):
            await _generate(client, handle, [handle] * 50, 5000)
        await client.until(lambda: len(client.token_ids) == 20)
    await _assert_all_free(running)


@pytest.mark.parametrize(
    ("submit", "code"),
    [
        (worker_pb2.Submit(), grpc.StatusCode.INVALID_ARGUMENT),
        (worker_pb2.Submit(prompt_ids=[1 << 31]), grpc.StatusCode.INVALID_ARGUMENT),
        (worker_pb2.Submit(prompt_ids=[1] * 100_000), grpc.StatusCode.INVALID_ARGUMENT),
        (
            worker_pb2.Submit(
                prompt_ids=[1], sampling=common_pb2.SamplingParams(temperature=float("nan"))
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            worker_pb2.Submit(
                prompt_ids=[1], sampling=common_pb2.SamplingParams(logit_bias={1 << 30: 1.0})
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_bad_input_is_refused_and_the_engine_lives(
    running: AgentProcess, submit: worker_pb2.Submit, code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await running.stub.Generate(worker_pb2.WorkerGenerateRequest(submit=submit)).read()
    assert failure.value.code() == code
    good = worker_pb2.Submit(prompt_ids=[1], sampling=common_pb2.SamplingParams(max_tokens=2))
    call = running.stub.Generate(worker_pb2.WorkerGenerateRequest(submit=good))
    tokens = [token async for response in call for token in response.token_ids]
    assert tokens
    await _assert_all_free(running)


async def test_a_stopped_engine_is_noticed_while_idle(tmp_path: Path) -> None:
    settings = {"limits": {"silence": 3.0}}
    async with agent(tmp_path, *FLAGS, settings=settings) as running:
        (rank,) = running.ranks()
        rank.send_signal(signal.SIGSTOP)
        assert await running.wait_for_exit(20) == 1
        assert "no sign of life" in running.errors()
        assert "torch" not in running.errors()


async def test_the_agent_does_not_load_torch(running: AgentProcess) -> None:
    maps = await asyncio.to_thread(Path(f"/proc/{running.process.pid}/maps").read_text)
    assert "torch" not in maps


async def test_the_level_of_the_log_changes_in_the_agent_and_in_its_rank(tmp_path: Path) -> None:
    async with agent(tmp_path, "--log-format=json", "--log-level=error", settings={}) as running:
        transport = httpx.AsyncHTTPTransport(uds=f"{tmp_path}/admin.sock")
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
            assert (await client.post("/loglevel?level=debug")).text == "debug\n"
        async with asyncio.timeout(30):
            while '"service": "rank0"' not in running.errors():  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.02)
        lines = [json.loads(line) for line in running.errors().splitlines()]
        told = [line["service"] for line in lines if line.get("from") == "debug"]
        assert sorted(told) == ["rank0", "worker"]
