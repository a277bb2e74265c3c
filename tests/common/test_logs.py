"""Both forms of log lines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from services.common import logs


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_carry_extras_and_exceptions(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("worker", format="json")
    log = logging.getLogger("some.where")
    log.info("listening on %s", "here", extra={"port": 7, "odd": {1}})
    try:
        raise ValueError("inner")
    except ValueError:
        log.exception("fault")
    first, second = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "service": "worker",
        "logger": "some.where",
        "message": "listening on here",
        "port": 7,
        "odd": "{1}",
    }
    assert "ValueError: inner" in second["exception"]


def test_auto_is_json_when_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("gateway")
    logging.getLogger("x").warning("hm")
    assert json.loads(capsys.readouterr().err)["level"] == "warning"


def test_human_lines_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("gateway", format="human")
    log = logging.getLogger("x")
    log.info("draining", extra={"requests": 3})
    try:
        raise ValueError("inner")
    except ValueError:
        log.exception("fault")
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert first.endswith("INFO    gateway: draining requests=3")
    assert second.endswith("ERROR   gateway: fault")
    assert trace[-1] == "ValueError: inner"


def test_the_level_holds_and_chatty_libraries_are_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup("gateway", level="info", format="human")
    logging.getLogger("x").debug("hidden")
    logging.getLogger("httpx").info("hidden")
    assert capsys.readouterr().err == ""


async def test_bound_fields_are_in_every_line_of_a_task_and_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup("test", format="json")

    async def work(name: str) -> None:
        logs.bind(request_id=name, trace_id="")
        log = logging.getLogger("test")
        log.info("one")
        await asyncio.create_task(asyncio.to_thread(log.info, "two"))
        log.info("three", extra={"request_id": "told"})

    await asyncio.gather(work("a"), work("b"))
    logging.getLogger("test").info("outside")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    found = sorted((line["message"], line.get("request_id", "")) for line in lines)
    assert found == [
        *(("one", "a"), ("one", "b"), ("outside", "")),
        *(("three", "told"), ("three", "told"), ("two", "a"), ("two", "b")),
    ]
    assert not [line for line in lines if "trace_id" in line]


def test_the_level_changes_at_run_time(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("test", format="json", level="warning")
    log = logging.getLogger("test")
    log.info("unseen")
    logs.set_level("info")
    log.info("seen")
    assert logs.current_level() == "info"
    assert logging.getLogger("httpx").getEffectiveLevel() == logging.WARNING
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == [
        "seen"
    ]
