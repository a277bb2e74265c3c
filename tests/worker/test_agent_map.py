"""The agent's map of handles against an engine made of plain lists: no process, no socket."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from protos import common_pb2, engine_pb2, worker_pb2
from services.common.errors import Unavailable
from services.worker.agent import Agent
from services.worker.metrics import MAX_SAMPLED, WorkerMetrics
from services.worker.sessions import Session

LABELS = {"model_name": "m"}


class Bench:
    """An agent, the commands it sent, and an engine's handles in order of submission."""

    def __init__(self, *, handoff: bool = False, queued: bool = False) -> None:
        """With `queued`, commands stay where they can be taken back, until `obey`."""
        self.registry = CollectorRegistry()
        self.now = 0.0
        self.commands: list[engine_pb2.EngineCommand] = []
        self.agent = Agent(
            self.commands.append,
            WorkerMetrics(self.registry, clock=lambda: self.now),
            handoff=handoff,
            withdraw=self._withdraw if queued else lambda handle: False,
        )
        self.live: dict[int, int] = {}  # the engine's handle -> first prompt id
        self.step = 0
        info = worker_pb2.WorkerInfo(epoch=3, model="m")
        self.agent.handle_event(engine_pb2.EngineEvent(ready=info))

    def open(self) -> Session:
        return self.agent.open_session()[0]

    def submit(self, session: Session, name: int, prompt: int) -> None:
        submit = worker_pb2.Submit(handle=name, prompt_ids=[prompt])
        self.agent.receive(session, worker_pb2.WorkerSessionRequest(submits=[submit]))

    def abort(self, session: Session, name: int) -> None:
        self.agent.receive(session, worker_pb2.WorkerSessionRequest(aborts=[name]))

    def _withdraw(self, handle: int) -> bool:
        for command in self.commands:
            kept = [submit for submit in command.submits if submit.handle != handle]
            if len(kept) < len(command.submits):
                del command.submits[:]
                command.submits.extend(kept)
                return True
        return False

    def obey(self) -> worker_pb2.StepFrame:
        """Takes the commands into the engine and returns the frame that answers them."""
        self.step += 1
        frame = worker_pb2.StepFrame(epoch=3, step=self.step)
        for command in self.commands:
            for submit in command.submits:
                assert submit.handle not in self.live
                self.live[submit.handle] = submit.prompt_ids[0]
                frame.accepted.append(submit.handle)
            for handle in command.aborts:
                if self.live.pop(handle, None) is not None:
                    frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_ABORT)
        self.commands.clear()
        return frame

    def deliver(self, frame: worker_pb2.StepFrame) -> None:
        self.agent.handle_event(engine_pb2.EngineEvent(step=frame))

    def sample(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(name, LABELS | labels)
        assert value is not None
        return value


def take(session: Session) -> worker_pb2.StepFrame:
    """What the session would send now, as its writer takes it."""
    message, session.outbox.pending = session.outbox.pending, worker_pb2.WorkerSessionResponse()
    return message.step


async def test_random_lives_end_with_an_empty_map() -> None:
    rng = random.Random(5)
    bench = Bench()
    sessions = [bench.open() for _ in range(3)]
    received: Counter[tuple[int, int]] = Counter()
    for _ in range(2000):
        index = rng.randrange(3)
        name = rng.randrange(6)
        action = rng.random()
        if action < 0.5:
            bench.submit(sessions[index], name, 100 * index + name)
        elif action < 0.7:
            bench.abort(sessions[index], name)
        elif action < 0.72:
            bench.agent.close_session(sessions[index])
            sessions[index] = bench.open()
        if rng.random() < 0.5:
            bench.deliver(_random_frame(bench, rng))
            for number, session in enumerate(sessions):
                _check_rows(take(session), number, received)
    for session in sessions:
        bench.agent.close_session(session)
    bench.deliver(bench.obey())
    assert bench.agent.num_requests == 0
    assert not bench.live
    assert bench.sample("shoal_worker_handles") == 0
    assert bench.sample("shoal_worker_sessions") == 0
    assert min(received.values()) > 20  # every session's every handle was used


def _random_frame(bench: Bench, rng: random.Random) -> worker_pb2.StepFrame:
    """Some rows, one or two tokens each; now and then a request ends or fails."""
    frame = bench.obey()
    for handle, prompt in list(bench.live.items()):
        count = rng.choice((0, 1, 1, 2))
        if count:
            frame.handles.append(handle)
            frame.counts.append(count)
            frame.token_ids.extend([prompt] * count)
        fate = rng.random()
        if fate < 0.1:
            del bench.live[handle]
            frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_STOP)
        elif fate < 0.12:
            del bench.live[handle]
            frame.rejected.add(handle=handle)
    return frame


