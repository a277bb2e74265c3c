"""The promise on aborts: pages are free within two steps + 50 ms of the worker's receipt.

Read from the worker's own histograms over one run, so that neither the network nor who asks
is in the figure: the 99th percentile of `shoal_abort_to_kv_free_seconds` against the steps.
"""

from __future__ import annotations

import math
import re
import socket

from tests.full import in_full_only
from tests.integration.served import STEP_MS, ServedFleet
from tests.integration.test_fleet_life import _send_raw, assert_nothing_is_held
from tests.programs import eventually

_ABORTS = "shoal_abort_to_kv_free_seconds"
_STEPS = "shoal_worker_step_seconds"
_GRACE = 0.05
_EDGE = re.compile(r'le="([^"]+)"')


class Histogram:
    """A histogram's counts over a stretch of time, by upper edge."""

    def __init__(self, fleet: ServedFleet, name: str) -> None:
        self._fleet = fleet
        self._name = name
        self._before = self._read()

    def _read(self) -> dict[float, float]:
        counts = {}
        for key, value in self._fleet.metrics("worker").items():
            if key.startswith(f"{self._name}_bucket") and (edge := _EDGE.search(key)):
                counts[float(edge.group(1))] = value
        return counts

    def counts(self) -> dict[float, float]:
        """Observations since it was made that are at most the edge."""
        return {edge: value - self._before[edge] for edge, value in sorted(self._read().items())}

    def quantile(self, share: float) -> float:
        """The upper edge of the bucket in which that share of the observations ends."""
        counts = self.counts()
        wanted = share * counts[math.inf]
        return next(edge for edge, count in counts.items() if count >= wanted)

    def interpolated(self, share: float) -> float:
        """The quantile if observations lie evenly in their bucket, as Prometheus takes them."""
        counts = self.counts()
        wanted = share * counts[math.inf]
        lower, below = 0.0, 0.0
        for edge, count in counts.items():
            if count >= wanted and math.isfinite(edge):
                return lower + (edge - lower) * (wanted - below) / (count - below)
            lower, below = edge, count
        return math.inf


def _hold(fleet: ServedFleet, number: int, *, stream: bool) -> socket.socket:
    body = {
        "prompt": f"Count for ever, {number}: 1, 2, 3,",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": stream,
    }
    return _send_raw(fleet, "/v1/completions", body)


def _leave(fleet: ServedFleet, clients: int) -> None:
    """Clients that stream and have read, that stream and have not, and that wait for all; all
    of them leave at once."""
    connections = [_hold(fleet, number, stream=number % 3 < 2) for number in range(clients)]
    for number, connection in enumerate(connections):
        if number % 3 == 0:
            assert connection.recv(1)
    eventually(
        lambda: fleet.total("worker", "vllm:num_requests_running") == clients,
        timeout=60,
        what="all run",
    )
    for connection in connections:
        connection.close()
    assert_nothing_is_held(fleet, timeout=60)


def _check(fleet: ServedFleet, *, rounds: int, clients: int, step: float | None) -> None:
    """`step` in seconds if it is known; else the 99th percentile of the run's own steps."""
    aborts, steps = Histogram(fleet, _ABORTS), Histogram(fleet, _STEPS)
    for _ in range(rounds):
        _leave(fleet, clients)
    bound = 2 * (step or steps.interpolated(0.99)) + _GRACE
    counts = aborts.counts()
    assert counts[math.inf] == rounds * clients
    p99 = aborts.quantile(0.99)
    print(
        f"{counts[math.inf]:.0f} aborts: p50 {aborts.quantile(0.5) * 1000:g} ms,"
        f" p99 {p99 * 1000:g} ms, at most; bound {bound * 1000:.1f} ms,"
        f" steps p99 {steps.interpolated(0.99) * 1000:.1f} ms"
    )
    # The edge at or just above the bound is the finest that the histogram can tell.
    assert p99 <= min(edge for edge in counts if edge >= bound)


def test_pages_are_free_in_time_with_steps_of_a_known_length(stepping_fleet: ServedFleet) -> None:
    _check(stepping_fleet, rounds=8, clients=15, step=STEP_MS / 1000)


@in_full_only
def test_pages_are_free_in_time_with_the_real_model(fleet: ServedFleet) -> None:
    _check(fleet, rounds=6, clients=6, step=None)
