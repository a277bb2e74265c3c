"""Peers die in every way and at every moment; no token is lost or doubled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from protos import common_pb2, worker_pb2
from services.common.errors import DeadlineExceeded, PeerLost, Unavailable
from services.gateway.domain import Chunk, TextOptions
from services.gateway.live import LiveGeneration
from services.gateway.peers.session import SessionTimes
from tests.gateway.core.conftest import Rig, collect, joined, make_rig, request
from tests.gateway.core.fakes import FakeWorker, expected_ids, expected_text

T = TypeVar("T")


async def read_until(generation: LiveGeneration, num_ids: int) -> list[Chunk]:
    """Reads until that many ids have come."""
    chunks: list[Chunk] = []
    while sum(len(chunk.token_ids) for chunk in chunks) < num_ids:
        chunks.append(await anext(generation))
    return chunks


def worker_of(rig: Rig) -> FakeWorker:
    (busy,) = [worker for worker in rig.workers if worker.running]
    return busy


async def test_a_stream_goes_on_at_another_worker(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        generation = await rig.core.start(request(max_tokens=60, logprobs=0, seed=5))
        chunks = await read_until(generation, 7)
        await worker_of(rig).server.kill()
        chunks += await collect(generation)
        assert joined(chunks) == (expected_text("hello", 60), expected_ids("hello", 60))
        logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
        assert [entry.logprob for entry in logprobs] == [-float(i) for i in range(60)]
        assert generation.usage.completion_tokens == 60
        (resumed,) = [s for w in rig.workers for s in w.submits if s.resume_ids]
        assert list(resumed.resume_ids) == expected_ids("hello", len(resumed.resume_ids))
        assert len(resumed.resume_ids) >= 7
        assert resumed.sampling.seed == 5
        moves = rig.registry.get_sample_value("shoal_gateway_resumes_total", {"peer": "worker"})
        assert moves == 1
        await rig.settled()


async def test_a_stop_string_is_found_across_the_move(tmp_path: Path) -> None:
    text = expected_text("hello", 60)
    stop = text[20:24]
    async with make_rig(tmp_path, workers=2, detokenizers=2) as rig:
        generation = await rig.core.start(request(max_tokens=60, text=TextOptions(stop=(stop,))))
        chunks = await read_until(generation, 5)
        await worker_of(rig).server.kill()
        (busy,) = [fake for fake in rig.detokenizers if fake.texts]
        await busy.server.kill()
        chunks += await collect(generation)
        end = text.index(stop)
        assert joined(chunks) == (text[:end], expected_ids("hello", end + 4))
        assert generation.usage.completion_tokens == end + 4
        await rig.settled()


async def test_a_choice_that_ends_at_a_stop_string_while_it_moves_goes_nowhere(rig: Rig) -> None:
    text = expected_text("hello", 60)
    stop = text[20:24]
    rig.worker.auto = False
    generation = await rig.core.start(request(max_tokens=60, text=TextOptions(stop=(stop,))))
    await rig.until(lambda: rig.detokenizer.texts)
    rig.detokenizer.hold = True
    rig.worker.step(tokens=30)
    await rig.until(lambda: not rig.detokenizer.texts)  # it has found the stop string
    await rig.worker.server.kill()
    await rig.until_fleet(lambda fleet: not fleet.workers.ready)
    rig.detokenizer.release()
    chunks: list[Chunk] = []
    async with asyncio.timeout(10):
        while not chunks or chunks[-1].finish_reason is None:
            chunks.append(await anext(generation))
    rig.worker.auto = True
    await rig.worker.server.start()
    await rig.until_fleet(lambda fleet: fleet.workers.ready)
    await collect(await rig.core.start(request()))
    assert len(rig.worker.submits) == 2  # one a request
    chunks += await collect(generation)
    assert joined(chunks)[0] == text[: text.index(stop)]
    assert generation.usage.completion_tokens == text.index(stop) + 4
    await rig.settled()


async def test_with_one_worker_a_stream_waits_for_its_return(rig: Rig) -> None:
    generation = await rig.core.start(request(max_tokens=40))
    chunks = await read_until(generation, 3)
    await rig.worker.server.kill()
    await rig.until_fleet(lambda fleet: not fleet.workers.ready)
    assert rig.core.readiness().reasons == ("no worker is ready",)
    rig.worker.info.epoch = 2
    await rig.worker.server.start()
    chunks += await collect(generation)
    assert joined(chunks) == (expected_text("hello", 40), expected_ids("hello", 40))
    await rig.settled()


async def test_the_wait_ends_at_the_deadline(rig: Rig) -> None:
    generation = await rig.core.start(request(max_tokens=900, timeout=0.5))
    await read_until(generation, 3)
    await rig.worker.server.kill()
    with pytest.raises(Exception, match="deadline passed"):
        await collect(generation)
    rig.assert_nothing_left()


@pytest.mark.parametrize("lost", ["worker", "detokenizer"])
async def test_a_deadline_is_told_as_one_though_the_wait_for_a_peer_ends_early(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A loop may round its timers; what a wait is given must outlast the deadline by more."""
    fleet = rig.core.fleet
    wait_for = fleet.wait_for

    async def wait_less(find: Callable[[], T | None], patience: float, reason: str) -> T:
        return await wait_for(find, max(0.0, patience - 0.2), reason)

    generation = await rig.core.start(request(max_tokens=900, timeout=0.6))
    await read_until(generation, 3)
    monkeypatch.setattr(fleet, "wait_for", wait_less)
    await (rig.worker if lost == "worker" else rig.detokenizer).server.kill()
    with pytest.raises(DeadlineExceeded):
        await collect(generation)
    rig.assert_nothing_left()


