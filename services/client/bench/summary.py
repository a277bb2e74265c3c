"""The figures of a run, from its records.

Percentiles are interpolated linearly between ranks, as numpy's default and vLLM's client do.
Latencies are of requests that came whole. TTFT, E2EL and goodput are given from the time a
request was due as well, which in an open loop may be before it was sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.client.bench.record import Record

# A client that gets to its requests later than this, or is this busy, is part of what it measures.
_LATE_SECONDS = 0.010
_BUSY_SHARE = 0.8

TITLES = {
    "ttft": "Time to first token (TTFT)",
    "scheduled_ttft": "TTFT from when it was due",
    "tpot": "Time per output token (TPOT)",
    "itl": "Inter-token latency (ITL)",
    "e2el": "End to end (E2EL)",
    "scheduled_e2el": "E2EL from when it was due",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """One metric, in seconds; `percentiles` by percent."""

    count: int
    mean: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, values: Iterable[float], percents: Sequence[float]) -> Spread | None:
        """None if there are no values."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        found: list[float] = np.percentile(array, percents).tolist() if percents else []
        return cls(
            int(array.size),
            float(array.mean()),
            float(array.std()),
            dict(zip(percents, found, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How a run was driven; `rate` and `concurrency` are None where there is no such limit."""

    rate: float | None = None
    concurrency: int | None = None
    trace: bool = False

    def __str__(self) -> str:
        most = "" if self.concurrency is None else f", at most {self.concurrency} at once"
        if self.trace:
            return f"at the trace's times{most}"
        if self.rate is not None:
            return f"{self.rate:g} requests/s{most}"
        return f"{self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Rates are a second of `duration`, which ends with the last answer."""

    load: Load
    duration: float
    completed: int
    failed: int
    unfinished: int  # in flight when it was stopped
    not_sent: int
    stopped: bool  # before its end; else what was not sent had an earlier turn that failed
    errors: dict[str, int]  # by kind
    examples: dict[str, str]  # one failure's sentence, by kind
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    tokens_from: str  # "usage", "events" or "usage and events"
    client_share: float  # of a core that this client used
    late: Spread | None  # how late the client got to its requests
    offered: float | None  # requests a second, as they were due
    good: int | None  # requests that kept every SLO
    metrics: dict[str, Spread] = field(default_factory=dict)

    def per_second(self, amount: float) -> float:
        return amount / self.duration if self.duration > 0 else 0.0

    @property
    def request_throughput(self) -> float:
        return self.per_second(self.completed)

    @property
    def output_throughput(self) -> float:
        return self.per_second(self.output_tokens)

    @property
    def goodput(self) -> float | None:
        return None if self.good is None else self.per_second(self.good)

    @property
    def faults_of_the_client(self) -> list[str]:
        """Sentences about why these figures may be the client's own, not the server's."""
        found: list[str] = []
        worst = max(self.late.percentiles.values()) if self.late else 0.0
        if worst > _LATE_SECONDS:
            found.append(
                f"The client fell behind its schedule: it got to requests up to"
                f" {worst * 1000:.0f} ms late (p99). Read the times from when they were due, and"
                " run it on a machine with a free core."
            )
        if self.client_share > _BUSY_SHARE:
            found.append(
                f"The client used {self.client_share:.0%} of a core, so its own work is in the"
                " latencies. Lower the rate, or run several clients."
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """The object of --output-json, with the names of `vllm bench serve` where it has them."""
        values: dict[str, Any] = {
            "load": str(self.load),
            "request_rate": "inf" if self.load.rate == math.inf else self.load.rate,
            "max_concurrency": self.load.concurrency,
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "not_sent": self.not_sent,
            "errors": self.errors,
            "total_input_tokens": self.input_tokens,
            "total_cached_tokens": self.cached_tokens,
            "total_output_tokens": self.output_tokens,
            "tokens_from": self.tokens_from,
            "request_throughput": self.request_throughput,
            "offered_request_rate": self.offered,
            "request_goodput": self.goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.per_second(self.input_tokens + self.output_tokens),
            "client_core_share": self.client_share,
            "client_faults": self.faults_of_the_client,
        }
        for name, spread in self.metrics.items():
            values |= _spread_json(name, spread)
        if self.late is not None:
            values |= _spread_json("woken_late", self.late)
        return values


def summarize(
    records: Sequence[Record],
    load: Load,
    *,
    percents: Sequence[float] = (50, 90, 99),
    slos: Mapping[str, float] | None = None,
    duration: float = 0.0,
    cpu_seconds: float = 0.0,
    unfinished: int = 0,
    planned: int | None = None,
    stopped: bool = False,
) -> Summary:
    """The figures of the records.

    `duration` is the run's, in seconds, or 0 to take it from the records; `planned` is how many
    requests there should have been; `stopped` whether it was ended before that.
    """
    whole = [record for record in records if not record.error]
    duration = duration or max((record.ended_at for record in records), default=0.0)
    cached = [record.cached_tokens for record in whole if record.cached_tokens is not None]
    failures = [record for record in records if record.error]
    is_open = load.rate is not None or load.trace
    late = [record.woken_late for record in records if record.turn == 0]
    due = sorted(record.scheduled_at for record in records if record.turn == 0)
    span = due[-1] - due[0] if len(due) > 1 else 0.0
    asked = len(records) + unfinished
    return Summary(
        load=load,
        duration=duration,
        completed=len(whole),
        failed=len(failures),
        unfinished=unfinished,
        not_sent=max(0, (asked if planned is None else planned) - asked),
        stopped=stopped,
        errors=dict(Counter(record.error for record in failures).most_common()),
        examples={record.error: record.detail for record in reversed(failures)},
        input_tokens=sum(record.input_tokens for record in whole),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(record.output_tokens for record in whole),
        tokens_from=_tokens_from(whole),
        client_share=cpu_seconds / duration if duration else 0.0,
        late=Spread.of(late, (99,)) if is_open else None,
        offered=(len(due) - 1) / span if is_open and span else None,
        good=sum(record.keeps(dict(slos)) for record in records) if slos else None,
        metrics=_metrics(whole, percents, is_open),
    )


def _metrics(
    whole: Sequence[Record], percents: Sequence[float], is_open: bool
) -> dict[str, Spread]:
    values: dict[str, list[float | None]] = {
        "ttft": [record.ttft for record in whole],
        "scheduled_ttft": [record.scheduled_ttft for record in whole] if is_open else [],
        "tpot": [record.tpot for record in whole],
        "itl": [gap for record in whole for gap in record.gaps],
        "e2el": [record.e2el for record in whole],
        "scheduled_e2el": [record.scheduled_e2el for record in whole] if is_open else [],
    }
    spreads = {
        name: Spread.of((value for value in found if value is not None), percents)
        for name, found in values.items()
    }
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _tokens_from(whole: Sequence[Record]) -> str:
    sources = {record.from_usage for record in whole}
    names = [name for kind, name in ((True, "usage"), (False, "events")) if kind in sources]
    return " and ".join(names) or "usage"


def _spread_json(name: str, spread: Spread) -> dict[str, Any]:
    values = {f"mean_{name}_ms": spread.mean, f"std_{name}_ms": spread.std}
    for percent, value in spread.percentiles.items():
        values["median_" + name + "_ms" if percent == 50 else f"p{percent:g}_{name}_ms"] = value
    return {key: round(value * 1000, 4) for key, value in values.items()}
