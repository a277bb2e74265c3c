"""The comparison with peers: its stub, its ratios, and Shoal's own part run for real."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench import growth
from bench.figures import Rounds
from bench.peers.steps import Steps
from bench.peers.wire import WireConfig, measure


def test_every_request_gets_its_tokens_and_no_more(tmp_path: Path) -> None:
    steps = Steps([7, 8], tmp_path / "sent.json")
    steps.add("a", 3, top_p=1.0)
    steps.add("b", 1, top_p=1.0)
    assert steps.take() == [("a", 7, False), ("b", 7, True)]
    assert steps.pause() == 0.0
    assert steps.flooded_alone
    assert steps.take() == [("a", 8, False)]
    assert steps.take() == [("a", 7, True)]
    assert not steps
    assert not (tmp_path / "sent.json").exists()  # nothing was paced


def test_paced_requests_share_a_beat_and_their_times_are_told(tmp_path: Path) -> None:
    steps = Steps([7], tmp_path / "sent.json")
    steps.add("a", 2, top_p=0.001)
    steps.add("gone", 9, top_p=0.256)
    steps.take()
    assert 0.0 < steps.pause() <= 0.02
    assert 0.0 < steps.pause_of("a") <= 0.02
    steps.drop("gone")
    assert steps.take() == [("a", 7, True)]
    sent = json.loads((tmp_path / "sent.json").read_text())
    assert {number: len(times) for number, times in sent.items()} == {"1": 2, "256": 1}
    assert sent["1"] == sorted(sent["1"])


@pytest.mark.integration
async def test_the_gateways_growth_is_measured() -> None:
    rounds = Rounds()
    config = growth.GrowthConfig(streams=("2",), idle_streams=16, rounds=1, detokenizers=0)
    await growth.measure(config, rounds)
    (system,) = rounds.systems
    (spent,) = [name for name in rounds.measures if "CPU" in name]
    assert (rounds.median(system, spent) or 0) > 0
    for held in ("an idle stream", "a queued request with a short prompt"):
        assert rounds.spread(system, f"gateway, KiB {held}") is not None


@pytest.mark.integration
async def test_shoal_is_measured_with_and_without_a_detokenizer() -> None:
    rounds = Rounds()
    config = WireConfig(rounds=1, streams=("2",), short_requests=64, scale=0.02)
    await measure(config, rounds)
    assert rounds.systems == ["shoal", "shoal, detokenizers 0"]
    measures = ("events/s", "CPU us a token", "added p50 ms", "added p99 ms")
    names = [f"{name}, 2" for name in measures] + ["short requests/s"]
    for system, name in itertools.product(rounds.systems, names):
        assert (rounds.median(system, name) or 0) > 0, (system, name)