async def test_a_resume_needs_the_same_fingerprint(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        rig.workers[1].info.fingerprint = "other"
        await rig.workers[1].server.kill()
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 1)
        generation = await rig.core.start(request(max_tokens=900, timeout=1.0))
        await read_until(generation, 3)
        await rig.workers[1].server.start()
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 2)
        await rig.workers[0].server.kill()
        with pytest.raises(Exception, match="deadline passed"):
            await collect(generation)
        assert not rig.workers[1].submits


async def test_the_budget_ends_in_one_error(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2, max_resumes=0) as rig:
        generation = await rig.core.start(request(max_tokens=900))
        await read_until(generation, 3)
        await worker_of(rig).server.kill()
        with pytest.raises(PeerLost) as error:
            await collect(generation)
        assert str(tmp_path) not in error.value.message
        rig.assert_nothing_left()


async def test_a_request_given_up_in_the_moment_of_a_loss_moves_nowhere(rig: Rig) -> None:
    generation = await rig.core.start(request(max_tokens=900))
    (choice,) = generation._choices
    generation.on_worker_lost(choice, PeerLost("gone"))
    await generation.aclose()  # before the move has begun; a coroutine left behind would warn
    await rig.settled()


async def test_a_worker_that_hands_its_requests_back_is_left(tmp_path: Path) -> None:
    """A request rejected as UNAVAILABLE, or ended as aborted, goes on elsewhere."""
    async with make_rig(tmp_path, workers=2) as rig:
        for finished in (False, True):
            generation = await rig.core.start(request(max_tokens=60))
            chunks = await read_until(generation, 3)
            worker = worker_of(rig)
            (handle,) = worker.running
            worker.running.clear()
            worker.drain()
            if finished:
                worker.pending.step.finished.add(
                    handle=handle, reason=common_pb2.FINISH_REASON_ABORT
                )
            else:
                error = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="bye")
                worker.pending.step.rejected.add(handle=handle, error=error)
            worker.send()
            chunks += await collect(generation)
            assert joined(chunks)[1] == expected_ids("hello", 60)
            await worker.server.kill()
            await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 1)
            await worker.server.start()
            await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 2)
        await rig.settled()


async def test_a_draining_worker_gets_no_new_work_and_keeps_its_own(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        generation = await rig.core.start(request(max_tokens=100))
        draining = worker_of(rig)
        draining.drain()
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 1)
        for _ in range(5):
            await collect(await rig.core.start(request("other")))
        chunks = await collect(generation)
        assert joined(chunks)[0] == expected_text("hello", 100)
        assert len(draining.submits) == 1


