"""A real Prometheus scrapes a real fleet: every query of the dashboards has data, and the alerts
are quiet while nothing is wrong."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from deploy.k8s.grafana.__main__ import render
from tests.deploy.charts import CHART
from tests.integration.prometheus import Prometheus
from tests.integration.served import ServedFleet
from tests.programs import eventually

pytestmark = pytest.mark.integration

RULES = CHART / "files" / "rules.yaml"
_TARGETS = re.compile(r"http://[\d.:]+/targets")
_WINDOW = "1m"
_REQUESTS = 25  # that reach a worker
# Nobody waits for room, as there is room: a quantile of nothing is no number.
_QUIET = ("shoal_gateway_queue_seconds",)


@pytest.fixture(scope="module")
def fleet() -> Iterator[ServedFleet]:
    """Two gateways on one port, which Prometheus must tell apart."""
    flags = ("--engine", "fake", "--model", "byte", "--workers", "2", "--gateways", "2")
    with ServedFleet(*flags, "--admin-address", "127.0.0.1:0", "--log-format", "json") as served:
        yield served


@pytest.fixture(scope="module")
def prometheus(
    fleet: ServedFleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    targets = fleet.wait_for_line(_TARGETS, timeout=10).group()
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus(binary, folder, targets, RULES) as running:
        eventually(
            lambda: len(running.query("up == 1")) == 6,
            timeout=60,
            what=lambda: running.get("targets"),
        )
        _use(fleet)
        _scraped_again(running)
        yield running


def _use(fleet: ServedFleet) -> None:
    """Prompts twice over, so that the prefix cache is hit; a refusal; a client that leaves."""
    body = {"prompt": "once upon a time " * 20, "max_tokens": 8}
    with httpx.Client(base_url=f"{fleet.url}/v1", timeout=60) as client:
        with ThreadPoolExecutor(8) as pool:
            for answer in pool.map(lambda _: client.post("/completions", json=body), range(24)):
                assert answer.status_code == 200, answer.text
        assert client.post("/completions", json={**body, "model": "x"}).status_code == 404
        endless = {**body, "max_tokens": 50_000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/completions", json=endless) as response:
            next(response.iter_lines())
    eventually(
        lambda: fleet.total("worker", "shoal_abort_to_kv_free_seconds_count") >= 1, timeout=30
    )


def _scraped_again(prometheus: Prometheus) -> None:
    """Waits until every process was scraped twice more, and a rule was evaluated after that."""
    started = float(prometheus.query("vector(time())")[0]["value"][1])
    for name in ("up", "shoal:ttft_late:ratio_rate5m"):
        eventually(
            lambda name=name: all(  # type: ignore[misc]  # its type is plain
                float(series["value"][1]) > started + 2
                for series in prometheus.query(f"timestamp({name})") or [{"value": (0, "0")}]
            ),
            timeout=60,
        )


def _expressions() -> Iterator[tuple[str, str]]:
    for text in render().values():
        board: dict[str, Any] = json.loads(text)
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{board['uid']}: {panel['title']}", target["expr"]


def _without_data(prometheus: Prometheus) -> list[str]:
    empty = []
    for place, expression in _expressions():
        filled = (
            expression.replace("$__rate_interval", _WINDOW)
            .replace("$job", "shoal")
            .replace("$instance", ".+")
        )
        assert "$" not in filled
        values = [float(series["value"][1]) for series in prometheus.query(filled)]
        quiet = any(name in filled for name in _QUIET)
        if not values or (all(map(math.isnan, values)) and not quiet):
            empty.append(f"{place}: {filled}")
    return empty


def test_every_query_of_every_dashboard_has_data(prometheus: Prometheus) -> None:
    """Again and again, since a scrape that a busy machine makes late leaves a gap."""
    eventually(
        lambda: not _without_data(prometheus), timeout=60, what=lambda: _without_data(prometheus)
    )


def test_sums_count_every_request_once(prometheus: Prometheus) -> None:
    """Over two gateways on one port, and two workers."""

    def value(expression: str) -> float:
        return float((prometheus.query(expression) or [{"value": (0, "0")}])[0]["value"][1])

    for expression in (
        "sum(vllm:request_success_total)",
        'sum(vllm:e2e_request_latency_seconds_count{component="worker"})',
    ):
        eventually(lambda of=expression: value(of) == _REQUESTS, timeout=60, what=expression)  # type: ignore[misc]
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total"):
        alone = f'count({name}) == 2 and count({name}) == count({name}{{component="worker"}})'
        eventually(lambda of=alone: bool(prometheus.query(of)), timeout=60, what=alone)  # type: ignore[misc]


def test_the_rules_are_healthy_and_nothing_fires(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    alerts = {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}
    assert len(alerts) >= 9
    assert "firing" not in alerts.values()
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    for name in recorded:
        eventually(lambda of=name: bool(prometheus.query(of)), timeout=60, what=name)  # type: ignore[misc]


def test_a_killed_worker_is_seen(fleet: ServedFleet, prometheus: Prometheus) -> None:
    """The failure drill of docs/operations.md: down, and back again by itself."""
    worker = fleet.processes("worker")[0]
    os.kill(worker["pid"], signal.SIGKILL)
    down = f'up{{instance="{worker["name"]}"}} == 0'
    eventually(lambda: bool(prometheus.query(down)), timeout=30)
    pending = 'ALERTS{alertname="ShoalTargetDown",alertstate="pending"}'
    eventually(lambda: bool(prometheus.query(pending)), timeout=30)
    eventually(lambda: not prometheus.query("up == 0"), timeout=60)
