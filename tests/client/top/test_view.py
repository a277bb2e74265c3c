"""The fleet as text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.client.top.config import SERVICE_FILTERS, SORT_KEYS, ServiceFilter, SortKey
from services.client.top.view import Choices, Series, bar, chosen, screen, span, sparkline
from tests.client.top.fleets import FLEET, engine, fleet, instance


def shown(choices: Choices | None = None, width: int = 160) -> list[str]:
    series = Series()
    series.add(FLEET)
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(FLEET, choices or Choices(), series))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_gateway_says_what_it_does() -> None:
    lines = shown()
    assert lines[0] == "gateway gw-1  ready for 2m  Shoal 0.1.0"
    assert "requests 4 of 1000 in flight, 1 queued   tokens/s 20 in, 2,345 out" in lines[1]
    assert "9 requests, 1 errors, 2 cancelled, 3 resumes" in lines[2]
    assert "TTFT p50 50 p99 200 ms   ITL -" in lines[2]


def test_each_instance_has_one_line() -> None:
    *lines, detail = shown()[5:]
    assert [line.split()[:5] for line in lines] == [
        ["worker", "unix:/w0", "ready", "1m", "2"],
        ["worker", "unix:/w1", "dead", "3s", "2"],
        ["worker", "unix:/w2", "ready", "1m", "2"],
        ["tokenizer", "unix:/t0", "ready", "1m", "7"],
    ]
    assert lines[0].split()[5:] == [
        *("3/256", "1", "███▒▒░░░░░", "30%", "25%", "10", "1,234", "█", "90%"),
    ]
    assert detail == "unix:/w1: connection refused"


@pytest.mark.parametrize("width", [100, 110, 120, 160])
def test_no_column_is_lost_in_a_narrow_terminal(width: int) -> None:
    series = Series()
    for rate in range(30):
        series.add(
            fleet(
                instance(
                    "worker", "unix:/run/shoal/w0", engine=engine(tokens_out_per_s=float(rate))
                )
            )
        )
    busy = instance("worker", "unix:/run/shoal/w0", engine=engine(tokens_out_per_s=30.0))
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(fleet(busy), Choices(), series))
    assert isinstance(console.file, io.StringIO)
    head, line = (text.split() for text in console.file.getvalue().splitlines()[4:6])
    assert head[-2:] == ["out/s", "busy"]
    assert line[-1] == "90%"
    assert line[-2].endswith("█")  # the newest


def test_no_line_is_wider_than_the_terminal() -> None:
    assert max(map(len, shown(width=100))) <= 100
    assert all(state in "\n".join(shown(width=100)) for state in (" ready ", " dead "))


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("service", "unix:/w0"),
        ("state", "unix:/w1"),
        ("open", "unix:/t0"),
        ("running", "unix:/w2"),
        ("waiting", "unix:/w0"),
        ("pages", "unix:/w2"),
        ("hits", "unix:/w0"),
        ("out", "unix:/w0"),
        ("busy", "unix:/w0"),
    ],
)
def test_each_order_has_its_first(sort: SortKey, first: str) -> None:
    assert chosen(FLEET, Choices(sort=sort))[0].address == first


@pytest.mark.parametrize(("service", "count"), [("all", 4), ("worker", 3), ("detokenizer", 0)])
def test_one_service_alone(service: ServiceFilter, count: int) -> None:
    assert len(chosen(FLEET, Choices(service=service))) == count


def test_keys_go_round() -> None:
    choices = Choices()
    seen = set()
    for _ in SORT_KEYS:
        choices.press("s")
        seen.add(choices.sort)
    assert (seen, choices.sort) == (set(SORT_KEYS), "service")
    choices.press("S")
    assert choices.sort == SORT_KEYS[-1]
    for _ in SERVICE_FILTERS:
        choices.press("f")
    assert choices.service == "all"
    choices.press("x")
    assert choices == Choices(sort=SORT_KEYS[-1])


def test_series_follow_the_rates_and_forget_the_gone() -> None:
    series = Series()
    for rate in (0.0, 50.0, 100.0):
        series.add(fleet(instance("worker", "a", engine=engine(tokens_out_per_s=rate))))
    assert sparkline(series.rates["a"]) == "▁▄█"
    series.add(fleet())
    assert series.rates == {}
    assert sparkline([0.0, 0.0]) == "▁▁"


@pytest.mark.parametrize(
    ("free", "evictable", "expected"),
    [(100, 0, "░" * 10), (0, 0, "█" * 10), (0, 100, "▒" * 10), (94, 3, "▒░░░░░░░░░")],
)
def test_the_bar_has_ten_cells(free: int, evictable: int, expected: str) -> None:
    assert bar(engine(pages_free=free, pages_evictable=evictable)) == expected


def test_spans_are_short() -> None:
    assert [span(value) for value in (-1, 0, 59.4, 90, 7200, 200_000)] == [
        *("0s", "0s", "59s", "2m", "2h", "2d"),
    ]