async def test_an_engine_that_restarts_behind_its_agent_is_noticed(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        generation = await rig.core.start(request(max_tokens=60))
        chunks = await read_until(generation, 3)
        worker = worker_of(rig)
        worker.info = worker_pb2.WorkerInfo.FromString(worker.info.SerializeToString())
        worker.info.epoch += 1
        chunks += await collect(generation)
        assert joined(chunks)[1] == expected_ids("hello", 60)


async def test_lost_before_acceptance(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        for worker in rig.workers:
            worker.accept = False
        task = asyncio.create_task(rig.core.start(request()))
        await rig.until(lambda: any(worker.submits for worker in rig.workers))
        (first,) = [worker for worker in rig.workers if worker.submits]
        (other,) = [worker for worker in rig.workers if not worker.submits]
        other.accept = True
        await first.server.kill()
        assert joined(await collect(await task))[1] == expected_ids("hello", 10)
        await rig.settled()


async def test_a_detokenizer_dies_with_ids_in_flight(tmp_path: Path) -> None:
    async with make_rig(tmp_path, detokenizers=2) as rig:
        rig.worker.auto = False
        generation = await rig.core.start(request(max_tokens=30))
        (busy,) = [fake for fake in rig.detokenizers if fake.frames]
        (idle,) = [fake for fake in rig.detokenizers if not fake.frames]
        for _ in range(5):
            rig.worker.step()
        chunks = await read_until(generation, 5)
        busy.hold = True
        for _ in range(4):
            rig.worker.step()
        await rig.until(lambda: len(next(iter(busy.texts.values())).ids) == 9)
        await busy.server.kill()
        rig.worker.auto = True
        chunks += await collect(generation)
        assert joined(chunks) == (expected_text("hello", 30), expected_ids("hello", 30))
        (opened,) = [opened for frame in idle.frames for opened in frame.opens]
        assert list(opened.replay_ids) == expected_ids("hello", 5)
        assert opened.skip_chars == 5
        await rig.settled()


async def test_a_detokenizer_dies_before_the_last_text(rig: Rig) -> None:
    rig.detokenizer.hold = True
    generation = await rig.core.start(request(max_tokens=10))
    await rig.until(lambda: any(frame.ends for frame in rig.detokenizer.frames))
    await rig.detokenizer.server.kill()
    rig.detokenizer.hold = False
    await rig.detokenizer.server.start()
    chunks = await collect(generation)
    assert joined(chunks) == (expected_text("hello", 10), expected_ids("hello", 10))
    await rig.settled()


async def test_a_tokenizers_death_repeats_the_encode(tmp_path: Path) -> None:
    async with make_rig(tmp_path, tokenizers=2) as rig:
        for tokenizer in rig.tokenizers:
            tokenizer.hold = True
        task = asyncio.create_task(rig.core.start(request()))
        await rig.until(lambda: any(tokenizer.jobs for tokenizer in rig.tokenizers))
        (busy,) = [tokenizer for tokenizer in rig.tokenizers if tokenizer.jobs]
        (other,) = [tokenizer for tokenizer in rig.tokenizers if not tokenizer.jobs]
        other.hold = False
        await busy.server.kill()
        assert joined(await collect(await task))[0] == expected_text("hello", 10)
        await rig.settled()


async def test_a_resume_does_not_take_overload_for_an_answer(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        generation = await rig.core.start(request(max_tokens=60))
        chunks = await read_until(generation, 3)
        worker = worker_of(rig)
        (other,) = [fake for fake in rig.workers if fake is not worker]
        other.reject_with = common_pb2.Error(
            code=common_pb2.ERROR_CODE_OVERLOADED, message="queue full", retry_after_ms=20
        )
        await worker.server.kill()
        await rig.until(lambda: len(other.submits) >= 3)
        other.reject_with = None
        chunks += await collect(generation)
        assert joined(chunks)[1] == expected_ids("hello", 60)
        await rig.settled()


async def test_nor_does_a_resume_before_the_first_id(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        for worker in rig.workers:
            worker.auto = False
        generation = await rig.core.start(request())
        worker = worker_of(rig)
        (other,) = [fake for fake in rig.workers if fake is not worker]
        other.reject_with = common_pb2.Error(
            code=common_pb2.ERROR_CODE_OVERLOADED, message="queue full", retry_after_ms=20
        )
        await worker.server.kill()
        await rig.until(lambda: len(other.submits) >= 3)
        other.reject_with = None
        other.auto = True
        assert joined(await collect(generation))[1] == expected_ids("hello", 10)
        await rig.settled()


async def test_lost_before_acceptance_it_waits_for_a_lone_worker_that_is_not_yet_able(
    rig: Rig,
) -> None:
    rig.worker.accept = False
    task = asyncio.create_task(rig.core.start(request()))
    await rig.until(lambda: rig.worker.submits)
    await rig.worker.server.kill()
    rig.worker.info.epoch = 2
    rig.worker.accept = True
    rig.worker.reject_with = common_pb2.Error(
        code=common_pb2.ERROR_CODE_UNAVAILABLE, message="not yet", retry_after_ms=20
    )
    await rig.worker.server.start()
    await rig.until(lambda: len(rig.worker.submits) >= 2)
    rig.worker.reject_with = None
    assert joined(await collect(await task))[1] == expected_ids("hello", 10)
    await rig.settled()


async def test_a_peer_that_cancels_its_session_is_a_peer_that_was_lost(tmp_path: Path) -> None:
    async with make_rig(tmp_path, workers=2) as rig:
        generation = await rig.core.start(request(max_tokens=60))
        chunks = await read_until(generation, 3)
        worker_of(rig).cancel_session()
        chunks += await collect(generation)
        assert joined(chunks)[1] == expected_ids("hello", 60)
        await rig.until_fleet(lambda fleet: len(fleet.workers.ready) == 2)


async def test_a_silent_worker_is_dead_though_its_socket_lives(tmp_path: Path) -> None:
    times = SessionTimes(peer_timeout=1.5, min_backoff=0.01, max_backoff=0.05)
    async with make_rig(tmp_path, workers=2, times=times) as rig:
        generation = await rig.core.start(request(max_tokens=60))
        chunks = await read_until(generation, 3)
        worker = worker_of(rig)
        worker.freeze()
        chunks += await collect(generation)
        assert joined(chunks) == (expected_text("hello", 60), expected_ids("hello", 60))


async def test_no_worker_is_503_unless_told_to_hold(tmp_path: Path) -> None:
    async with make_rig(tmp_path, hold_timeout=5) as rig:
        await rig.worker.server.kill()
        await rig.until_fleet(lambda fleet: not fleet.workers.ready)
        held = asyncio.create_task(rig.core.start(request()))
        await asyncio.wait([held], timeout=0.05)
        assert not held.done()
        await rig.worker.server.start()
        assert joined(await collect(await held))[0] == expected_text("hello", 10)
        rig.core.hold_timeout = 0
        await rig.worker.server.kill()
        await rig.until_fleet(lambda fleet: not fleet.workers.ready)
        with pytest.raises(Unavailable) as error:
            await rig.core.start(request())
        assert error.value.retry_after is not None
        rig.assert_nothing_left()


async def test_streams_survive_a_random_massacre(tmp_path: Path) -> None:
    """Workers and detokenizers die in turn under 40 streams; every stream is exact."""
    rng = random.Random(20)
    async with make_rig(tmp_path, workers=3, detokenizers=2, max_resumes=100) as rig:
        prompts = [f"prompt {number}" for number in range(40)]

        async def stream(prompt: str) -> tuple[str, list[int]]:
            return joined(await collect(await rig.core.start(request(prompt, max_tokens=300))))

        streams = [asyncio.create_task(stream(prompt)) for prompt in prompts]
        servers = [worker.server for worker in rig.workers]
        servers += [detokenizer.server for detokenizer in rig.detokenizers]
        kills = 0
        while not all(task.done() for task in streams):
            server = rng.choice(servers)
            await server.kill()
            kills += 1
            await asyncio.wait(streams, timeout=rng.uniform(0.02, 0.1))
            await server.start()
        for prompt, task in zip(prompts, streams, strict=True):
            assert task.result() == (expected_text(prompt, 300), expected_ids(prompt, 300))
        assert kills > 3
        await rig.settled()
