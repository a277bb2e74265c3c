"""How JSON is written under a grammar: what the gateway's and the worker's grammars share.

A schema says nothing of whitespace, and a small model that may write any amount of it
can write nothing else for ever. So between two tokens of JSON there is at most one
blank, or one line end and its indentation: enough for compact JSON, for that of
Python's json.dumps and for pretty-printed JSON up to eight levels of two blanks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# llguidance's options. A keyword that it does not implement is an error, never ignored.
JSON_OPTIONS: Mapping[str, str | bool] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n {0,16}",
    "lenient": False,
}


def inline_json(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a term of a Lark grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": dict(JSON_OPTIONS)}, ensure_ascii=False)
