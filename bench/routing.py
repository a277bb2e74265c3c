"""What the routing policies cost a gateway: microseconds of CPU a request.

    python -m bench.routing

Pure Python, no sockets: workers are views with a load. `cold` is a prompt that nobody
holds, `warm` one whose first half every worker holds, which is the dearest look-up.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos import tokenizer_pb2
from services.common.config import option, parse
from services.common.prefix_hash import prefix_hashes
from services.gateway.prefix_index import PrefixIndex
from services.gateway.router import Policy, make_policy


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    prompt_tokens: int = option(6000, "tokens a prompt")
    requests: int = option(50, "requests a figure")
    seed: int = option(1, "of the prompts and loads")


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


def measure(policy: Policy, views: list[View], prompts: Prompts) -> float:
    """Microseconds of CPU a request."""
    return best(lambda prompt: policy.choose(views, prompt, ""), prompts)


def main(argv: list[str]) -> None:
    """Measures and prints a table."""
    config = parse(BenchConfig, argv, prog="bench.routing", description=__doc__ or "")
    rng = random.Random(config.seed)
    length = config.prompt_tokens
    shared = rng.choices(range(32_000), k=length // 2)
    print(f"{'workers':>8} {'policy':>13} {'prompt':>7} {'us a request':>13}")
    for count in (1, 100, 1000):
        views = [View(f"10.0.{i >> 8}.{i & 255}:50051", rng.randrange(20)) for i in range(count)]
        cold = [prompt_of(rng.choices(range(32_000), k=length)) for _ in range(config.requests)]
        ends = [rng.choices(range(32_000), k=length - len(shared)) for _ in cold]
        warm = [prompt_of([*shared, *end]) for end in ends]
        for name in ("round-robin", "least-loaded", "prefix"):
            for kind, prompts in (("cold", cold), ("warm", warm)):
                if kind == "warm" and name != "prefix":
                    continue
                index = PrefixIndex()
                if kind == "warm":
                    for view in views:
                        index.report(view.address, prefix_hashes(shared))
                cost = measure(make_policy(name, index), views, prompts)
                print(f"{count:>8} {name:>13} {kind:>7} {cost:>13,.0f}")
    hashing = best(prefix_hashes, cold)
    print(f"of which hashing {length} tokens: {hashing:,.0f} us")


if __name__ == "__main__":
    main(sys.argv[1:])
