"""Every metric that the documentation names is one that a running fleet tells."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from tests.integration.served import ServedFleet

_ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`((?:shoal_|vllm:)[a-z_:]+)")
_SUFFIX = re.compile(r"_(total|bucket|count|sum|created)$")
_ROLES = ("gateway", "tokenizer", "detokenizer", "worker")


def _documented() -> dict[str, set[str]]:
    """Where each metric is named."""
    places: dict[str, set[str]] = {}
    for path in (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))):
        for name in _NAMED.findall(path.read_text()):
            places.setdefault(name, set()).add(path.name)
    return places


def _told(fleet: ServedFleet) -> set[str]:
    """The names of every service's samples, with and without what Prometheus appends."""
    samples = {key.partition("{")[0] for role in _ROLES for key in fleet.metrics(role)}
    return samples | {_SUFFIX.sub("", name) for name in samples}


def test_the_metrics_that_the_docs_name_exist(fleet: ServedFleet) -> None:
    for model, status in (("", 200), ("no such model", 404)):  # a series begins with its label
        body = {"model": model, "prompt": "hi", "max_tokens": 2}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == status, answer.text
    documented, told = _documented(), _told(fleet)
    assert len(documented) >= 10
    missing = {name: places for name, places in documented.items() if name not in told}
    assert not missing
