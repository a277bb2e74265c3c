"""/livez, /readyz and /metrics."""

from __future__ import annotations

import logging
import socket
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common.admin import build_app, serve_admin
from services.common.errors import StartupError


async def test_probes_ask_every_time_and_metrics_are_served(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Counter("shoal_things", "Things.", registry=registry).inc(3)
    state = {"ready": False, "alive": True}
    app = build_app(registry, ready=lambda: state["ready"], alive=lambda: state["alive"])
    path = tmp_path / "admin.sock"
    transport = httpx.AsyncHTTPTransport(uds=str(path), retries=20)
    async with (
        serve_admin(f"unix:{path}", app),
        httpx.AsyncClient(transport=transport, base_url="http://admin") as client,
    ):
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        state.update(ready=True, alive=False)
        assert (await client.get("/livez")).status_code == 503
        assert (await client.get("/readyz")).status_code == 200
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "shoal_things_total 3.0" in metrics.text
        made = parsedate_to_datetime(metrics.headers["date"])
        assert abs((datetime.now(UTC) - made).total_seconds()) < 5


async def test_without_an_address_nothing_listens() -> None:
    async with serve_admin("", build_app(CollectorRegistry(), bool, bool)):
        pass


async def test_a_bad_address_is_a_startup_error() -> None:
    app = build_app(CollectorRegistry(), bool, bool)
    with pytest.raises(StartupError, match="'nowhere' is not host:port"):
        async with serve_admin("nowhere", app):
            pass


async def test_an_address_in_use_is_a_startup_error() -> None:
    app = build_app(CollectorRegistry(), bool, bool)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use"):
            async with serve_admin(f"127.0.0.1:{port}", app):
                pass


@pytest.mark.parametrize(
    ("client", "status"),
    [
        (("127.0.0.1", 5), 200),
        (("::1", 5), 200),
        (("", 0), 200),  # a unix socket
        (("10.0.0.7", 5), 403),
        (("not an address", 5), 403),
    ],
)
async def test_only_this_machine_changes_the_level(client: tuple[str, int], status: int) -> None:
    before = logging.getLogger().level
    app = build_app(CollectorRegistry(), ready=lambda: True, alive=lambda: True)
    transport = httpx.ASGITransport(app, client=client)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as http:
            assert (await http.post("/loglevel?level=error")).status_code == status
            assert ((await http.get("/loglevel")).text == "error\n") == (status == 200)
    finally:
        logging.getLogger().setLevel(before)
