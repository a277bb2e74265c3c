"""What a gateway's figures and its requests' journeys cost: `python -m bench.watching`.

CPU time of this process, so that others on the machine disturb little; the least of some rounds.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

from protos import worker_pb2
from services.gateway.domain import GenerationRequest, TextPrompt, Usage
from services.gateway.peers.speed import Speed
from services.gateway.watch.journeys import Journeys
from services.gateway.watch.recent import Recent

ROUNDS = 7
NUMBER = 50_000


def cost(call: Callable[[], object], number: int = NUMBER) -> float:
    """Microseconds of CPU that a call takes, less those of an empty one."""
    rounds = timeit.repeat(call, number=number, repeat=ROUNDS, timer=time.process_time)
    empty = timeit.repeat(lambda: None, number=number, repeat=ROUNDS, timer=time.process_time)
    return (min(rounds) - min(empty)) / number * 1e6


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


def main() -> None:
    recent, speed, journeys = Recent(), Speed(), Journeys(time.monotonic)
    recent.observe_first_chunk(1000.1, 1, 0.1)
    load = worker_pb2.Load(num_running=4, num_output_tokens=1000)
    request = GenerationRequest("id", "model", TextPrompt("a prompt"))
    print(f"a text: {cost(lambda: recent.observe_chunk(1000.5, 1, 0.012)):.2f} us")
    print(f"a worker's frame: {cost(lambda: speed.observe(1000.5, load)):.2f} us")
    print(f"a request: {cost(lambda: journey(journeys, request), NUMBER // 5):.1f} us")


if __name__ == "__main__":
    main()
