"""What the engine's choices cost and gain on this machine, by the embedded model.

    python -m bench.engine --rounds 3 --json build/engine.json

Every comparison runs its variants in turn, round by round, in one process and on the same
loaded weights, and gives medians: a busy machine then slows all variants alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from bench.engine_load import (
    gaps_around,
    random_prompt,
    scheduler_seconds,
    serve,
    submission,
)
from bench.figures import machine
from services.common import logs
from services.common.config import option, parse
from services.worker.config import WorkerConfig
from services.worker.core import Admission, Engine, SamplingParams
from services.worker.engine import torch_engine
from services.worker.engine.sampler import Sampler
from services.worker.native.kernels import Kernels
from services.worker.scheduler.scheduler import Scheduler

Schedule = Literal["prefill-first", "decode-first", "mixed"]
Row = dict[str, float]  # a variant's figures, by name with unit


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    model: str = option("", "hub id, directory or .gguf file; default: the embedded model")
    rounds: int = option(3, "times each variant is measured; the median counts")
    streams: int = option(16, "requests that decode together")
    tokens: int = option(48, "tokens of each")
    long_prompt: int = option(6000, "tokens of the prompt that comes beside the streams")
    shared_prefix: int = option(512, "tokens that prompts share in the radix comparison")
    num_threads: int = option(0, "CPU threads; default: all cores")
    json: str = option("", "file for the figures; default: none")


class EngineBench:
    """The engines, loaded once, and the comparisons."""

    def __init__(self, config: BenchConfig, plain: Engine, deterministic: Engine) -> None:
        self._config = config
        self._plain = plain
        self._deterministic = deterministic

    def tables(self) -> Iterator[tuple[str, dict[str, Row]]]:
        """Every comparison, as it is done: its title, and the rows by variant."""
        yield (
            "overlap and serial",
            self._medians(
                {"overlap": lambda: self._overlap(True), "serial": lambda: self._overlap(False)}
            ),
        )
        yield (
            "prompts with a shared prefix",
            self._medians(
                {"radix": lambda: self._prefix("radix"), "none": lambda: self._prefix("none")}
            ),
        )
        yield (
            "a long prompt beside streams",
            self._medians(
                {name: lambda name=name: self._gaps(name) for name in get_args(Schedule)}  # type: ignore[misc]
            ),
        )
        yield (
            "deterministic",
            self._medians(
                {
                    "off": lambda: self._speed(self._plain),
                    "on": lambda: self._speed(self._deterministic),
                }
            ),
        )
        yield (
            "CPU of the scheduler",
            self._medians(
                {f"{n} running": lambda n=n: self._scheduler(n) for n in (1, 64, 256, 512)}  # type: ignore[misc]
            ),
        )
        yield (
            "sampling 32 rows",
            self._medians(
                {name: lambda p=params: self._sampling(p) for name, params in SAMPLINGS.items()}  # type: ignore[misc]
            ),
        )

    def _medians(self, variants: dict[str, Callable[[], Row]]) -> dict[str, Row]:
        """Each variant once a round, in turn; the median of each figure."""
        measured: dict[str, list[Row]] = {name: [] for name in variants}
        for _ in range(self._config.rounds):
            for name, measure in variants.items():
                measured[name].append(measure())
        return {
            name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for name, rows in measured.items()
        }

    def _scheduler_on(self, engine: Engine, **options: object) -> Scheduler:
        return Scheduler(engine, max_running_requests=MAX_RUNNING, **options)  # type: ignore[arg-type]

    def _overlap(self, overlap: bool) -> Row:
        rows = [
            submission(n, random_prompt(self._plain, 16, n), self._config.tokens)
            for n in range(self._config.streams)
        ]
        served = serve(self._scheduler_on(self._plain, overlap=overlap), rows)
        return {"tokens/s": served.tokens_per_second, "bubble %": 100 * served.bubble_share}

    def _prefix(self, cache: str) -> Row:
        scheduler = self._scheduler_on(self._plain, cache=cache)
        prefix = random_prompt(self._plain, self._config.shared_prefix, 0)
        serve(scheduler, [submission(0, [*prefix, 11], 1)])
        before = scheduler.counters.num_prefill_tokens
        prompts = [[*prefix, *random_prompt(self._plain, 16, n)] for n in range(1, 5)]
        served = serve(scheduler, [submission(n, prompt, 1) for n, prompt in enumerate(prompts)])
        return {
            "first token ms": 1000 * served.mean_first_token(),
            "prefilled tokens": scheduler.counters.num_prefill_tokens - before,
        }

    def _gaps(self, schedule: Schedule) -> Row:
        streams = [
            submission(n, random_prompt(self._plain, 16, n), 4000)
            for n in range(self._config.streams)
        ]
        prompt = random_prompt(self._plain, self._config.long_prompt, 99)
        scheduler = self._scheduler_on(self._plain, schedule=schedule, cache="none")
        before, during, took = gaps_around(
            scheduler, streams, submission(99, prompt, 1), SETTLED * self._config.tokens
        )
        p99 = [float(np.percentile(gaps, 99)) for gaps in (before, during)]
        return {
            "p99 gap before ms": 1000 * p99[0],
            "p99 gap during ms": 1000 * p99[1],
            "ratio": p99[1] / p99[0],
            "first token of the long s": took,
        }

    def _speed(self, engine: Engine) -> Row:
        def tokens_per_second(num_rows: int, prompt: int, tokens: int) -> float:
            rows = [
                submission(n, random_prompt(engine, prompt, n), tokens) for n in range(num_rows)
            ]
            served = serve(self._scheduler_on(engine, cache="none"), rows)
            return num_rows * (prompt if tokens == 1 else tokens) / served.seconds

        tokens = self._config.tokens
        return {
            "decode 1, tokens/s": tokens_per_second(1, 8, tokens),
            "decode 16, tokens/s": tokens_per_second(16, 8, tokens),
            "prefill, tokens/s": tokens_per_second(1, self._config.shared_prefix, 1),
        }

    def _scheduler(self, num_running: int) -> Row:
        return {"us a step": 1e6 * scheduler_seconds(num_running, 100)}

    def _sampling(self, params: SamplingParams) -> Row:
        rows, vocab = 32, self._plain.info.vocab_size
        sampler = Sampler(rows, vocab, kernels=Kernels.load())
        one, none = np.array([1], np.int32), np.array([], np.int32)
        for slot in range(rows):
            sampler.admit(Admission(slot, one, none, params))
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))
        slots, positions = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
        sampler.sample(logits.clone(), slots, positions)
        given = logits.clone()
        started = time.perf_counter()
        sampler.sample(given, slots, positions)
        return {"ms": 1000 * (time.perf_counter() - started)}


MAX_RUNNING = 64
SETTLED = 10  # times the tokens, of each stream before the long prompt comes: about as many as then
GROWN = 32  # times the tokens, which a stream beside the long prompt has room for
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top_p 0.9, top_k 50": SamplingParams(temperature=0.8, seed=1, top_p=0.9, top_k=50),
    "penalties": SamplingParams(temperature=0.0, frequency_penalty=0.5),
    "5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


def load(config: BenchConfig, *, deterministic: bool) -> Engine:
    """The model, with pages for the long prompt and the streams."""
    pages = (config.long_prompt + config.streams * GROWN * config.tokens) // 16 + 200
    worker = WorkerConfig(
        model=config.model,
        deterministic=deterministic,
        num_pages=pages,
        max_running_requests=MAX_RUNNING,
        num_threads=config.num_threads,
    )
    return torch_engine.load(worker, lambda *_: None)


def table(title: str, rows: dict[str, Row]) -> str:
    """A comparison as text."""
    columns = list(next(iter(rows.values())))
    lines = [f"{title:<28}" + "".join(f"{column:>28}" for column in columns)]
    for name, row in rows.items():
        lines.append(f"  {name:<26}" + "".join(f"{row[column]:>28,.2f}" for column in columns))
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the figures to a file if one is named."""
    config = parse(BenchConfig, argv, prog="bench.engine", description=__doc__ or "")
    logs.setup("bench", level="warning")
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    figures: dict[str, dict[str, Row]] = {}
    with ExitStack() as engines:
        plain, deterministic = (load(config, deterministic=mode) for mode in (False, True))
        engines.callback(plain.close)
        engines.callback(deterministic.close)
        for title, rows in EngineBench(config, plain, deterministic).tables():
            figures[title] = rows
            print(table(title, rows), flush=True)
    if config.json:
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": facts, "rounds": config.rounds, "figures": figures}
        Path(config.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
