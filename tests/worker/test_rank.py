"""A real rank process on the fake engine, driven as the agent drives it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protos import common_pb2, engine_pb2, worker_pb2
from services.common.process import child_environment
from services.worker.config import WorkerConfig
from services.worker.engine.fake import fake_tokens
from services.worker.framing import CONFIG_ENV, SOCKET_ENV, FrameSocket

ALLOWED = list(range(32, 127))
TIMEOUT = 20.0  # seconds after which a rank is taken to hang


class RankProcess:
    """The agent's end of a rank: what it said so far, by request."""

    def __init__(self, directory: Path, config: WorkerConfig) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(directory / "rank.sock"))
        listener.listen(1)
        listener.settimeout(TIMEOUT)
        environment = child_environment() | {
            CONFIG_ENV: json.dumps(dataclasses.asdict(config)),
            SOCKET_ENV: str(directory / "rank.sock"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.worker.rank"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        connection, _ = listener.accept()
        listener.close()
        self.link = FrameSocket(connection)
        self.events: list[engine_pb2.EngineEvent] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, worker_pb2.Finished] = {}
        self.rejected: dict[int, worker_pb2.Rejected] = {}
        self.accepted: list[int] = []
        self.compiling: list[int] = []  # of those not accepted yet
        self.info = worker_pb2.WorkerInfo()

    def send(self, command: engine_pb2.EngineCommand) -> None:
        self.link.send(command)

    def submit(self, handle: int, prompt_ids: list[int], max_tokens: int) -> None:
        submit = worker_pb2.Submit(
            handle=handle,
            prompt_ids=prompt_ids,
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens),
        )
        self.send(engine_pb2.EngineCommand(submits=[submit]))

    def read(self) -> list[engine_pb2.EngineEvent]:
        """The next events; EOFError when the rank is gone."""
        self.link.wait(TIMEOUT)
        self.link.flush()
        events = self.link.receive(engine_pb2.EngineEvent)
        for event in events:
            self._note(event)
        return events

    def read_until_ready(self) -> None:
        while not self.info.epoch:
            self.read()

    def read_until_ended(self, *handles: int) -> None:
        while not all(h in self.finished or h in self.rejected for h in handles):
            self.read()

    def _note(self, event: engine_pb2.EngineEvent) -> None:
        self.events.append(event)
        if event.HasField("ready"):
            self.info = event.ready
        start = 0
        for handle, count in zip(event.step.handles, event.step.counts, strict=True):
            self.tokens.setdefault(handle, []).extend(event.step.token_ids[start : start + count])
            start += count
        assert start == len(event.step.token_ids)
        self.compiling += set(event.step.compiling).difference(self.accepted)
        self.accepted += event.step.accepted
        self.finished.update((row.handle, row) for row in event.step.finished)
        self.rejected.update((row.handle, row) for row in event.step.rejected)

    def close(self) -> tuple[int, str]:
        """Says goodbye; the exit status and what the rank logged."""
        self.link.close()
        logged, _ = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, logged.decode()


@pytest.fixture
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RankProcess]:
    options = getattr(request, "param", {})
    rank = RankProcess(tmp_path, WorkerConfig(model="byte", engine="fake", **options))
    try:
        yield rank
    finally:
        rank.process.kill()
        rank.close()


def test_serves_exact_tokens_and_ends_when_the_agent_goes(rank: RankProcess) -> None:
    rank.read_until_ready()
    assert any(event.HasField("progress") for event in rank.events)
    assert (rank.info.engine, rank.info.vocab_size, rank.info.page_size) == ("fake", 259, 16)
    assert rank.info.max_model_len == 8192
    prompts = {handle: [handle + 1] * (30 * handle + 1) for handle in range(20)}
    for handle, prompt in prompts.items():
        rank.submit(handle, prompt, 25)
    rank.read_until_ended(*prompts)
    for handle, prompt in prompts.items():
        assert rank.tokens[handle] == fake_tokens(prompt, 25, ALLOWED)
        assert rank.finished[handle].reason == common_pb2.FINISH_REASON_LENGTH
    assert sorted(rank.accepted) == list(prompts)
    last = rank.events[-1]
    assert last.step.epoch == rank.info.epoch
    assert last.step.load.num_pages == rank.info.num_pages
    assert last.stats.num_output_tokens == 20 * 25
    assert last.stats.num_requests == last.stats.num_inflight_pages == 0
    status, log = rank.close()
    assert (status, "Traceback" in log) == (0, False)


