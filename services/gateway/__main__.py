"""`python -m services.gateway`: one gateway, until SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence

from services.common import logs, process
from services.common.config import parse
from services.gateway.app import Endpoints, serve
from services.gateway.config import GatewayConfig

log = logging.getLogger(__name__)

_OTHER_FILES = 512  # sessions, gRPC clients, libraries


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
    if (limit := process.raise_file_limit()) < config.max_connections + _OTHER_FILES:
        log.warning("--max-connections may not be reached", extra={"open_files_limit": limit})

    def started(endpoints: Endpoints) -> None:
        print(json.dumps(dataclasses.asdict(endpoints)), flush=True)

    async def run(stop: asyncio.Event) -> int:
        return await serve(config, stop, started)

    process.run(run)


if __name__ == "__main__":
    main()
