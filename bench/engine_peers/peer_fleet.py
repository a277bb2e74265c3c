"""A whole fleet of Shoal's over HTTP, as a peer. Arguments: model, quantization.

Each prompt is a streamed completion; CPU time is that of all of the fleet's processes and of
this one, the client.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from protocol import answer

from bench.cpu import of_family
from services.client.connection import Origin, Pool
from services.common import logs
from services.fleet.config import FleetConfig
from services.fleet.local import LocalFleet

model, quantization = sys.argv[1:3]
logs.setup("bench", level="warning")
config = FleetConfig(
    model=model,
    quantization=quantization,
    port=0,
    grpc_port=-1,
    cache="none",  # as the engine alone has it
    num_pages=2000,
    max_running_requests=64,
    log_level="warning",
)


async def complete(pool: Pool, prompt: Sequence[int], max_new: int) -> range:
    """As many numbers as there were tokens: what they are nobody asks."""
    body = {
        "prompt": list(prompt),
        "max_tokens": max_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    done = await pool.post("/v1/completions", json.dumps(body).encode())
    return range(done.tokens)


with asyncio.Runner() as runner:
    fleet = LocalFleet(config)
    runner.run(fleet.start())
    pool = Pool(Origin.of(fleet.url))

    def generate(prompts: Sequence[Sequence[int]], max_new: int) -> list[range]:
        """Everything at once."""

        async def gather() -> list[range]:
            return await asyncio.gather(*(complete(pool, one, max_new) for one in prompts))

        return runner.run(gather())

    answer(generate, partial(of_family, psutil.Process()))
    pool.close()
    runner.run(fleet.stop())
