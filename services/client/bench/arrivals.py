"""When the requests of an open loop are sent: seconds from the start, decided before it."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    """`count` times, in order, with gamma-distributed gaps of mean `1 / rate`.

    `burstiness` is the shape: 1 makes the gaps exponential (a Poisson process), below 1
    burstier, above 1 steadier. That is vLLM's definition. An infinite rate sends all at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times
