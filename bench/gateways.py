"""What a second gateway on the same port adds: `shoal serve --gateways N`.

    python -m bench.gateways --gateways 1,2

A fleet with the fake engine. Three questions, and what can be said of each:

- Does a token cost the gateways more when there are more of them? Their CPU time a token in a flood
  tells, on any machine.
- Do they share the work? SO_REUSEPORT deals connections by a hash of their addresses, so shares
  are those of chance; the busiest gateway's share of the connections is told.
- Do N carry N times as much? Only where gateways are the bottleneck, and then worker, detokenizer
  and client need cores beside them. So they are made the bottleneck: each is held to a share of a
  core (`bench/quota.py`), and the rate of short requests is compared with one gateway's in the same
  round (of short ones, since tokens of long ones merge before a gateway that lags, and cost less).
  That says that nothing is shared between gateways which would slow them down; it says nothing of
  what a whole core carries.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import psutil

from bench import figures, fleet, quota
from bench.figures import OWN, Rounds
from services.client.connection import Origin, Pool
from services.common.config import borrow, option, parse
from services.fleet.display import open_display
from services.fleet.local import LocalFleet


@dataclass(frozen=True)
class GatewaysConfig:
    """Which fleets, and what load."""

    gateways: tuple[str, ...] = option(("1", "2"), "numbers of gateways, 1 first", metavar="N,...")
    share: float = option(0.15, "of a core that each gateway is held to")
    streams: int = option(128, "requests in flight at once")
    requests: int = option(256, "requests of the flood")
    max_tokens: int = option(128, "tokens of each of them")
    short_requests: int = option(1024, "requests of one token, where gateways are held")
    rounds: int = option(3, "rounds in which each number of gateways has its turn")
    json: str = borrow(fleet.BenchConfig, "json")


async def measure(config: GatewaysConfig, rounds: Rounds) -> None:
    """Adds each number's figures to `rounds`, round by round."""
    for _ in range(config.rounds):
        first = 0.0
        for number in map(int, config.gateways):
            load = fleet.BenchConfig(
                streams=config.streams,
                requests=config.requests,
                max_tokens=config.max_tokens,
                gateways=number,
            )
            held = await _one_fleet(config, load, rounds)
            first = first or held / number
            rounds.add(OWN, f"held: of linear, {number}", held / number / first)


async def _one_fleet(config: GatewaysConfig, load: fleet.BenchConfig, rounds: Rounds) -> float:
    """Measures a fleet free and held; returns the requests a second of the held one."""
    number = load.gateways
    async with LocalFleet(fleet.fleet_config(load), open_display()) as running:
        pids = [one.pid for one in running.processes if one.role == "gateway" and one.pid]
        pool = Pool(Origin.of(running.url))
        try:
            warm = replace(load, requests=load.streams, max_tokens=8)
            await fleet.load(warm, running, pool)
            rounds.add(OWN, f"busiest gateway's share of connections, {number}", _busiest(pids))
            free = await fleet.load(load, running, pool)
            async with quota.held(pids, config.share):
                short = replace(load, requests=config.short_requests, max_tokens=1)
                held = await fleet.load(short, running, pool)
        finally:
            pool.close()
    rounds.add(OWN, f"free: gateways, CPU us a token, {number}", free[GATEWAY])
    rounds.add(OWN, f"free: tokens/s, {number}", free["tokens/s"])
    rounds.add(OWN, f"held: gateways, CPU us a request, {number}", held[GATEWAY])
    rounds.add(OWN, f"held: requests/s, {number}", held["requests/s"])
    return held["requests/s"]


GATEWAY = "CPU us a token of gateway"


def _busiest(pids: list[int]) -> float:
    """The share of all clients' connections that one gateway has, the most."""
    counts = []
    for pid in pids:
        found = psutil.Process(pid).net_connections("tcp")
        counts.append(sum(one.status == psutil.CONN_ESTABLISHED for one in found))
    return max(counts) / sum(counts)


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(GatewaysConfig, argv, prog="bench.gateways", description=__doc__ or "")
    figures.run("gateways", config, lambda rounds: measure(config, rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