def _check_rows(
    step: worker_pb2.StepFrame, number: int, received: Counter[tuple[int, int]]
) -> None:
    token_ids = iter(step.token_ids)
    for name, count in zip(step.handles, step.counts, strict=True):
        for _ in range(count):
            assert next(token_ids) == 100 * number + name
        received[number, name] += count
    assert next(token_ids, None) is None


async def test_frames_merge_until_they_are_taken_and_the_last_load_stands() -> None:
    bench = Bench()
    session = bench.open()
    bench.submit(session, 4, 9)
    frame = bench.obey()
    (handle,) = bench.live
    frame.load.num_running = 1
    bench.deliver(frame)
    for token in (11, 12):
        bench.deliver(worker_pb2.StepFrame(step=2, handles=[handle], counts=[1], token_ids=[token]))
    last = worker_pb2.StepFrame(epoch=3, step=3)
    last.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_STOP, stop_token_id=12)
    last.load.num_running = 0
    bench.deliver(last)
    step = take(session)
    assert (step.epoch, step.step) == (3, 3)
    assert list(step.accepted) == [4]
    assert list(step.handles) == [4, 4]
    assert list(step.token_ids) == [11, 12]
    assert step.finished[0].handle == 4
    assert step.load.num_running == 0


@pytest.mark.parametrize("num_sessions", [1, 2])
async def test_logprobs_and_refusals_come_under_the_clients_names(num_sessions: int) -> None:
    bench = Bench()
    session, *_ = [bench.open() for _ in range(num_sessions)]
    bench.submit(session, 40, 9)
    bench.submit(session, 41, 9)
    bench.obey()
    first, second = bench.live
    frame = worker_pb2.StepFrame(epoch=3, step=1, handles=[first], counts=[1], token_ids=[5])
    frame.logprobs.add(handle=first).tokens.add(token_id=5, logprob=-1)
    frame.rejected.add(handle=second)
    bench.deliver(frame)
    step = take(session)
    assert list(step.handles) == [40]
    assert step.logprobs[0].handle == 40
    assert step.logprobs[0].tokens[0].token_id == 5
    assert step.rejected[0].handle == 41


@pytest.mark.parametrize("num_sessions", [1, 2])
async def test_that_a_request_waits_for_its_grammar_is_told_to_whose_it_is(
    num_sessions: int,
) -> None:
    bench = Bench()
    session, *others = [bench.open() for _ in range(num_sessions)]
    for name in (40, 41):
        bench.submit(session, name, 9)
    bench.obey()
    frame = worker_pb2.StepFrame(epoch=3, step=1, compiling=[*bench.live])
    frame.load.num_running = 7
    bench.deliver(frame)
    step = take(session)
    assert (list(step.compiling), list(step.accepted)) == ([40, 41], [])
    assert step.load.num_running == 7
    assert not any(other.outbox.pending.HasField("step") for other in others)


async def test_rows_after_an_abort_are_dropped_and_it_ends_as_aborted() -> None:
    bench = Bench()
    session = bench.open()
    bench.submit(session, 1, 9)
    bench.deliver(bench.obey())
    (handle,) = bench.live
    bench.abort(session, 1)
    bench.abort(session, 1)
    assert [list(command.aborts) for command in bench.commands] == [[handle]]
    crossing = worker_pb2.StepFrame(step=2, handles=[handle], counts=[1], token_ids=[5])
    crossing.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_STOP)
    take(session)
    bench.deliver(crossing)
    step = take(session)
    assert not step.handles
    assert step.finished[0].reason == common_pb2.FINISH_REASON_ABORT
    assert bench.agent.num_requests == 0


@pytest.mark.parametrize("num_sessions", [1, 2])
async def test_a_digest_reaches_every_session_and_outlives_later_frames(
    num_sessions: int,
) -> None:
    bench = Bench()
    sessions = [bench.open() for _ in range(num_sessions)]
    bench.submit(sessions[0], 1, 9)
    frame = bench.obey()
    frame.load.prefix_digest.extend([1, 2])
    frame.load.has_digest = True
    bench.deliver(frame)
    (handle,) = bench.live
    bench.deliver(worker_pb2.StepFrame(step=2, handles=[handle], counts=[1], token_ids=[5]))
    for session in sessions:
        load = take(session).load
        assert (load.has_digest, list(load.prefix_digest)) == (True, [1, 2])
    empty = worker_pb2.StepFrame(step=3, load=worker_pb2.Load(has_digest=True))
    bench.deliver(empty)
    for session in sessions:
        load = take(session).load
        assert (load.has_digest, list(load.prefix_digest)) == (True, [])
    bench.deliver(empty)  # no news any more
    assert not any(session.outbox.pending.HasField("step") for session in sessions)


