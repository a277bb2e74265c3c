"""Starts an agent for a test: `python -m tests.worker.agent_process SETTINGS FLAGS...`.

SETTINGS is JSON: the keyword arguments of `serve` or `serve_node`, limits as an object.
"""

from __future__ import annotations

import asyncio
import json
import sys

from services.common import logs, process
from services.common.config import parse
from services.worker.__main__ import serve
from services.worker.config import WorkerConfig
from services.worker.node import serve_node
from services.worker.supervisor import Limits


def main() -> None:
    """Like services.worker.__main__.main, with the test's settings."""
    settings = json.loads(sys.argv[1])
    settings["limits"] = Limits(**settings.get("limits", {}))
    config = parse(WorkerConfig, sys.argv[2:], prog="agent", description="an agent under test")
    logs.setup("worker", format="json")

    async def run(stop: asyncio.Event) -> int:
        program = serve_node if config.node_rank > 0 else serve
        return await program(config, stop, **settings)

    process.run(run)


if __name__ == "__main__":
    main()
