"""Log set-up: JSON lines for machines, short lines for a terminal."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup(service: str, *, level: str = "info", format: str = "auto") -> None:
    """Sends the process's logs to stderr.

    `format` is json, human, or auto: human on a terminal and json elsewhere.
    Fields passed as `extra` appear in both.
    """
    human = format == "human" or (format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_HumanFormatter(service) if human else _JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries whose info lines tell a person running Shoal nothing.
    for noisy in ("httpx", "uvicorn.access", "uvicorn.error", "transformers"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


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
