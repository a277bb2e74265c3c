"""Where a gateway says that it listens: one line on stdout, between those of its log."""

from __future__ import annotations

import asyncio
import json


async def endpoints(gateway: asyncio.subprocess.Process) -> dict[str, str]:
    """`http` and `grpc`, each `host:port`. Raises RuntimeError if the gateway ends before."""
    assert gateway.stdout is not None
    async for line in gateway.stdout:
        if line.startswith(b'{"http":'):
            found: dict[str, str] = json.loads(line)
            return found
    raise RuntimeError("the gateway ended before it listened; run its command by hand to see why")
