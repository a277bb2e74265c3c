"""Log set-up: JSON lines for machines, short lines for a terminal.

`bind` gives every line of the task that calls it, and of the tasks it starts, the ids
of the request it works for. The level can be changed while the process runs. Lines of
libraries, and Python's warnings, look like ours.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Libraries whose info lines tell a person running Shoal nothing.
_NOISY = ("httpx", "uvicorn.access", "uvicorn.error", "transformers")
_BOUND: ContextVar[Mapping[str, str] | None] = ContextVar("bound", default=None)

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")


def setup(
    service: str, *, level: str = "info", format: str = "auto", stream: TextIO | None = None
) -> None:
    """Sends the process's logs to stdout, or to another stream.

    `format` is json, human, or auto: human on a terminal and json elsewhere.
    Fields passed as `extra`, and those that are bound, appear in both.
    """
    stream = stream or sys.stdout
    human = format == "human" or (format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_HumanFormatter(service) if human else _JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.captureWarnings(True)
    set_level(level)


def adopt(library: str) -> None:
    """Has the loggers of a library that brings handlers of its own write as ours do."""
    for name in [library, *logging.root.manager.loggerDict]:
        if name == library or name.startswith(f"{library}."):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True


def set_level(level: str) -> None:
    """Shows lines of that level, one of `LEVELS`, and worse ones from now on."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def change_level(level: str) -> None:
    """The same while the process runs, and says so."""
    set_level(level)
    log.info("showing the log's lines from another level on", extra={"from": level})


def level_number() -> int:
    """The least severe level that is shown, as `logging` counts, never 0."""
    return logging.getLogger().level


def follow_level(number: int) -> None:
    """Takes another process's level over."""
    if number != level_number():
        change_level(logging.getLevelName(number).lower())


def current_level() -> str:
    """The least severe level that is shown."""
    return logging.getLevelName(logging.getLogger().level).lower()


def bind(**fields: str) -> None:
    """Adds fields to every line of this task from now on; empty ones are left out."""
    given = {name: value for name, value in fields.items() if value}
    _BOUND.set({**(_BOUND.get() or {}), **given})


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    own = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    return {**(_BOUND.get() or {}), **own}


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _HumanFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        text = f"{time} {record.levelname:<7} {self._service}: {record.getMessage()}"
        extras = " ".join(f"{key}={value}" for key, value in _extras(record).items())
        text = f"{text} {extras}" if extras else text
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
