"""What a fleet tells Prometheus, with services that are made up."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, Gauge

from services.common.admin import build_app, serve_admin
from services.fleet.admin import fleet_app
from services.fleet.run_dir import ProcessInfo


class TwoServices:
    """A worker that answers at a socket, and a tokenizer that is away."""

    def __init__(self, directory: Path) -> None:
        self.processes = [
            ProcessInfo("worker-0", "worker", 1, "ready", "", f"unix:{directory}/worker"),
            ProcessInfo("tokenizer-0", "tokenizer", None, "restarting", "", f"unix:{directory}/no"),
        ]


async def test_prometheus_finds_every_service(tmp_path: Path) -> None:
    fleet = TwoServices(tmp_path)
    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    worker = build_app(registry, lambda: True, lambda: True)
    async with (
        serve_admin(fleet.processes[0].admin_address, worker),
        serve_admin("127.0.0.1:0", fleet_app(fleet)) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as client,
    ):
        assert not address.endswith(":0")
        targets = (await client.get("/targets")).json()
        assert [target["targets"] for target in targets] == [[address], [address]]
        first, second = [target["labels"] for target in targets]
        assert (first["instance"], first["component"]) == ("worker-0", "worker")
        metrics = await client.get(first["__metrics_path__"])
        assert "answer 42.0" in metrics.text
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        assert (await client.get(second["__metrics_path__"])).status_code == 503
        assert (await client.get("/services/other/metrics")).status_code == 404
        assert (await client.get("/readyz")).status_code == 503
        fleet.processes.pop()
        assert (await client.get("/readyz")).status_code == 200
        assert "shoal_build_info" in (await client.get("/metrics")).text
