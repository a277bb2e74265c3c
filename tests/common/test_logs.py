"""Both forms of log lines."""

from __future__ import annotations

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
