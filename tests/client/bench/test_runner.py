"""Runs against a stub of known timings: what is measured is exact."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from services.client.answer import Failure
from services.client.bench.config import BenchConfig
from services.client.bench.jobs import Job, Turn
from services.client.bench.measure import Results, conditions, measure
from services.client.bench.record import Record
from services.client.bench.runner import Asker, Runner
from services.client.bench.self_test import self_test
from services.client.bench.summary import Load, summarize
from services.client.connection import Origin, Pool
from tests.client.stub import (
    DONE,
    HEAD,
    LAST_CHUNK,
    HandClock,
    Stub,
    Timeline,
    chunk,
    said,
    stub_server,
    timed,
    usage,
)
from tests.client.terminal import Terminal

QUIET = Console(quiet=True)


def jobs(count: int, turns: int = 1) -> list[Job]:
    return [Job(tuple(Turn(f"q{job}.{turn}", 4) for turn in range(turns))) for job in range(count)]


def runner_of(stub: Stub, clock: HandClock, config: BenchConfig | None = None) -> Runner:
    pool = Pool(Origin.of(stub.url), clock)
    asker = Asker(config or BenchConfig(), "stub", "/v1/chat/completions", pool)
    records: list[Record] = []
    return Runner(asker, clock, lambda record: None, records)


async def run_closed(timelines: Sequence[Timeline], work: Sequence[Job]) -> list[Record]:
    clock = HandClock()
    async with stub_server(timed(clock, timelines)) as stub:
        runner = runner_of(stub, clock)
        await runner.closed(work, 1)
        runner.asker.pool.close()
    return runner.records


async def test_percentiles_of_a_closed_loop_are_exact() -> None:
    # TTFT 10, 20, ... 110 ms; then gaps of 10 and 30 ms.
    timelines = [Timeline((number / 100, 0.01, 0.03)) for number in range(1, 12)]
    records = await run_closed(timelines, jobs(11))
    metrics = summarize(records, Load(concurrency=1)).metrics
    ms = {
        name: {percent: value * 1000 for percent, value in spread.percentiles.items()}
        for name, spread in metrics.items()
    }
    assert ms["ttft"] == pytest.approx({50: 60, 90: 100, 99: 109})
    assert ms["tpot"] == pytest.approx({50: 20, 90: 20, 99: 20})
    assert ms["itl"] == pytest.approx({50: 20, 90: 30, 99: 30})
    assert ms["e2el"] == pytest.approx({50: 100, 90: 140, 99: 149})
    assert [record.output_tokens for record in records] == [3] * 11
    assert records[1].scheduled_at == pytest.approx(0.05)  # the first took 50 ms


async def test_an_open_loop_counts_the_wait_from_when_a_request_was_due() -> None:
    clock = HandClock()
    async with stub_server(timed(clock, [Timeline((0.5, 0.1))] * 3)) as stub:
        runner = runner_of(stub, clock)
        await runner.open(jobs(3), [0.0, 0.0, 0.0], concurrency=1)
        runner.asker.pool.close()
    assert [record.ttft for record in runner.records] == pytest.approx([0.5] * 3)
    assert [record.scheduled_ttft for record in runner.records] == pytest.approx([0.5, 1.1, 1.7])
    assert [record.scheduled_e2el for record in runner.records] == pytest.approx([0.6, 1.2, 1.8])
    assert [record.woken_late for record in runner.records] == [0.0] * 3


async def test_turns_follow_one_another_with_the_real_answers() -> None:
    clock = HandClock()
    async with stub_server(timed(clock, [Timeline((0.1, 0.1))] * 4)) as stub:
        runner = runner_of(stub, clock)
        await runner.closed(jobs(2, turns=2), 1)
        runner.asker.pool.close()
    assert stub.bodies[1]["messages"] == [
        {"role": "user", "content": "q0.0"},
        {"role": "assistant", "content": "w0 w1 "},
        {"role": "user", "content": "q0.1"},
    ]
    assert [(record.job, record.turn) for record in runner.records] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


async def test_what_a_request_says() -> None:
    config = BenchConfig(
        ignore_eos=True, temperature=0.5, extra_body='{"priority": 3}', stream_usage=False
    )
    clock = HandClock()
    async with stub_server(timed(clock, [Timeline((0.1,))])) as stub:
        runner = runner_of(stub, clock, config)
        await runner.closed(jobs(1), 1)
        runner.asker.pool.close()
    assert stub.bodies == [
        {
            "model": "stub",
            "stream": True,
            "messages": [{"role": "user", "content": "q0.0"}],
            "max_tokens": 4,
            "ignore_eos": True,
            "temperature": 0.5,
            "priority": 3,
        }
    ]


class Crowd:
    """Answers each request at once, and notes how many are in flight; a `gate` holds them."""

    def __init__(self) -> None:
        self.now = self.most = self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await self.gate.wait()
        words = len(str(body.get("messages", body.get("prompt"))).split())
        self.now -= 1
        writer.write(HEAD + chunk(said("a ") + said("b") + usage(words * 2, 2) + DONE) + LAST_CHUNK)


async def measured(crowd: Crowd, **flags: Any) -> Results:
    async with stub_server(crowd) as stub:
        config = BenchConfig(url=stub.url, warmup=0, **flags)
        results = Results()
        await measure(config, results, asyncio.Event(), QUIET)
    return results


async def test_words_are_fitted_to_the_servers_own_count() -> None:
    """The stub counts two tokens a word, so 40 tokens are 20 words."""
    results = await measured(Crowd(), num_prompts=5, input_len=40)
    (run,) = results.runs
    assert results.model == "stub"
    # Words between quotes and brackets of one message count as the stub splits them.
    assert {record.input_tokens // 2 for record in results.records[0]} == {20 + 3}
    assert (run.completed, run.output_tokens, run.tokens_from) == (5, 10, "usage")


@pytest.mark.parametrize("on_terminal", [True, False])
async def test_a_terminal_is_told_of_what_comes_before_the_first_request(on_terminal: bool) -> None:
    told = io.StringIO()
    async with stub_server(Crowd()) as stub:
        config = BenchConfig(url=stub.url, warmup=3, num_prompts=1)
        log = Console(file=told, force_terminal=on_terminal, width=100, color_system=None)
        await measure(config, Results(), asyncio.Event(), log)
    lines = told.getvalue().splitlines()[:2]
    assert lines == on_terminal * [
        "asking the server how many tokens words have: two small requests",
        "warming up: requests that are not measured, 3 in all",
    ]


async def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    crowd = Crowd()
    crowd.gate.clear()
    task = asyncio.create_task(measured(crowd, num_prompts=12, concurrency=3, tokenizer="byte"))
    async with asyncio.timeout(10):
        while crowd.now < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    crowd.gate.set()
    results = await task
    assert crowd.most == 3
    assert (results.runs[0].completed, crowd.asked) == (12, 12)


async def test_a_sweep_has_other_prompts_for_each_run() -> None:
    async with stub_server(Crowd()) as stub:
        config = BenchConfig(url=stub.url, warmup=0, num_prompts=4, sweep_concurrency=("1", "2"))
        results = Results()
        await measure(config, results, asyncio.Event(), QUIET)
    assert [run.load.concurrency for run in results.runs] == [1, 2]
    prompts = {body["messages"][0]["content"] for body in stub.bodies[2:]}
    assert len(prompts) == 8


def test_conditions_tell_lengths_where_they_were_asked_for() -> None:
    made_up = conditions(BenchConfig(input_len=30, output_len=7), "stub")
    assert made_up["Input / output tokens"] == "30 / 7"
    trace = conditions(BenchConfig(dataset_name="azure", dataset_path="a.csv"), "stub")
    assert trace["Data"] == "azure a.csv"
    assert "Input / output tokens" not in trace


async def test_a_stop_keeps_what_was_measured() -> None:
    crowd, stop = Crowd(), asyncio.Event()
    async with stub_server(crowd) as stub:
        config = BenchConfig(
            url=stub.url, warmup=0, num_prompts=9, concurrency=2, tokenizer="byte", input_len=8
        )
        results = Results()
        crowd.gate.clear()
        task = asyncio.create_task(measure(config, results, stop, QUIET))
        async with asyncio.timeout(10):
            while crowd.now < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            crowd.gate.set()
            while crowd.asked < 4:  # noqa: ASYNC110
                await asyncio.sleep(0)
            crowd.gate.clear()
            stop.set()
            await task
            crowd.gate.set()
    (run,) = results.runs
    assert results.stopped
    assert run.completed >= 2
    assert run.completed + run.unfinished + run.not_sent == 9
    assert not run.failed


async def test_the_client_takes_in_every_token_of_its_self_test() -> None:
    result = await self_test(streams=4, steps=5, events_a_read=3, step_seconds=0.0)
    assert result.tokens == 60
    assert result.tokens_per_second > 0
    assert "60 tokens" in str(result)


def test_a_self_test_that_cannot_connect_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    accept = socket.socket.accept

    def noted(listener: socket.socket) -> tuple[socket.socket, Any]:
        waiting.set()
        return accept(listener)

    async def refuse(*_: object) -> None:
        await asyncio.to_thread(waiting.wait)
        raise Failure("connect", "refused")

    def run() -> None:
        with pytest.raises(Failure):
            asyncio.run(self_test(streams=2, steps=1))

    monkeypatch.setattr(socket.socket, "accept", noted)
    monkeypatch.setattr(Pool, "post", refuse)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


async def bench(*args: str) -> tuple[asyncio.subprocess.Process, bytes, bytes]:
    process = await start(*args)
    out, err = await process.communicate()
    return process, out, err


async def start(*args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services", "bench", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_ctrl_c_prints_what_there_is_and_exits_130() -> None:
    crowd = Crowd()
    async with stub_server(crowd) as stub:
        process = await start(
            *("--url", stub.url, "--num-prompts", "50", "--warmup", "0", "--concurrency", "2")
        )
        async with asyncio.timeout(60):
            while crowd.asked < 2 + 5:  # noqa: ASYNC110
                await asyncio.sleep(0)
            crowd.gate.clear()
            os.kill(process.pid, signal.SIGINT)
            out, err = await process.communicate()
            crowd.gate.set()
    assert process.returncode == 130
    assert b"Requests completed / failed" in out
    assert b"Stopped early: 2 requests were in flight" in out
    assert b"Traceback" not in err


async def test_a_terminal_sees_a_bar_and_then_the_table() -> None:
    crowd = Crowd()
    crowd.gate.clear()

    def look(url: str) -> None:
        words = ("--num-prompts", "8", "--tokenizer", "byte", "--warmup", "0")
        with Terminal("bench", "--url", url, *words) as shown:
            place = shown.expect("0/8")
            loop.call_soon_threadsafe(crowd.gate.set)
            shown.expect("Requests completed / failed   8 / 0", after=place)
            assert shown.end() == 0

    loop = asyncio.get_running_loop()
    async with stub_server(crowd) as stub:
        await asyncio.to_thread(look, stub.url)


async def test_ctrl_c_before_the_first_answer_leaves_too() -> None:
    crowd = Crowd()
    crowd.gate.clear()
    async with stub_server(crowd) as stub:
        process = await start("--url", stub.url)
        async with asyncio.timeout(60):
            while not crowd.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            os.kill(process.pid, signal.SIGINT)
            out, err = await process.communicate()
        crowd.gate.set()
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--url", "http://127.0.0.1:9"], b"shoal: nothing answers at http://127.0.0.1:9/v1\n"),
        (
            ["--output-json", "/none/a.json"],
            b"shoal: cannot write /none/a.json: there is no such directory\n",
        ),
    ],
)
async def test_what_cannot_be_measured_is_one_sentence(args: list[str], sentence: bytes) -> None:
    process, out, err = await bench(*args)
    assert (process.returncode, out, err) == (1, b"", sentence)
