"""How a journey's events become the spans of the waterfall, by the page's own code in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.gateway.web.test_routes import WEB

SOURCE = (WEB / "src" / "requests" / "spans.js").as_uri()
PROGRAM = f"""
import {{ spansOf }} from "{SOURCE}";
let given = "";
for await (const chunk of process.stdin) given += chunk;
console.log(JSON.stringify(JSON.parse(given).map(spansOf)));
"""


def event(at: float, kind: str, **more: Any) -> dict[str, Any]:
    return {"at": at, "kind": kind, **more}


def journey(*events: dict[str, Any], choices: int = 1, now: float = 99.0) -> dict[str, Any]:
    ended = events[-1]["at"] if events[-1]["kind"] == "ended" else None
    return {"request": {"choices": choices, "ended": ended}, "events": list(events), "now": now}


BEGIN = (event(0, "received"), event(1, "encoded", tokens=9))
MOVED = journey(
    *BEGIN,
    *(event(1, "queued"), event(2, "admitted"), event(2, "submitted", address="w:1")),
    *(event(3, "accepted"), event(5, "started", tokens=4), event(6, "prefilled", tokens=7)),
    *(event(8, "first_token"), event(9, "first_text"), event(12, "worker_lost", detail="gone")),
    *(event(13, "submitted", address="w:2"), event(14, "accepted"), event(14, "started")),
    *(event(15, "first_token"), event(20, "last_token", tokens=30), event(21, "last_text")),
    event(22, "ended", detail="stop"),
)
RUNNING = journey(*BEGIN, event(2, "submitted", address="w:1"), now=10.0)
REFUSED = journey(event(0, "received"), event(4, "ended", detail="overloaded"))
TWO = journey(
    *BEGIN,
    *(event(2, "submitted"), event(2, "submitted", choice=1)),
    *(event(3, "first_token"), event(4, "first_token", choice=1)),
    *(event(5, "last_token"), event(6, "last_token", choice=1), event(7, "ended")),
    choices=2,
)


@pytest.fixture(scope="module")
def shown() -> list[dict[str, Any]]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: the page's code runs in browsers alone")
    run = subprocess.run(
        [node, "--input-type=module", "--eval", PROGRAM],
        input=json.dumps([MOVED, RUNNING, REFUSED, TWO]),
        capture_output=True,
        text=True,
        check=True,
    )
    result: list[dict[str, Any]] = json.loads(run.stdout)
    return result


def spans(shown: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    return [(row["name"], row["start"], row["end"]) for row in shown["rows"]]


def test_a_request_that_moved_has_the_spans_of_both_workers(shown: list[dict[str, Any]]) -> None:
    assert spans(shown[0]) == [
        ("Encode", 0, 1),
        ("Queue in the gateway", 1, 2),
        ("Send to the worker", 2, 3),
        ("Queue at the worker", 3, 5),
        ("Prefill", 5, 8),
        ("Decode", 8, 12),
        ("First text", 8, 9),
        ("Move to another worker", 12, 13),
        ("Send to the worker", 13, 14),
        ("Prefill", 14, 15),
        ("Decode", 15, 20),
        ("Last text", 20, 21),
    ]
    prefill = shown[0]["rows"][4]
    assert [tick["at"] for tick in prefill["ticks"]] == [6]
    assert prefill["note"] == "in 2 parts"
    assert (shown[0]["start"], shown[0]["end"]) == (0, 22)


def test_what_goes_on_has_no_end(shown: list[dict[str, Any]]) -> None:
    assert spans(shown[1]) == [("Encode", 0, 1), ("Send to the worker", 2, None)]
    assert shown[1]["end"] == 10


def test_a_refusal_ends_what_it_was_in(shown: list[dict[str, Any]]) -> None:
    assert spans(shown[2]) == [("Encode", 0, 4)]


def test_choices_have_spans_of_their_own(shown: list[dict[str, Any]]) -> None:
    decodes = [row for row in shown[3]["rows"] if row["name"] == "Decode"]
    assert [(row["choice"], row["start"], row["end"]) for row in decodes] == [(0, 3, 5), (1, 4, 6)]