async def test_an_empty_digest_takes_the_place_of_one_not_sent_yet() -> None:
    bench = Bench()
    session = bench.open()
    for digest in ([1, 2], []):
        load = worker_pb2.Load(prefix_digest=digest, has_digest=True)
        bench.deliver(worker_pb2.StepFrame(load=load))
    bench.deliver(worker_pb2.StepFrame(load=worker_pb2.Load(num_running=1)))
    load = take(session).load
    assert (load.has_digest, list(load.prefix_digest)) == (True, [])


async def test_an_answer_ends_the_flushes_that_it_counts() -> None:
    bench = Bench()
    flushes = [asyncio.create_task(bench.agent.flush_cache()) for _ in range(3)]
    await asyncio.sleep(0)
    assert [command.flush_cache for command in bench.commands] == [True, True, True]
    bench.agent.handle_event(engine_pb2.EngineEvent(flushed_pages=4, num_flushes=2))
    assert await asyncio.gather(*flushes[:2]) == [4, 4]
    assert not flushes[2].done()  # sent after the flush that was reported
    bench.agent.handle_event(engine_pb2.EngineEvent(flushed_pages=0, num_flushes=1))
    assert await flushes[2] == 0


async def test_an_idle_session_is_told_the_last_load() -> None:
    bench = Bench()
    session = bench.open()
    frame = worker_pb2.StepFrame(epoch=3, step=8)
    frame.load.num_free_pages = 5
    bench.deliver(frame)
    heartbeat = worker_pb2.WorkerSessionResponse()
    bench.agent.stamp(heartbeat)
    assert not session.outbox.pending.HasField("step")
    assert (heartbeat.step.epoch, heartbeat.step.step) == (3, 8)
    assert heartbeat.step.load.num_free_pages == 5


async def test_a_lost_engine_ends_sessions_and_flushes() -> None:
    bench = Bench()
    session = bench.open()
    flush = bench.agent.flush_cache()
    flush.send(None)  # up to its wait for the engine
    bench.agent.fail()
    with pytest.raises(Unavailable):
        session.ended.result()
    with pytest.raises(Unavailable):
        flush.send(None)
    with pytest.raises(Unavailable):
        bench.open()
    assert not bench.agent.ready


async def test_a_submission_after_the_loss_is_told_of_the_loss() -> None:
    bench = Bench()
    session = bench.open()
    bench.agent.drain()
    bench.submit(session, 1, 9)
    bench.agent.fail()
    bench.submit(session, 2, 9)
    messages = [rejected.error.message for rejected in take(session).rejected]
    assert messages == ["the worker is draining", "the worker's engine is lost"]


async def test_latencies_are_measured_from_the_clients_side() -> None:
    bench = Bench()
    session = bench.open()
    for name in range(2 * MAX_SAMPLED):
        bench.submit(session, name, 9)
    bench.obey()
    handles = list(bench.live)
    for bench.now in (1.0, 1.5, 1.75):
        rows = worker_pb2.StepFrame(
            handles=handles, counts=[1] * len(handles), token_ids=[5] * len(handles)
        )
        bench.deliver(rows)
    last = worker_pb2.StepFrame()
    for handle in handles:
        last.finished.add(
            handle=handle, reason=common_pb2.FINISH_REASON_LENGTH, num_output_tokens=3
        )
    bench.deliver(last)
    assert bench.sample("vllm:request_prompt_tokens_sum") == len(handles)
    assert bench.sample("vllm:request_generation_tokens_sum") == 3 * len(handles)
    assert bench.sample("vllm:time_to_first_token_seconds_sum") == len(handles)
    assert bench.sample("vllm:inter_token_latency_seconds_count") == 2 * MAX_SAMPLED
    assert bench.sample("vllm:inter_token_latency_seconds_sum") == 0.75 * MAX_SAMPLED
    assert bench.sample("vllm:e2e_request_latency_seconds_sum") == 1.75 * len(handles)
    ended = bench.sample("vllm:request_success_total", finished_reason="length")
    assert ended == len(handles)


