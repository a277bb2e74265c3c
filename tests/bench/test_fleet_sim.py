"""The fleet simulation: its prices from known costs, and one small fleet measured for real."""

from __future__ import annotations

import itertools
import math

import pytest

from bench.fleet_model import (
    ROLES,
    Point,
    Prices,
    Target,
    agent_share,
    fit,
    gateways_needed,
    report,
)
from bench.fleet_sim import SimConfig, measure

TRUE = Prices(
    request=800e-6,
    token=20e-6,
    frame=150e-6,
    wake=3e-3,
    session_second=60e-6,
    process_second=1e-3,
    median_error=0.0,
)


def _point(workers: int, gateways: int, rows: int, tokens_each: int) -> Point:
    streams = workers * gateways * rows
    tokens = streams * tokens_each
    point = Point(
        workers=workers,
        gateways=gateways,
        step_seconds=0.1,
        requests=streams,
        tokens=tokens,
        frames=tokens / rows,
        session_seconds=workers * gateways * 3.0,
        seconds=3.0,
        cpu={},
    )
    for role in ROLES:
        priced = zip(TRUE.vector, point.amounts(role), strict=True)
        point.cpu[role] = sum(price * amount for price, amount in priced)
    return point


def test_prices_are_found_again() -> None:
    grid = itertools.product((2, 8, 64), (1, 4), (1, 4, 16), (1, 7, 30))
    prices = fit([_point(*place) for place in grid])
    for price in prices.values():
        assert price.vector == pytest.approx(TRUE.vector, rel=1e-6)
        assert price.median_error < 1e-6


def test_a_subset_of_the_workers_makes_a_large_fleet_possible() -> None:
    """With every gateway at every worker the frames grow with both; with k of M they do not."""
    everyone = Target(1000, running=64, steps=25, tokens_per_request=256, subset=1000)
    few = Target(1000, running=64, steps=25, tokens_per_request=256, subset=32)
    needed = gateways_needed(TRUE, few)
    assert math.isfinite(needed)
    assert needed < gateways_needed(TRUE, everyone)
    assert agent_share(TRUE, few, needed) < 1


async def test_a_small_fleet_is_measured() -> None:
    config = SimConfig(
        workers=("2",),
        gateways=("1",),
        rows=("1", "4"),
        step_ms=50.0,
        steps=6,
        short_requests=10,
        idle_seconds=0.5,
    )
    points: list[Point] = []
    await measure(config, points)
    assert [point.tokens for point in points] == [0, 10, 12, 48]
    assert all(spent > 0 for point in points for spent in point.cpu.values())
    text = report(points, fit(points))
    print(text)
    assert "us a token" in text
