"""The agent process over real sockets, with a scripted rank in the engine's place."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from protos import common_pb2, worker_pb2
from tests.worker.agent_client import SCRIPTED, AgentProcess, agent, session

pytestmark = pytest.mark.integration

LABEL = '{model_name="scripted"}'
SLOW = "--fake-step-ms=20"


async def test_a_session_starts_with_the_info_and_streams_tokens(tmp_path: Path) -> None:
    async with agent(tmp_path) as running, session(running) as client:
        first = await client.call.read()
        assert isinstance(first, worker_pb2.WorkerSessionResponse)
        assert first.info.model == "scripted"
        assert first.step.epoch == 7
        await client.submit(0, [50], max_tokens=4)
        await client.submit(9, [70], max_tokens=2)
        await client.until(lambda: client.finished.keys() == {0, 9})
        assert client.token_ids == {0: [50, 51, 52, 53], 9: [70, 71]}
        assert client.accepted == [0, 9]
        assert client.finished[0].reason == common_pb2.FINISH_REASON_LENGTH
        await client.submit(0, [10], max_tokens=1)  # a finished handle is free
        await client.until(lambda: client.token_ids[0][4:] == [10])
        await running.wait_for_metric(f"shoal_worker_handles{LABEL}", lambda value: value == 0)
        assert await running.metric(f"vllm:generation_tokens_total{LABEL}") == 7
        ended = '{finished_reason="length",model_name="scripted"}'
        assert await running.metric(f"vllm:request_success_total{ended}") == 3
        assert await running.metric(f"vllm:time_to_first_token_seconds_count{LABEL}") == 3
        assert await running.metric(f"vllm:inter_token_latency_seconds_count{LABEL}") == 4


async def test_sessions_use_the_same_handles_apart(tmp_path: Path) -> None:
    async with agent(tmp_path, SLOW) as running, session(running) as a, session(running) as b:
        await a.submit(1, [100], max_tokens=20)
        await b.submit(1, [200], max_tokens=20)
        await asyncio.gather(a.until(lambda: 1 in a.finished), b.until(lambda: 1 in b.finished))
        assert a.token_ids == {1: list(range(100, 120))}
        assert b.token_ids == {1: list(range(200, 220))}


async def test_a_live_handle_cannot_be_used_twice(tmp_path: Path) -> None:
    async with agent(tmp_path, SLOW) as running, session(running) as client:
        await client.submit(3, [5])
        await client.submit(3, [6])
        await client.until(lambda: bool(client.rejected))
        assert client.rejected[0].handle == 3
        assert client.rejected[0].error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        await client.submit(4, [])  # refused by the engine; its handle is free again
        await client.until(lambda: len(client.rejected) == 2)
        await client.submit(4, [7], max_tokens=1)
        await client.until(lambda: 4 in client.finished)
        await client.abort(3)
        await client.until(lambda: 3 in client.finished)
        await running.wait_for_metric(f"shoal_worker_handles{LABEL}", lambda value: value == 0)


async def test_an_abort_frees_the_handle_and_an_unknown_one_is_ignored(tmp_path: Path) -> None:
    async with agent(tmp_path, SLOW) as running, session(running) as client:
        await client.submit(1, [5])
        await client.until(lambda: 1 in client.token_ids)
        await client.abort(1, 77)
        await client.until(lambda: 1 in client.finished)
        assert client.finished[1].reason == common_pb2.FINISH_REASON_ABORT
        await client.abort(1)
        await running.wait_for_metric(f"shoal_worker_handles{LABEL}", lambda value: value == 0)
        assert await running.metric(f"shoal_abort_to_kv_free_seconds_count{LABEL}") == 1
        assert await running.metric(f"shoal_abort_to_kv_free_seconds_sum{LABEL}") < 0.5
        await _assert_idle(running)


async def test_a_client_that_leaves_takes_its_requests_with_it(tmp_path: Path) -> None:
    async with agent(tmp_path, SLOW) as running, session(running) as staying:
        await staying.submit(1, [500])
        async with session(running) as leaving:
            for handle in range(8):
                await leaving.submit(handle, [5])
            await leaving.until(lambda: len(leaving.token_ids) == 8)
        handles = f"shoal_worker_handles{LABEL}"
        await running.wait_for_metric(handles, lambda value: value == 1)
        await running.wait_for_metric(f"shoal_worker_engine_requests{LABEL}", lambda v: v == 1)
        seen = len(staying.token_ids.get(1, []))
        await staying.until(lambda: len(staying.token_ids.get(1, [])) > seen + 3)
        tokens = staying.token_ids[1]
        assert tokens == list(range(500, 500 + len(tokens)))
    assert "fault in" not in running.errors()


async def test_a_silent_client_is_given_up(tmp_path: Path) -> None:
    settings = {"rank_module": SCRIPTED, "peer_timeout": 0.5}
    async with agent(tmp_path, settings=settings) as running:
        call = running.open_session()
        await call.write(worker_pb2.WorkerSessionRequest(submits=[_submit(1)]))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        await running.wait_for_metric(f"shoal_worker_handles{LABEL}", lambda value: value == 0)
        await _assert_idle(running)


async def test_heartbeats_come_without_work(tmp_path: Path) -> None:
    async with agent(tmp_path) as running, session(running) as client:
        async with asyncio.timeout(20):
            for _ in range(2):  # the greeting, then a heartbeat
                response = await client.call.read()
        assert isinstance(response, worker_pb2.WorkerSessionResponse)
        assert response.step.epoch == 7
        assert response.step.load.num_pages == 100
        assert response.step.load.num_free_pages == 100


async def test_generate_streams_and_its_cancel_aborts(tmp_path: Path) -> None:
    async with agent(tmp_path, SLOW) as running:
        submit = _submit(12, max_tokens=3)
        tokens: list[int] = []
        async for response in running.stub.Generate(_generate(submit)):
            tokens.extend(response.token_ids)
        assert tokens == [12, 13, 14]
        assert response.finished.reason == common_pb2.FINISH_REASON_LENGTH
        call = running.stub.Generate(_generate(_submit(30)))
        await call.read()
        call.cancel()
        await running.wait_for_metric(f"shoal_worker_handles{LABEL}", lambda value: value == 0)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in running.stub.Generate(_generate(_submit(30)), timeout=0.3):
                pass
        assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await running.wait_for_metric(f"shoal_worker_handles{LABEL}", lambda value: value == 0)
        empty = worker_pb2.WorkerGenerateRequest()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await running.stub.Generate(empty).read()
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await _assert_idle(running)
    assert "fault in" not in running.errors()


async def test_flush_cache_asks_the_engine(tmp_path: Path) -> None:
    async with agent(tmp_path) as running:
        answer = await running.stub.FlushCache(worker_pb2.FlushCacheRequest())
        assert answer.num_pages == 11


async def test_while_loading_it_is_not_ready_and_says_how_far_it_is(tmp_path: Path) -> None:
    async with agent(tmp_path, "--model=load-for-ever", wait=False) as running:
        await running.wait_for_health(serving=False)
        async with asyncio.timeout(20):
            while True:
                answer = await running.stub.GetInfo(worker_pb2.GetInfoRequest())
                if answer.progress.phase == "loading weights":
                    break
        assert not answer.HasField("info")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await running.open_session().read()
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "loading" in (failure.value.details() or "")
        assert (await running.admin("/readyz")).status_code == 503
        assert (await running.admin("/livez")).status_code == 200
        running.process.terminate()
        assert await running.wait_for_exit() == 0


async def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    async with agent(tmp_path, SLOW) as running, session(running) as client:
        ranks = running.ranks()
        await client.submit(1, [5], max_tokens=50)
        await client.until(lambda: 1 in client.token_ids)
        running.process.send_signal(signal.SIGTERM)
        await client.until(lambda: client.draining)
        await running.wait_for_health(serving=False)
        assert (await running.admin("/readyz")).status_code == 503
        await client.submit(2, [5])
        await client.until(lambda: bool(client.rejected))
        assert client.rejected[0].error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        await client.until(lambda: 1 in client.finished)
        assert client.token_ids[1] == list(range(5, 55))
        with pytest.raises(EOFError, match="OK"):
            await client.until(lambda: False)
        assert await running.wait_for_exit() == 0
        assert not any(rank.is_running() for rank in ranks)


async def test_the_drain_has_an_end(tmp_path: Path) -> None:
    async with agent(tmp_path, SLOW, "--drain-timeout=0.2") as running, session(running) as client:
        await client.submit(1, [5])
        await client.until(lambda: 1 in client.token_ids)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.until(lambda: False)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await running.wait_for_exit() == 0


async def test_the_drain_rpc_refuses_new_work_and_keeps_the_process(tmp_path: Path) -> None:
    async with agent(tmp_path, SLOW) as running, session(running) as client:
        await client.submit(1, [5], max_tokens=30)
        await client.until(lambda: 1 in client.token_ids)
        answer = await running.stub.Drain(worker_pb2.DrainRequest())
        assert answer.num_requests == 1
        await running.wait_for_health(serving=False)
        await client.until(lambda: 1 in client.finished)
        assert running.process.returncode is None


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
async def test_a_dead_rank_ends_streams_and_the_agent(tmp_path: Path, death: int) -> None:
    async with agent(tmp_path, SLOW) as running, session(running) as client:
        await client.submit(1, [5])
        await client.until(lambda: 1 in client.token_ids)
        (rank,) = running.ranks()
        rank.send_signal(death)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.until(lambda: False)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await running.wait_for_exit(10) == 1
        name = signal.Signals(death).name
        assert running.errors().splitlines()[-1] == (
            f"shoal worker: the engine process was killed by {name}"
        )


async def test_a_stopped_rank_is_noticed(tmp_path: Path) -> None:
    settings = {"rank_module": SCRIPTED, "limits": {"silence": 1.0}}
    async with agent(tmp_path, SLOW, settings=settings) as running, session(running) as client:
        await client.submit(1, [5])
        await client.until(lambda: 1 in client.token_ids)
        (rank,) = running.ranks()
        rank.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.until(lambda: False)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await running.wait_for_exit(10) == 1
        assert "no sign of life" in running.errors()
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


async def test_an_address_that_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/absent/worker.sock"
    async with agent(tmp_path, f"--address={address}", wait=False) as running:
        assert await running.wait_for_exit() == 1
        assert running.errors().splitlines()[-1] == (
            f"shoal: --address {address}: there is no directory {tmp_path}/absent"
        )


def _submit(first_id: int, max_tokens: int = 0) -> worker_pb2.Submit:
    submit = worker_pb2.Submit(handle=1, prompt_ids=[first_id])
    if max_tokens:
        submit.sampling.max_tokens = max_tokens
    return submit


def _generate(submit: worker_pb2.Submit) -> worker_pb2.WorkerGenerateRequest:
    return worker_pb2.WorkerGenerateRequest(submit=submit)


async def _assert_idle(running: AgentProcess) -> None:
    """Nothing of any request is left, in the agent or in the engine."""
    for series in ("shoal_worker_handles", "shoal_worker_engine_requests"):
        await running.wait_for_metric(f"{series}{LABEL}", lambda value: value == 0)
    in_flight = 'shoal_worker_pages{model_name="scripted",state="in_flight"}'
    await running.wait_for_metric(in_flight, lambda value: value == 0)
