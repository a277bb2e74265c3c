"""The figures, from records whose times are known."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from services.client.bench.record import Record
from services.client.bench.report import html_report
from services.client.bench.summary import Load, summarize
from services.client.bench.svg import ticks
from services.client.bench.table import notes


def record(**changes: Any) -> Record:
    """A request of 11 tokens that was sent at 1 s, with a TTFT of 100 ms and a TPOT of 20 ms."""
    values: dict[str, Any] = {
        "job": 0,
        "turn": 0,
        "scheduled_at": 1.0,
        "woken_late": 0.0,
        "sent_at": 1.0,
        "ended_at": 1.35,
        "ttft": 0.1,
        "last": 0.3,
        "gaps": (0.02,) * 10,
        "input_tokens": 50,
        "output_tokens": 11,
        "from_usage": True,
    }
    return Record(**{**values, **changes})


def test_percentiles_are_interpolated_between_ranks() -> None:
    records = [record(ttft=ms / 1000) for ms in range(10, 111, 10)]  # 11 of them
    spread = summarize(records, Load(concurrency=1), percents=(0, 50, 90, 95, 99, 100)).metrics[
        "ttft"
    ]
    milliseconds = {percent: value * 1000 for percent, value in spread.percentiles.items()}
    assert milliseconds == pytest.approx({0: 10, 50: 60, 90: 100, 95: 105, 99: 109, 100: 110})
    assert spread.count == 11
    assert spread.mean == pytest.approx(0.06)


def test_rates_are_over_the_duration_and_failures_have_no_latency() -> None:
    failed = record(error="http 429", detail="full", ttft=None, last=None, output_tokens=0)
    summary = summarize(
        [record(), record(), failed, failed], Load(concurrency=2), duration=2.0, planned=6
    )
    assert (summary.completed, summary.failed, summary.not_sent) == (2, 2, 2)
    assert summary.errors == {"http 429": 2}
    assert summary.request_throughput == 1.0
    assert summary.output_throughput == 11.0
    assert summary.metrics["ttft"].count == 2
    assert summary.metrics["itl"].count == 20
    assert summary.metrics["tpot"].mean == pytest.approx(0.02)
    assert "scheduled_ttft" not in summary.metrics  # a closed loop has no schedule
    assert "2 failed, http 429: full" in notes(summary)


def test_goodput_counts_from_when_a_request_was_due() -> None:
    on_time = record()
    waited = record(scheduled_at=0.8)  # its TTFT is 300 ms to whoever asked
    slow = record(last=0.9)  # TPOT 80 ms
    broken = record(error="timeout")
    summary = summarize(
        [on_time, waited, slow, broken],
        Load(rate=2.0),
        duration=4.0,
        slos={"ttft": 0.2, "tpot": 0.05},
    )
    assert (summary.good, summary.goodput) == (1, 0.25)
    assert summary.metrics["ttft"].percentiles[99] == pytest.approx(0.1)
    assert summary.metrics["scheduled_ttft"].percentiles[50] == pytest.approx(0.1)
    assert max(summary.metrics["scheduled_e2el"].percentiles.values()) > 0.5


def test_the_offered_rate_is_that_of_the_due_times() -> None:
    records = [record(scheduled_at=at, sent_at=at + 3) for at in (0.0, 0.5, 1.0)]
    assert summarize(records, Load(rate=2.0), duration=9.0).offered == 2.0


@pytest.mark.parametrize(
    ("late", "cpu_seconds", "words"),
    [
        (0.0, 0.1, []),
        (0.05, 0.1, ["fell behind its schedule", "50 ms late"]),
        (0.0, 0.95, ["used 95% of a core"]),
    ],
)
def test_it_says_when_the_client_was_the_bottleneck(
    late: float, cpu_seconds: float, words: list[str]
) -> None:
    records = [record(woken_late=late)] * 3
    summary = summarize(records, Load(rate=5.0), duration=1.0, cpu_seconds=cpu_seconds)
    assert bool(words) == bool(summary.faults_of_the_client)
    for word in words:
        assert word in " ".join(notes(summary))


def test_it_says_where_tokens_were_counted_from_events() -> None:
    summary = summarize([record(), record(from_usage=False)], Load(concurrency=1))
    assert summary.tokens_from == "usage and events"
    assert "each event with text counts as one token" in " ".join(notes(summary))


def test_json_has_vllms_names() -> None:
    values = summarize([record()], Load(rate=1.0), duration=2.0).as_json()
    assert values["median_ttft_ms"] == pytest.approx(100)
    assert values["p99_tpot_ms"] == pytest.approx(20)
    assert values["mean_e2el_ms"] == pytest.approx(350)
    assert values["total_token_throughput"] == 30.5
    values = summarize([record()], Load(rate=float("inf")), duration=2.0).as_json()
    assert json.loads(json.dumps(values, allow_nan=False))["request_rate"] == "inf"


def test_nothing_measured_is_no_crash() -> None:
    summary = summarize([], Load(concurrency=1), unfinished=2, planned=5)
    assert (summary.completed, summary.request_throughput, summary.metrics) == (0, 0.0, {})
    assert "2 requests were in flight, 3 not sent" in " ".join(notes(summary))


def test_it_says_why_requests_were_not_sent() -> None:
    records = [record(), record(error="timeout", detail="none in 1 s")]
    ended = notes(summarize(records, Load(concurrency=1), planned=4))
    assert ended[1:] == ["2 requests were not sent: an earlier turn of theirs failed."]
    idle = notes(summarize(records, Load(rate=1.0), duration=1.0, planned=4, stopped=True))
    assert idle[1:] == ["Stopped early: 0 requests were in flight, 2 not sent."]


def test_a_line_about_a_request_has_what_is_known() -> None:
    line = record(scheduled_at=0.5).as_json()
    assert (line["ttft_ms"], line["scheduled_ttft_ms"]) == (100.0, 600.0)
    assert (line["tokens_from"], line["error"]) == ("usage", None)
    assert len(line["itl_ms"]) == 10


def test_the_report_stands_alone_and_draws_each_run() -> None:
    runs = [
        summarize([record(ended_at=2.0 / rate)] * 4, Load(rate=rate), slos={"ttft": 1})
        for rate in (1.0, 2.0, 4.0, float("inf"))
    ]
    page = html_report({"Model": "<b>"}, runs, [[record()]] * 4)
    assert page.count("<svg") == 5
    assert page.count("<circle") == 4 * 3 * 3 + 3 * (2 + 1)  # no rate is infinite on an axis
    assert "&lt;b&gt;" in page
    assert "http" not in page.partition("</style>")[2].partition("<dl>")[0]
    assert "src=" not in page


def test_the_report_of_one_run_has_its_distributions() -> None:
    records = [record(ttft=0.1 * number) for number in range(1, 5)]
    page = html_report({}, [summarize(records, Load(concurrency=1))], [records])
    assert page.count("<svg") == 4


@pytest.mark.parametrize(
    ("top", "expected"),
    [(0, [0, 1]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (97, [0, 20, 40, 60, 80, 100])],
)
def test_ticks_are_round(top: float, expected: list[float]) -> None:
    assert ticks(top) == expected


def test_ticks_of_what_is_counted_are_whole() -> None:
    assert ticks(2, least=1) == [0, 1, 2]
    assert ticks(8, least=1) == [0, 2, 4, 6, 8]
    assert ticks(12, least=1) == [0, 5, 10, 15]


def test_the_reports_table_groups_percentiles_and_has_no_empty_columns() -> None:
    without = html_report({}, [summarize([record()], Load(concurrency=1))], [[record()]])
    assert "goodput" not in without.partition("<table>")[2]
    summary = summarize([record()], Load(concurrency=1), slos={"ttft": 1})
    table = html_report({}, [summary], [[record()]]).partition("<table>")[2]
    assert '<th rowspan="2">goodput</th>' in table
    heads, _, percents, _, row, *_ = re.split("</?tr>", table)[1:]
    groups = heads.count('<th colspan="3"')
    assert percents.count("<th>") == 3 * groups
    assert row.count("<td>") == heads.count('rowspan="2"') + 3 * groups
