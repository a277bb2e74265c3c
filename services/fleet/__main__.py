"""`shoal serve`: a local fleet until Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

from services.common import logs, process
from services.common.admin import serve_admin
from services.common.config import parse
from services.fleet.admin import fleet_app
from services.fleet.config import FleetConfig
from services.fleet.display import Display, open_display
from services.fleet.local import LocalFleet

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> NoReturn:
    """Serves until SIGINT, SIGTERM or SIGHUP; a second signal ends everything at once."""
    config = parse(
        FleetConfig,
        argv,
        prog="shoal serve",
        description="Starts a gateway, tokenizers, detokenizers and workers on this machine.",
    )

    last_rites = ExitStack()  # for a second signal, which waits for nothing

    async def serve(stop: asyncio.Event) -> None:
        display = open_display()  # first: it redirects stderr, and logs go where stderr is
        logs.setup("fleet", level=config.log_level, format=config.log_format, stream=sys.stderr)
        fleet = LocalFleet(config, display)
        last_rites.callback(fleet.abandon)
        async with serve_admin(config.admin_address, fleet_app(fleet)) as address:
            if address:
                log.info("telling Prometheus", extra={"targets": f"http://{address}/targets"})
            await run(fleet, display, stop)

    async def run(fleet: LocalFleet, display: Display, stop: asyncio.Event) -> None:
        loading = asyncio.create_task(fleet.start())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():  # Ctrl-C while it loads
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return
        await loading
        try:
            _announce(fleet, page=config.web == "on")
            await fleet.run_until(stop)
            display.line(
                f"shoal: stopping: open requests may finish within {config.drain_timeout:g} s;"
                " Ctrl-C again ends at once"
            )
        finally:
            await fleet.stop()

    process.run(serve, abandon=last_rites.close)


def _announce(fleet: LocalFleet, *, page: bool) -> None:
    """Tells on stdout where the fleet is, as far as somebody can hear it."""
    where = f", page at {fleet.url.removesuffix('v1')}" if page else ""
    try:
        print(f"Shoal is ready: {fleet.url} (model {fleet.model}){where}", flush=True)
    except OSError as error:
        log.warning("stdout cannot be written", extra={"url": fleet.url, "reason": str(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