def test_refuses_what_cannot_be_served_and_goes_on(rank: RankProcess) -> None:
    rank.read_until_ready()
    rank.submit(1, [], 5)
    rank.submit(2, [5] * 8192, 5)
    rank.submit(3, [259], 5)
    rank.submit(4, [(1 << 32) - 1], 5)
    rank.submit(5, [7], 3)
    rank.read_until_ended(1, 2, 3, 4, 5)
    codes = {handle: row.error.code for handle, row in rank.rejected.items()}
    assert codes == {
        1: common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        2: common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        3: common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        4: common_pb2.ERROR_CODE_INVALID_ARGUMENT,
    }
    assert "8192" in rank.rejected[2].error.message
    assert rank.tokens[5] == fake_tokens([7], 3, ALLOWED)


def test_aborts_free_their_pages_and_the_cache_can_be_flushed(rank: RankProcess) -> None:
    rank.read_until_ready()
    rank.submit(1, [1] * 100, 8000)
    while 1 not in rank.tokens:
        rank.read()
    rank.send(engine_pb2.EngineCommand(aborts=[1, 99]))
    rank.read_until_ended(1)
    assert rank.finished[1].reason == common_pb2.FINISH_REASON_ABORT
    rank.send(engine_pb2.EngineCommand(flush_cache=True))
    while not rank.events[-1].HasField("flushed_pages"):
        rank.read()
    load = rank.events[-1].step.load
    assert load.num_free_pages == load.num_pages
    assert rank.events[-1].flushed_pages >= 6
    assert rank.events[-1].num_flushes == 1
    while not rank.events[-1].step.load.has_digest:
        rank.read()
    assert not rank.events[-1].step.load.prefix_digest


def test_it_tells_of_every_step_while_it_is_watched(rank: RankProcess) -> None:
    rank.read_until_ready()
    rank.submit(1, [7] * 1200, 5)
    rank.read_until_ended(1)
    assert not any(event.steps for event in rank.events)
    parts = [part.num_tokens for event in rank.events for part in event.step.prefilled]
    assert parts == [512, 1024]  # the last part is told by the first token
    rank.send(engine_pb2.EngineCommand(watch_steps=True))
    rank.submit(2, [8] * 1200, 40)
    rank.read_until_ended(2)
    told: list[worker_pb2.EngineStep] = []
    while sum(step.num_decode_tokens for step in told) < 39:  # after the prompt's own
        rank.read()
        told = [step for event in rank.events for step in event.steps]
    assert sum(step.num_prefill_tokens for step in told) == 1200
    numbers = [step.number for step in told]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    rank.send(engine_pb2.EngineCommand(watch_steps=False))
    rank.submit(3, [9], 5)
    rank.read_until_ended(3)
    assert [step for event in rank.events for step in event.steps] == told


@pytest.mark.parametrize("rank", [{"fake_step_ms": 1.0}], indirect=True)
def test_an_agent_that_does_not_read_holds_up_nothing_and_loses_nothing(rank: RankProcess) -> None:
    rank.read_until_ready()
    handles = range(200)
    for handle in handles:
        rank.submit(handle, [handle], 100)
    # Nothing is read until the engine has surely finished: news gather in the rank.
    worker = psutil.Process(rank.process.pid)
    while _is_busy(worker):
        pass
    rank.read_until_ended(*handles)
    for handle in handles:
        assert rank.tokens[handle] == fake_tokens([handle], 100, ALLOWED)


def _is_busy(process: psutil.Process) -> bool:
    """Whether a process used the CPU in the last fifth of a second."""
    return process.cpu_percent(interval=0.2) > 5.0


def test_an_idle_rank_uses_no_cpu_and_gives_signs_of_life(rank: RankProcess) -> None:
    rank.read_until_ready()
    used = psutil.Process(rank.process.pid).cpu_times()
    seen = len(rank.events)
    while len(rank.events) < seen + 2:
        rank.read()
    after = psutil.Process(rank.process.pid).cpu_times()
    assert rank.events[-1].step.epoch == rank.info.epoch
    assert (after.user + after.system) - (used.user + used.system) <= 0.05


