"""What a gateway's figures and its requests' journeys cost.

    python -m bench.watching

CPU time of this process, so that others on the machine disturb little.
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass

from bench import figures
from bench.figures import OWN, Rounds
from protos import worker_pb2
from services.common.config import option, parse
from services.gateway.domain import GenerationRequest, TextPrompt, Usage
from services.gateway.peers.speed import Speed
from services.gateway.watch.journeys import Journeys
from services.gateway.watch.recent import Recent

NUMBER = 50_000


@dataclass(frozen=True)
class BenchConfig:
    """How long it measures."""

    rounds: int = option(7, "times each is measured, all of them in turn")
    number: int = option(NUMBER, "calls of a measurement")
    json: str = option("", "file for the figures; default: none")


def cost(call: Callable[[], object], number: int) -> float:
    """Microseconds of CPU that a call takes, less those of an empty one."""
    spent = timeit.timeit(call, number=number, timer=time.process_time)
    empty = timeit.timeit(lambda: None, number=number, timer=time.process_time)
    return (spent - empty) / number * 1e6


def journey(journeys: Journeys, request: GenerationRequest) -> None:
    """A request's whole way, as it is written down when nothing goes wrong."""
    written = journeys.begin(request)
    written.mark("encoded", tokens=9)
    written.count_with(lambda: Usage(9, 20, 0))
    written.mark("submitted", address="unix:worker-0.sock")
    written.mark("accepted")
    written.served = True
    written.mark("started")
    written.mark("first_token")
    written.mark_first_text()
    written.mark("last_token", tokens=20)
    written.mark("last_text")
    written.end("stop")


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.watching", description=__doc__ or "")
    recent, speed, journeys = Recent(), Speed(), Journeys(time.monotonic)
    recent.observe_first_chunk(1000.1, 1, 0.1)
    load = worker_pb2.Load(num_running=4, num_output_tokens=1000)
    request = GenerationRequest("id", "model", TextPrompt("a prompt"))
    calls: dict[str, Callable[[], object]] = {
        "text": lambda: recent.observe_chunk(1000.5, 1, 0.012),
        "worker's frame": lambda: speed.observe(1000.5, load),
        "request": lambda: journey(journeys, request),
    }
    rounds = Rounds()
    for _ in range(config.rounds):
        for name, call in calls.items():
            rounds.add(OWN, f"CPU us a {name}", cost(call, config.number))
    figures.finish("watching", config, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
