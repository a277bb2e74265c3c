"""What every suite says: the versions it runs with, and a line for each step that passed."""

from __future__ import annotations

import importlib.metadata
import sys

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}


def arguments() -> tuple[str, str]:
    """The REST root with /v1, and the model."""
    return sys.argv[1], sys.argv[2]


def version(package: str) -> None:
    print(f"version {package} {importlib.metadata.version(package)}", flush=True)


def passed(step: str) -> None:
    print(f"ok {step}", flush=True)
