"""When requests are sent."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from services.client.bench.arrivals import arrival_times


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_of_a_gamma(burstiness: float) -> None:
    times = arrival_times(50.0, burstiness, 40_000, seed=1)
    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    # The variation of a gamma of shape k is 1 / sqrt(k); of a Poisson process 1.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_times_are_in_order_and_the_same_for_a_seed() -> None:
    times = arrival_times(3.0, 1.0, 100, seed=7)
    assert all(before <= after for before, after in itertools.pairwise(times))
    assert times == arrival_times(3.0, 1.0, 100, seed=7)
    assert times != arrival_times(3.0, 1.0, 100, seed=8)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(float("inf"), 1.0, 3, seed=0) == [0.0, 0.0, 0.0]
