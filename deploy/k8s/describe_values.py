"""Writes the chart's README.md from values.yaml: every value with its default and its comment.

    python -m deploy.k8s.describe_values

The comment above a key describes it. Run this when values.yaml changes; a test says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).with_name("shoal")
INTRODUCTION = """# The Shoal chart

Serves large language models as a fleet: gateway, tokenizers, detokenizers and pools of workers.
`docs/deployment.md` tells how the pieces fit; `deploy/k8s/examples` has values to start from.

```sh
helm install shoal deploy/k8s/shoal --namespace llm --create-namespace --values my-values.yaml
helm test shoal --namespace llm
```

`values.schema.json` refuses keys that are not here. This page is written by
`python -m deploy.k8s.describe_values` from `values.yaml`.
"""
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):(?P<rest>.*)$")


@dataclass(frozen=True)
class Value:
    """One row: a dotted path, its default, and what its comment says."""

    path: str
    default: Any
    comment: str


def values(text: str) -> Iterator[Value]:
    """The documented values of a values.yaml, in its order; sections count where described."""
    defaults = yaml.safe_load(text)
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
            continue
        match = _KEY.match(line)
        if match is None:
            comment = []
            continue
        indent = len(match["indent"])
        parents = [parent for parent in parents if parent[0] < indent]
        parents.append((indent, match["key"]))
        if comment:
            path = ".".join(key for _, key in parents)
            yield Value(path, _find(defaults, path), " ".join(comment))
        comment = []


def _find(defaults: Any, path: str) -> Any:
    for key in path.split("."):
        defaults = defaults[key]
    return defaults


def page(text: str) -> str:
    """The README of a values.yaml: a section for each top-level group, the rest before them."""
    sections: dict[str, list[str]] = {"General": []}
    introductions: dict[str, str] = {}
    for value in values(text):
        top, dot, _ = value.path.partition(".")
        if not dot and _is_group(value):
            introductions[top] = f"{value.comment}\n\n"
        else:
            sections.setdefault(top if dot else "General", []).append(_row(value))
    parts = [INTRODUCTION]
    for name, rows in sections.items():
        table = "\n".join(["| value | default | |", "|---|---|---|", *rows])
        parts.append(f"\n## {name}\n\n{introductions.get(name, '')}{table}\n")
    return "".join(parts)


def _is_group(value: Value) -> bool:
    return isinstance(value.default, dict) and bool(value.default)


def _row(value: Value) -> str:
    shown = "" if _is_group(value) else f"`{json.dumps(value.default)}`"
    comment = value.comment.replace("|", "\\|").replace("<", "\\<")
    return f"| `{value.path}` | {shown} | {comment} |"


def main() -> None:
    """Rewrites the chart's README.md."""
    (CHART / "README.md").write_text(page((CHART / "values.yaml").read_text()))


if __name__ == "__main__":
    main()