async def test_a_request_is_measured_by_its_phases_and_merged_steps_share_their_gap() -> None:
    bench = Bench()
    session = bench.open()
    submit = worker_pb2.Submit(handle=7, prompt_ids=[1, 2, 3], resume_ids=[4, 5])
    bench.agent.receive(session, worker_pb2.WorkerSessionRequest(submits=[submit]))
    handle = bench.commands[-1].submits[0].handle
    bench.now = 1.0
    frame = worker_pb2.StepFrame(step=1)
    frame.started.add(handle=handle)
    bench.deliver(frame)
    for bench.now, step, count in ((3.0, 2, 1), (6.0, 5, 3)):
        rows = worker_pb2.StepFrame(step=step, handles=[handle], counts=[count])
        rows.token_ids.extend([9] * count)
        bench.deliver(rows)
    bench.now = 7.0
    frame = worker_pb2.StepFrame(step=6)
    reason = common_pb2.FINISH_REASON_STOP
    frame.finished.add(handle=handle, reason=reason, num_output_tokens=6)
    bench.deliver(frame)
    assert bench.sample("vllm:request_queue_time_seconds_sum") == 1.0
    assert bench.sample("vllm:request_prefill_time_seconds_sum") == 2.0
    assert bench.sample("vllm:request_decode_time_seconds_sum") == 4.0
    assert bench.sample("vllm:inter_token_latency_seconds_count") == 3
    assert bench.sample("vllm:inter_token_latency_seconds_bucket", le="1.0") == 3
    assert bench.sample("vllm:request_prompt_tokens_sum") == 3
    assert bench.sample("vllm:request_generation_tokens_sum") == 4  # the others were made elsewhere


@pytest.mark.parametrize("end", ["abort", "leave", "hand back"])
async def test_what_the_engine_was_not_told_of_ends_without_it(end: str) -> None:
    bench = Bench(queued=True, handoff=end == "hand back")
    session, other = bench.open(), bench.open()
    bench.submit(other, 1, 77)
    bench.deliver(bench.obey())
    for name in (1, 2):
        bench.submit(session, name, name)
    assert bench.agent.num_requests == 3
    take(session)
    if end == "abort":
        bench.abort(session, 1)
        assert [row.handle for row in take(session).finished] == [1]
        bench.abort(session, 2)
        bench.submit(session, 1, 5)  # the handle is free again
        bench.abort(session, 1)
    elif end == "leave":
        bench.agent.close_session(session)
    else:
        bench.agent.drain()
        assert sorted(take(session).moved) == [1, 2]
    frame = bench.obey()
    assert not frame.accepted
    assert bench.agent.num_requests == 1
    bench.deliver(frame)
    assert list(bench.live.values()) == ([] if end == "hand back" else [77])


async def test_the_engine_is_watched_while_some_session_watches() -> None:
    bench = Bench()
    first, second, other = bench.open(), bench.open(), bench.open()

    def watch(session: Session, *, on: bool) -> list[bool]:
        bench.agent.receive(session, worker_pb2.WorkerSessionRequest(watch_steps=on))
        told = [each.watch_steps for each in bench.commands]
        bench.commands.clear()
        return told

    assert watch(first, on=True) == [True]
    assert watch(first, on=True) == watch(second, on=True) == []
    event = engine_pb2.EngineEvent(step=worker_pb2.StepFrame(epoch=3, step=9))
    event.steps.add(number=9, duration_us=20)
    bench.agent.handle_event(event)
    assert [step.number for step in first.outbox.pending.steps] == [9]
    assert [step.number for step in second.outbox.pending.steps] == [9]
    assert not other.outbox.pending.steps
    assert watch(first, on=False) == []
    bench.agent.close_session(second)
    assert [command.watch_steps for command in bench.commands] == [False]


async def test_steps_that_a_watcher_does_not_read_are_bounded() -> None:
    session = Bench().open()
    for number in range(5000):
        session.add_steps([worker_pb2.EngineStep(number=number)])
    assert len(session.outbox.pending.steps) == 1024


async def test_a_load_tells_the_engines_totals() -> None:
    bench = Bench()
    session = bench.open()
    bench.submit(session, 40, 9)
    stats = engine_pb2.EngineStats(
        num_prefill_tokens=1, num_output_tokens=2, num_prefix_query_tokens=3,
        num_prefix_hit_tokens=4, step_us=5, busy_us=6, bubble_us=7,
    )  # fmt: skip
    bench.agent.handle_event(engine_pb2.EngineEvent(step=bench.obey(), stats=stats))
    load = take(session).load
    assert (load.num_prefill_tokens, load.num_output_tokens) == (1, 2)
    assert (load.num_prefix_query_tokens, load.num_prefix_hit_tokens) == (3, 4)
    assert (load.step_us, load.busy_us, load.bubble_us) == (5, 6, 7)


@pytest.mark.parametrize("num_sessions", [1, 2])
async def test_parts_of_prompts_come_under_the_clients_names(num_sessions: int) -> None:
    bench = Bench()
    session, *_ = [bench.open() for _ in range(num_sessions)]
    bench.submit(session, 40, 9)
    bench.obey()
    take(session)
    frame = worker_pb2.StepFrame(epoch=3, step=2)
    frame.prefilled.add(handle=next(iter(bench.live)), num_tokens=512)
    bench.deliver(frame)
    (part,) = take(session).prefilled
    assert (part.handle, part.num_tokens) == (40, 512)
