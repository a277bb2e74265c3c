"""Both forms of log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
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
    logging.captureWarnings(False)


def test_json_lines_carry_extras_and_exceptions(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("worker", format="json")
    log = logging.getLogger("some.where")
    log.info("listening on %s", "here", extra={"port": 7, "odd": {1}})
    try:
        raise ValueError("inner")
    except ValueError:
        log.exception("fault")
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
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


def test_auto_is_json_when_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("gateway")
    logging.getLogger("x").warning("hm")
    assert json.loads(capsys.readouterr().out)["level"] == "warning"


def test_human_lines_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("gateway", format="human")
    log = logging.getLogger("x")
    log.info("draining", extra={"requests": 3})
    try:
        raise ValueError("inner")
    except ValueError:
        log.exception("fault")
    first, second, *trace = capsys.readouterr().out.splitlines()
    assert first.endswith("INFO    gateway: draining requests=3")
    assert second.endswith("ERROR   gateway: fault")
    assert trace[-1] == "ValueError: inner"


def test_the_level_holds_and_chatty_libraries_are_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup("gateway", level="info", format="human")
    logging.getLogger("x").debug("hidden")
    logging.getLogger("httpx").info("hidden")
    assert capsys.readouterr().out == ""


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
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
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
    assert [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()] == [
        "seen"
    ]


def test_a_rank_takes_over_the_level_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("rank1", format="json", level="warning")
    for number in (logging.WARNING, logging.DEBUG, logging.DEBUG):
        logs.follow_level(number)
    logging.getLogger("test").debug("seen")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("from", line["message"]) for line in lines] == ["debug", "seen"]


def test_libraries_and_warnings_write_as_we_do(capsys: pytest.CaptureFixture[str]) -> None:
    own = logging.StreamHandler()
    for name in ("somelib", "somelib.deep", "somelibrary"):
        logger = logging.getLogger(name)
        logger.addHandler(own)
        logger.propagate = False
    logs.setup("worker", format="json")
    logs.adopt("somelib")
    logging.getLogger("somelib.deep").error("torn")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.setup("worker", format="json")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    written = capsys.readouterr()
    first, second = [json.loads(line) for line in written.out.splitlines()]
    assert (first["message"], first["logger"]) == ("torn", "somelib.deep")
    assert second["logger"] == "py.warnings"
    assert "DeprecationWarning: old" in second["message"]
    assert written.err == ""
    assert logging.getLogger("somelibrary").handlers == [own]
    logging.captureWarnings(False)
