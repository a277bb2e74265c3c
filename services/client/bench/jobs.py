"""What is asked: jobs of one or more turns, made up or read from a file, before anything is sent.

The same config gives the same jobs. Nothing here knows of servers or clocks.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from services.client.bench.config import SYNTHETIC, BenchConfig
from services.client.bench.words import TextMaker
from services.common.errors import StartupError

_DEFAULT_OUTPUT = 64
_DEFAULT_PREFIX = 256
_MOONCAKE_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what the user says, and the most tokens of the answer."""

    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """Turns that follow one another; `at` is when the trace sent the first, in seconds."""

    turns: tuple[Turn, ...]
    at: float | None = None


def make_jobs(config: BenchConfig, words: TextMaker) -> list[Job]:
    """The jobs of a run: `num_prompts` turns in all, or as many as the file has.

    Raises StartupError if the file cannot be used.
    """
    if config.dataset_name in SYNTHETIC:
        return _synthetic(config, words)
    readers = {"mooncake": _mooncake, "azure": _azure, "sharegpt": _sharegpt}
    path = Path(config.dataset_path)
    try:
        jobs = readers[config.dataset_name](config, words, path)
        found = list(itertools.islice(jobs, config.num_prompts))
    except OSError as error:
        raise StartupError(f"cannot read --dataset-path {path}: {error.strerror}")
    except KeyError as error:
        raise StartupError(f"{path} is no {config.dataset_name} data set: a row has no {error}")
    except (ValueError, TypeError) as error:
        raise StartupError(f"{path} is no {config.dataset_name} data set: {error}")
    if not found:
        raise StartupError(f"{path} has no request")
    return _from_zero(found, config.trace_speed)


def warmup_jobs(config: BenchConfig, words: TextMaker) -> list[Job]:
    """Jobs of one short turn, whose prompts are not among the measured ones."""
    rng = random.Random(f"warmup {config.seed}")
    length = min(config.input_len, 64)
    return [Job((Turn(words.text(rng, length), 8),)) for _ in range(config.warmup)]


def _synthetic(config: BenchConfig, words: TextMaker) -> list[Job]:
    rng = random.Random(config.seed)
    shared = config.dataset_name == "shared-prefix"
    prefix_len = config.prefix_len
    if prefix_len is None:
        prefix_len = _DEFAULT_PREFIX if shared else 0
    prefixes = [words.text(rng, prefix_len) for _ in range(config.num_prefixes * bool(prefix_len))]
    turns = config.turns if config.dataset_name == "multi-turn" else 1
    jobs: list[Job] = []
    left = config.num_prompts
    while left > 0:
        job_turns = [_random_turn(config, words, rng) for _ in range(min(turns, left))]
        if prefixes:
            first = job_turns[0]
            prefix = prefixes[len(jobs) % len(prefixes)]
            job_turns[0] = Turn(f"{prefix} {first.text}", first.max_tokens)
        jobs.append(Job(tuple(job_turns)))
        left -= len(job_turns)
    return jobs


def _random_turn(config: BenchConfig, words: TextMaker, rng: random.Random) -> Turn:
    length = _around(rng, config.input_len, config.range_ratio)
    output = _around(rng, config.output_len or _DEFAULT_OUTPUT, config.range_ratio)
    return Turn(words.text(rng, length), output)


def _around(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _mooncake(config: BenchConfig, words: TextMaker, path: Path) -> Iterator[Job]:
    """Lines of timestamp (ms), input_length, output_length and hash_ids of blocks of prompt.

    Equal hash ids become equal words, so the prefixes that the trace shared are shared. A row
    without them shares nothing.
    """
    for number, row in enumerate(_json_lines(path)):
        length = int(row["input_length"])
        own = [f"row {number} block {at}" for at in range(0, length, _MOONCAKE_BLOCK)]
        blocks = []
        for position, hash_id in enumerate(row.get("hash_ids") or own):
            size = min(_MOONCAKE_BLOCK, length - position * _MOONCAKE_BLOCK)
            if size > 0:
                rng = random.Random(f"{config.seed} {hash_id}")
                blocks.append(words.text(rng, size))
        turn = Turn(" ".join(blocks), config.output_len or max(1, int(row["output_length"])))
        yield Job((turn,), float(row["timestamp"]) / 1000)


def _azure(config: BenchConfig, words: TextMaker, path: Path) -> Iterator[Job]:
    """Azure's public traces: TIMESTAMP, ContextTokens, GeneratedTokens."""
    rng = random.Random(config.seed)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if not set(_AZURE_FIELDS) <= set(reader.fieldnames or ()):
            raise ValueError(f"its columns are {reader.fieldnames}, not {', '.join(_AZURE_FIELDS)}")
        for row in reader:
            if None in (row[name] for name in _AZURE_FIELDS):
                raise ValueError(f"line {reader.line_num} has too few columns")
            stamp, context, generated = (row[name].strip() for name in _AZURE_FIELDS)
            length, output = int(context), config.output_len or max(1, int(generated))
            yield Job((Turn(words.text(rng, length), output),), _seconds(stamp))


def _seconds(stamp: str) -> float:
    """`2023-11-16 18:15:46.6805900`, with more digits than a datetime holds, or with a zone."""
    whole, _, fraction = stamp.partition(".")
    digits = "".join(char for char in fraction[:9] if char.isdigit())
    zone = "" if "+" in whole else "+00:00"
    return datetime.fromisoformat(whole + zone).timestamp() + float(f"0.{digits or 0}")


def _sharegpt(config: BenchConfig, words: TextMaker, path: Path) -> Iterator[Job]:
    """The first question of each conversation; its answer tells how long ours may be.

    `conversations` of {from, value}, or `messages` of {role, content}, in a list or in lines. The
    seed draws their order: each run of a sweep has others, as far as the file has enough.
    """
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else list(_json_lines(path))
    random.Random(config.seed).shuffle(rows)
    for row in map(_object, rows):
        turns = row.get("conversations") or row.get("messages") or ()
        said = [
            (turn.get("from") or turn["role"], str(turn.get("value") or turn.get("content") or ""))
            for turn in map(_object, turns)
        ]
        pairs = itertools.pairwise(said)
        for (asker, question), (answerer, answer) in pairs:
            if asker in ("human", "user") and answerer in ("gpt", "assistant") and question:
                yield Job((Turn(question, config.output_len or words.length(answer)),))
                break


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield _object(json.loads(line))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a row, or a turn in it, is no object")
    return value


def _from_zero(jobs: Iterable[Job], speed: float) -> list[Job]:
    """The jobs in the order of their times, which begin at 0."""
    timed = sorted(jobs, key=lambda job: job.at or 0.0)
    start = timed[0].at or 0.0
    return [Job(job.turns, None if job.at is None else (job.at - start) / speed) for job in timed]
