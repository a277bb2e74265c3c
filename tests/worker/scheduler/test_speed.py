"""What a step of the scheduler costs, without an engine; absolute figures are printed only."""

from __future__ import annotations

from bench.engine_load import scheduler_seconds


def test_the_cost_of_a_step_grows_no_faster_than_the_batch() -> None:
    seconds = {n: min(scheduler_seconds(n, 30) for _ in range(3)) for n in (64, 256, 512)}
    for running, spent in seconds.items():
        print(f"{running} running: {spent * 1e6:.0f} us a step")
    assert seconds[512] / 512 < 1.5 * seconds[64] / 64
