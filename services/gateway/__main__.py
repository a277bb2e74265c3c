"""`python -m services.gateway`: one gateway, until SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence

from services.common import logs, process
from services.common.config import parse
from services.gateway.app import Endpoints, serve
from services.gateway.config import GatewayConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parses flags and environment, serves, and exits with the status.

    Prints one JSON line, {"http": "host:port", "grpc": "host:port"}, once it listens.
    """
    config = parse(
        GatewayConfig,
        sys.argv[1:] if argv is None else argv,
        prog="shoal gateway",
        description="The front door: REST and gRPC for clients, sessions to all other services.",
    )
    logs.setup("gateway", level=config.log_level, format=config.log_format)

    def started(endpoints: Endpoints) -> None:
        print(json.dumps(dataclasses.asdict(endpoints)), flush=True)

    async def run(stop: asyncio.Event) -> int:
        return await serve(config, stop, started)

    process.run(run)


if __name__ == "__main__":
    main()
