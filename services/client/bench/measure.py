"""One command's work: find the server, prepare the data, run each load, keep what it gave."""

from __future__ import annotations

import asyncio
import datetime
import gc
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from services import __version__
from services.client.answer import Failure
from services.client.bench.arrivals import arrival_times
from services.client.bench.config import SYNTHETIC, BenchConfig
from services.client.bench.jobs import Job, Turn, make_jobs, warmup_jobs
from services.client.bench.record import Record
from services.client.bench.runner import Asker, Runner
from services.client.bench.summary import Load, Summary, summarize
from services.client.bench.table import progress_bar
from services.client.bench.words import ModelCounter, TextMaker, counted
from services.client.connection import Origin, Pool
from services.client.endpoint import ApiError, Endpoint, list_models
from services.common.errors import StartupError

_PROBE_TOKENS = 256  # words that the server is asked to count
_DEFAULT_CONCURRENCY = 8


@dataclass(slots=True)
class Results:
    """What was measured so far: the runs that ended, and their records."""

    model: str = ""
    runs: list[Summary] = field(default_factory=list)
    records: list[list[Record]] = field(default_factory=list)
    measuring: bool = False  # the server is found and warm
    stopped: bool = False


async def measure(config: BenchConfig, results: Results, stop: asyncio.Event, log: Console) -> None:
    """Runs every load of the config, and adds to `results` until `stop` is set.

    Raises StartupError if the server cannot be used, or the data cannot.
    """
    endpoint = Endpoint.of(config)
    results.model = await _model(config, endpoint)
    path = urlsplit(endpoint.url).path
    path += "/chat/completions" if config.endpoint == "chat" else "/completions"
    tls = endpoint.trust() if endpoint.url.startswith("https:") else None
    pool = Pool(Origin.of(endpoint.url, endpoint.headers, tls))
    asker = Asker(config, results.model, path, pool)
    try:
        talks = config.progress and log.is_terminal
        if talks and not config.tokenizer:
            log.print("asking the server how many tokens words have: two small requests")
        words = await _words(config, asker)
        if talks and config.warmup:
            log.print(f"warming up: requests that are not measured, {config.warmup} in all")
        await _warm_up(asker, warmup_jobs(config, words))
        results.measuring = True
        for number, one in enumerate(loads(config)):
            # Other prompts for each run: the server's cache must not know them from the last.
            jobs = make_jobs(replace(config, seed=config.seed + number), words)
            await _run(replace(asker, config=one), jobs, results, stop, log)
            if results.stopped:
                return
    finally:
        pool.close()


def loads(config: BenchConfig) -> list[BenchConfig]:
    """One config for each run."""
    if config.rates:
        return [replace(config, request_rate=rate) for rate in config.rates]
    if config.concurrencies:
        return [replace(config, concurrency=number) for number in config.concurrencies]
    return [config]


def load_of(config: BenchConfig, jobs: Sequence[Job]) -> Load:
    """How a run of these jobs is driven."""
    if config.request_rate is not None:
        return Load(config.request_rate, config.concurrency)
    if config.concurrency is None and jobs[0].at is not None:
        return Load(trace=True)
    return Load(concurrency=config.concurrency or _DEFAULT_CONCURRENCY)


async def _run(
    asker: Asker, jobs: Sequence[Job], results: Results, stop: asyncio.Event, log: Console
) -> None:
    config, load = asker.config, load_of(asker.config, jobs)
    planned = sum(len(job.turns) for job in jobs)
    records: list[Record] = []
    with progress_bar(log, planned, enabled=config.progress) as on_record, _no_collection():
        runner = Runner(asker, time.perf_counter, on_record, records)
        cpu = time.process_time()
        work = asyncio.create_task(_drive(runner, jobs, load, config))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        results.stopped = not work.done()
        unfinished = runner.in_flight
        ended = time.perf_counter()
        if results.stopped:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        else:
            work.result()
        cpu = time.process_time() - cpu
    if results.stopped and not records:
        return
    percents = config.percentiles
    if config.report or config.rates or config.concurrencies:
        percents = tuple(sorted({*percents, 50.0, 90.0, 99.0}))
    results.records.append(records)
    results.runs.append(
        summarize(
            records,
            load,
            percents=percents,
            slos=config.slos,
            duration=ended - runner.start,
            cpu_seconds=cpu,
            unfinished=unfinished,
            planned=planned,
            stopped=results.stopped,
        )
    )


async def _drive(runner: Runner, jobs: Sequence[Job], load: Load, config: BenchConfig) -> None:
    if load.trace:
        await runner.open(jobs, [job.at or 0.0 for job in jobs], None)
    elif load.rate is not None:
        times = arrival_times(load.rate, config.burstiness, len(jobs), config.seed)
        await runner.open(jobs, times, load.concurrency)
    else:
        await runner.closed(jobs, load.concurrency or _DEFAULT_CONCURRENCY)


async def _model(config: BenchConfig, endpoint: Endpoint) -> str:
    if config.model:
        return config.model
    async with endpoint.client() as http:
        try:
            names = await list_models(http, endpoint.url)
        except httpx.TransportError:
            raise StartupError(f"nothing answers at {endpoint.url}")
        except ApiError as error:
            raise StartupError(str(error))
    if not names:
        raise StartupError(f"{endpoint.url} serves no model")
    return names[0]


async def _words(config: BenchConfig, asker: Asker) -> TextMaker:
    """Measures words with the tokenizer, or has the server count some."""
    if config.tokenizer:
        return counted(ModelCounter(config.tokenizer))
    rng = random.Random(f"probe {config.seed}")
    one, many = (TextMaker().text(rng, size) for size in (1, 1 + _PROBE_TOKENS))
    counts: list[int] = []
    for text in (one, many):
        answer = await _probe(asker, Turn(text, 1))
        counts.append(answer)
    per_word = (counts[1] - counts[0]) / _PROBE_TOKENS
    return TextMaker(per_word) if per_word > 0 else TextMaker()


async def _probe(asker: Asker, turn: Turn) -> int:
    """The tokens of a prompt; 0 if the server does not tell."""
    try:
        answer = await asker.ask((), turn, keep_text=False)
    except Failure as error:
        raise StartupError(f"a first small request failed ({error.kind}): {error}")
    return answer.usage.prompt_tokens if answer.usage else 0


async def _warm_up(asker: Asker, jobs: Sequence[Job]) -> None:
    await asyncio.gather(*(_probe(asker, job.turns[0]) for job in jobs))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector out of the measurement: a pass over many records takes long."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def conditions(config: BenchConfig, model: str) -> dict[str, str]:
    """What a report says about how it came to be."""
    lengths = f"{config.input_len} / {config.output_len or 'default'}"
    return {
        "Server": config.url,
        "Model": model,
        "Endpoint": config.endpoint,
        "Data": f"{config.dataset_name} {config.dataset_path}".strip(),
        **({"Input / output tokens": lengths} if config.dataset_name in SYNTHETIC else {}),
        "Requests a run": str(config.num_prompts),
        "Seed": str(config.seed),
        "Client": f"shoal {__version__}, {os.cpu_count()} cores, one used",
        "Date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
