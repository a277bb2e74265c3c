"""The cost of a fleet as a sum of few prices, fitted to what was measured.

    CPU = a requests + b tokens + c frames + d wakes + e session-seconds + f process-seconds

once for all gateways, and once for the agents of all workers. A frame that finds its reader awake
costs less than one that wakes it: at r frames a second a process is woken in proportion to the root
of r, which explains the measured points twice as well as frames alone.

A frame is what one worker sends to one gateway for one step, however many rows it has: with M
workers, G gateways and s steps a second there are up to M * G * s frames a second, and that
product is what limits a fleet in which every gateway talks to every worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# Workers, and those to which each gateway has sessions, of the fleets that a report speaks of.
_PREDICTED = ((64, 64), (64, 16), (256, 256), (256, 16), (1000, 1000), (1000, 64), (1000, 16))
_VIEWERS = 2  # gateways that must see each worker, so that losing one loses no worker
HOSTS = 2  # processes that pretend to be the workers
ROLES = ("gateway", "worker")
_UNITS = (
    "us a request",
    "us a token",
    "us a frame",
    "us a wake",
    "us a second of an open session",
    "us a second of a process",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One measured fleet; `cpu` is in seconds by role, summed over the role's processes."""

    workers: int
    gateways: int
    step_seconds: float
    requests: int
    tokens: int
    frames: float
    session_seconds: float
    seconds: float
    cpu: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def amounts(self, role: str) -> list[float]:
        """What is priced, in the order of the prices."""
        process_seconds = self.seconds * (self.gateways if role == "gateway" else HOSTS)
        return [
            float(self.requests),
            float(self.tokens),
            self.frames,
            math.sqrt(self.frames * process_seconds),
            self.session_seconds,
            process_seconds,
        ]


@dataclass(frozen=True, slots=True)
class Prices:
    """CPU seconds of one role, and how well they explain the points."""

    request: float
    token: float
    frame: float
    wake: float
    session_second: float
    process_second: float
    median_error: float  # relative

    @property
    def vector(self) -> list[float]:
        return [
            *(self.request, self.token, self.frame, self.wake),
            *(self.session_second, self.process_second),
        ]


@dataclass(frozen=True, slots=True)
class Target:
    """A fleet to predict."""

    workers: int
    running: int  # requests in a worker's batch
    steps: float  # a second
    tokens_per_request: int
    subset: int  # workers each gateway has sessions to; all, if as many


def fit(points: Sequence[Point]) -> dict[str, Prices]:
    """Non-negative prices by role, from least squares of relative errors.

    Negative ones are set to nothing, one after the other, and the rest fitted again.
    """
    return {role: _fit_role(points, role) for role in ROLES}


def _fit_role(points: Sequence[Point], role: str) -> Prices:
    cpu = np.array([point.cpu[role] for point in points])
    amounts = np.array([point.amounts(role) for point in points]) / cpu[:, None]
    used = list(range(amounts.shape[1]))
    prices = np.zeros(amounts.shape[1])
    while used:
        solved, *_ = np.linalg.lstsq(amounts[:, used], np.ones(len(points)), rcond=None)
        if (solved >= 0).all():
            prices[used] = solved
            break
        used.remove(used[int(solved.argmin())])
    errors = np.abs(amounts @ prices - 1)
    request, token, frame, wake, session_second, process_second = prices.tolist()
    error = float(np.median(errors))
    return Prices(request, token, frame, wake, session_second, process_second, error)


def gateways_needed(prices: Prices, target: Target, *, utilisation: float = 0.6) -> float:
    """Gateway processes of one core each that a fleet needs.

    With G gateways of which each talks to k of M workers, a worker is seen by G k / M
    gateways and sends each a frame a step, as long as it has a row for it. Infinite if no
    number suffices.
    """
    tokens = target.workers * target.running * target.steps  # a second
    requests = tokens / target.tokens_per_request
    count = float(math.ceil(_VIEWERS * target.workers / target.subset))
    while True:
        viewers = min(max(1.0, count * target.subset / target.workers), target.running)
        frames = target.workers * target.steps * viewers
        sessions = count * min(target.subset, target.workers)
        wakes = math.sqrt(frames * count)
        cpu = np.dot(prices.vector, [requests, tokens, frames, wakes, sessions, count])
        needed = math.ceil(float(cpu) / utilisation)
        if needed <= count:
            return count
        if needed > 100_000:
            return math.inf
        count = needed


def agent_share(prices: Prices, target: Target, gateways: float) -> float:
    """The share of a core that one worker's agent needs."""
    tokens = target.running * target.steps
    viewers = min(max(1.0, gateways * target.subset / target.workers), target.running)
    sessions = max(1.0, gateways * target.subset / target.workers)
    frames = target.steps * viewers
    requests = tokens / target.tokens_per_request
    amounts = [requests, tokens, frames, math.sqrt(frames), sessions, 1.0]
    return float(np.dot(prices.vector, amounts))


def report(points: Sequence[Point], prices: dict[str, Prices]) -> str:
    """The table of points, the prices, and the fleets they predict."""
    return "\n".join([*_table(points), "", *_price_lines(prices), "", *_predictions(prices)])


def _table(points: Sequence[Point]) -> list[str]:
    lines = [
        "| workers | gateways | streams | rows a frame | frames/s | machine busy | gateway us/token"
        " | agents us/token | detokenizer us/token | gateway us/request |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    short = {(p.workers, p.gateways): p for p in points if p.requests and p.tokens == p.requests}
    for point in points:
        if point.tokens == point.requests:  # of one token each, or none: not about tokens
            continue
        brief = short[point.workers, point.gateways]
        per_token = {role: spent / point.tokens * 1e6 for role, spent in point.cpu.items()}
        lines.append(
            f"| {point.workers} | {point.gateways} | {point.requests} |"
            f" {point.tokens / point.frames:.0f} | {point.frames / point.seconds:.0f} |"
            f" {sum(point.cpu.values()) / point.seconds:.2f} cores |"
            f" {per_token['gateway']:.1f} | {per_token['worker']:.1f} |"
            f" {per_token['detokenizer']:.1f} |"
            f" {brief.cpu['gateway'] / brief.requests * 1e6:.0f} |"
        )
    return lines


def _price_lines(prices: dict[str, Prices]) -> list[str]:
    lines = []
    for role, price in prices.items():
        parts = [
            f"{value * 1e6:.1f} {unit}" for value, unit in zip(price.vector, _UNITS, strict=True)
        ]
        error = f"median error {price.median_error:.0%}"
        lines.append(f"{role}: {', '.join(parts)} ({error})")
    return lines


def _predictions(prices: dict[str, Prices]) -> list[str]:
    lines = [
        "| workers | running each | steps/s | tokens/s | sessions a gateway | gateways (one core"
        " each, 60 % busy) | gateways a worker sees | agent, of a core |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workers, subset in _PREDICTED:
        target = Target(workers, running=64, steps=25, tokens_per_request=256, subset=subset)
        gateways = gateways_needed(prices["gateway"], target)
        agent = agent_share(prices["worker"], target, gateways)
        lines.append(
            f"| {workers} | {target.running} | {target.steps:g} |"
            f" {workers * target.running * target.steps:,.0f} | {subset} | {gateways:,.0f} |"
            f" {gateways * subset / workers:.1f} | {agent:.2f} |"
        )
    return lines