def test_sigterm_ends_it_in_the_middle_of_work(rank: RankProcess) -> None:
    rank.read_until_ready()
    rank.submit(1, [1], 8000)
    while 1 not in rank.tokens:
        rank.read()
    rank.process.send_signal(signal.SIGTERM)
    assert rank.process.wait(TIMEOUT) == 0


def test_a_model_that_cannot_be_served_is_told_to_the_agent(tmp_path: Path) -> None:
    rank = RankProcess(tmp_path, WorkerConfig(model="/no/such/model", engine="fake"))
    while not (rank.events and rank.events[-1].HasField("fatal")):
        rank.read()
    assert "/no/such/model" in rank.events[-1].fatal.message
    assert rank.process.wait(TIMEOUT) == 1
    rank.close()


def test_a_failing_engine_is_fatal_and_told(tmp_path: Path) -> None:
    script = (
        "from services.worker.engine.fake import FakeModel\n"
        "def fail(self, batch): raise RuntimeError('the device is gone')\n"
        "FakeModel.compute = fail\n"
        "import sys, services.worker.rank as rank\n"
        "sys.exit(rank.main())\n"
    )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "rank.sock"))
    listener.listen(1)
    config = WorkerConfig(model="byte", engine="fake")
    environment = child_environment() | {
        CONFIG_ENV: json.dumps(dataclasses.asdict(config)),
        SOCKET_ENV: str(tmp_path / "rank.sock"),
    }
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE
    ) as process:
        connection, _ = listener.accept()
        listener.close()
        link = FrameSocket(connection)
        submit = worker_pb2.Submit(handle=1, prompt_ids=[1])
        link.send(engine_pb2.EngineCommand(submits=[submit]))
        events: list[engine_pb2.EngineEvent] = []
        give_up = time.monotonic() + TIMEOUT
        while not (events and events[-1].HasField("fatal")) and time.monotonic() < give_up:
            link.wait(TIMEOUT)
            events += link.receive(engine_pb2.EngineEvent)
        assert "the device is gone" in events[-1].fatal.message
        log, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1
        assert b"RuntimeError" in log
        link.close()


def test_the_rank_starts_without_torch() -> None:
    code = "import sys, services.worker.rank; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_follows_grammars_and_refuses_bad_ones(rank: RankProcess) -> None:
    rank.read_until_ready()
    grammars = {
        1: common_pb2.Grammar(regex="[a-f]{30}"),
        2: common_pb2.Grammar(regex="(a"),
        3: common_pb2.Grammar(choices=common_pb2.Choices(texts=["yes", "no"])),
        4: common_pb2.Grammar(choices=common_pb2.Choices()),
        5: common_pb2.Grammar(json_schema='{"type": "integer"}'),
        6: common_pb2.Grammar(lark='start: "x" start'),
    }
    for handle, grammar in grammars.items():
        sampling = common_pb2.SamplingParams(max_tokens=500, grammar=grammar)
        submit = worker_pb2.Submit(handle=handle, prompt_ids=[7], sampling=sampling)
        rank.send(engine_pb2.EngineCommand(submits=[submit]))
    rank.submit(9, [7], 3)
    rank.read_until_ended(9)
    assert rank.tokens[9] == fake_tokens([7], 3, ALLOWED), "it waits for no grammar"
    assert not set(grammars).intersection(rank.accepted)
    rank.read_until_ended(*grammars)
    assert sorted(rank.compiling) == list(grammars)
    texts = {handle: bytes(ids[:-1]).decode() for handle, ids in rank.tokens.items()}
    assert re.fullmatch("[a-f]{30}", texts[1])
    assert texts[3] in ("yes", "no")
    assert int(texts[5]) is not None
    assert {handle: row.error.param for handle, row in rank.rejected.items()} == {
        2: "grammar",
        4: "grammar",
        6: "grammar",
    }
    stats = rank.events[-1].stats
    assert (stats.num_grammars_compiled, stats.num_grammars_failed) == (4, 2)
    assert stats.grammar_compile_us > 0
