"""What the routing policies cost a gateway: microseconds of CPU a request.

    python -m bench.routing

Pure Python, no sockets: workers are views with a load. `cold` is a prompt that nobody
holds, `warm` one whose first half every worker holds, which is the dearest look-up. A figure is the
least of many requests, since whatever else the machine does only adds; rounds tell its spread.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import figures
from bench.figures import Rounds
from protos import tokenizer_pb2
from services.common.config import option, parse
from services.common.prefix_hash import prefix_hashes
from services.gateway.prefix_index import PrefixIndex
from services.gateway.router import Policy, make_policy

NUM_WORKERS = (1, 100, 1000)


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    prompt_tokens: int = option(6000, "tokens a prompt")
    requests: int = option(50, "requests a figure")
    rounds: int = option(3, "times each is measured, all of them in turn")
    seed: int = option(1, "of the prompts and loads")
    json: str = option("", "file for the figures; default: none")


@dataclass(slots=True)
class View:
    """A worker as a policy sees it."""

    address: str
    load: int


Prompts = list[Sequence[int]]


def prompt_of(token_ids: list[int]) -> Sequence[int]:
    """Ids as a tokenizer's answer holds them."""
    return tokenizer_pb2.EncodeResponse(token_ids=token_ids).token_ids


def best(call: Callable[[Sequence[int]], object], prompts: Prompts) -> float:
    """Microseconds of CPU a prompt, the least: whatever else the machine does only adds."""
    times = []
    for prompt in prompts:
        start = time.process_time_ns()
        call(prompt)
        times.append(time.process_time_ns() - start)
    return min(times) / 1e3


def measure(config: BenchConfig, rounds: Rounds) -> None:
    """Adds every policy's cost to `rounds`, round by round."""
    rng = random.Random(config.seed)
    length = config.prompt_tokens
    shared = rng.choices(range(32_000), k=length // 2)
    for _ in range(config.rounds):
        cold = [prompt_of(rng.choices(range(32_000), k=length)) for _ in range(config.requests)]
        ends = [rng.choices(range(32_000), k=length - len(shared)) for _ in cold]
        warm = [prompt_of([*shared, *end]) for end in ends]
        for count in NUM_WORKERS:
            views = [
                View(f"10.0.{i >> 8}.{i & 255}:50051", rng.randrange(20)) for i in range(count)
            ]
            for name in ("round-robin", "least-loaded", "prefix"):
                policy = make_policy(name, PrefixIndex())
                rounds.add(name, f"CPU us a cold request, {count}", _cost(policy, views, cold))
            index = PrefixIndex()
            for view in views:
                index.report(view.address, prefix_hashes(shared))
            policy = make_policy("prefix", index)
            rounds.add("prefix", f"CPU us a warm request, {count}", _cost(policy, views, warm))
        hashing = best(prefix_hashes, cold)
        rounds.add("prefix", f"of which hashing {length:,} tokens, CPU us", hashing)


def _cost(policy: Policy, views: list[View], prompts: Prompts) -> float:
    """Microseconds of CPU a request."""
    return best(lambda prompt: policy.choose(views, prompt, ""), prompts)


def main(argv: list[str]) -> None:
    """Measures and prints."""
    config = parse(BenchConfig, argv, prog="bench.routing", description=__doc__ or "")
    rounds = Rounds()
    measure(config, rounds)
    figures.finish("routing", config, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
