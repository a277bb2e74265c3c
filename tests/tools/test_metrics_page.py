"""Every metric of every service: documented, and as Prometheus' own linter wants it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess

import pytest
from prometheus_client import generate_latest

from tools.metrics_page import PAGE, SERVICES, registries, render, sample_name, with_tables

_ROOT = PAGE.parents[1]
_PLACES = (
    "README.md",
    "docs/**/*.md",
    "deploy/k8s/shoal/files/rules.yaml",
    "deploy/k8s/shoal/dashboards/*.json",
)
_NAMED = re.compile(
    r"\b((?:shoal_(?:gateway|fleet|tokenizer|detokenizer|worker|abort)_|vllm:)[a-z_0-9]*[a-z])"
)
_APPENDED = re.compile(r"_(total|bucket|count|sum)$")
_VLLM_COLON = re.compile(r"vllm:\w+ metric names should not contain ':'")


async def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page, await render()), "run: python -m tools.metrics_page"


async def test_workers_alone_have_the_names_of_vllm() -> None:
    for service, registry in (await registries()).items():
        names = {sample_name(metric) for metric in registry.collect()}
        assert any(name.startswith("vllm:") for name in names) == (service == "worker")
        if service == "worker":
            assert names >= {
                *("vllm:num_requests_running", "vllm:num_requests_waiting"),
                *("vllm:kv_cache_usage_perc", "vllm:cache_config_info"),
                *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
                *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
                *("vllm:e2e_request_latency_seconds", "vllm:request_success_total"),
            }


async def test_a_series_is_there_before_it_counts() -> None:
    """A rate sees the first error only if there was a 0 before it."""
    for service, registry in (await registries()).items():
        for metric in registry.collect():
            assert metric.samples, f"{service}: {metric.name}"
            assert len(metric.samples) <= 30, f"{service}: {metric.name}"


async def test_the_docs_name_no_metric_that_is_not_there() -> None:
    """Nor do the alerts and the dashboards."""
    told = {
        metric.name for registry in (await registries()).values() for metric in registry.collect()
    }
    named: dict[str, set[str]] = {}
    for pattern in _PLACES:
        for path in sorted(_ROOT.glob(pattern)):
            for name in _NAMED.findall(path.read_text()):
                named.setdefault(_APPENDED.sub("", name), set()).add(path.name)
    assert len(named) >= 30
    assert not {name: places for name, places in named.items() if name not in told}


@pytest.mark.parametrize("service", SERVICES)
def test_promtool_has_nothing_to_say(service: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    text = generate_latest(asyncio.run(registries())[service])
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False, timeout=60
    )
    said = [
        line
        for line in (done.stdout + done.stderr).decode().splitlines()
        if not _VLLM_COLON.fullmatch(line)  # vLLM's names are as they are
    ]
    assert not said
    assert done.returncode in (0, 3)  # 3: those names
