"""A fleet started the way a person starts one: `shoal serve`, as a process."""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.programs import Program

STEP_MS = 20  # of the fleet whose steps take the same time each
READY = re.compile(r"Shoal is ready: (https?://\S+)/v1 ")


class ServedFleet(Program):
    """One `shoal serve` with its own run directory, on free ports; `url` is the REST root."""

    def __init__(self, *args: str, timeout: float = 180.0) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="shoal-test-")
        self.run_dir = Path(self._dir.name)
        super().__init__(
            [
                *(sys.executable, "-m", "services", "serve"),
                *("--port", "0", "--grpc-port", "0", "--run-dir", str(self.run_dir)),
                *args,
            ],
            {"HF_HUB_OFFLINE": "1"},
        )
        try:
            self.url = self.wait_for_line(READY, timeout=timeout).group(1)
        except BaseException:
            self.stop()
            raise

    def processes(self, role: str | None = None) -> list[dict[str, Any]]:
        """The services as `fleet.json` lists them: name, role, pid, address, admin_address."""
        listed = json.loads((self.run_dir / "fleet.json").read_text())["processes"]
        return [entry for entry in listed if role is None or entry["role"] == role]

    def tree(self) -> list[psutil.Process]:
        """Every live process of the fleet, the supervisor first."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def metrics(self, role: str) -> dict[str, float]:
        """The metrics of a role's instances, summed by sample name with its labels."""
        sums: dict[str, float] = {}
        for text in self._metric_pages(role):
            for line in text.splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def total(self, role: str, name: str, **labels: str) -> float:
        """One metric summed over a role's instances and over the labels not given."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        metrics = self.metrics(role)
        values = [
            value
            for key, value in metrics.items()
            if key.partition("{")[0] == name and all(label in key for label in wanted)
        ]
        assert values, f"{role} has no metric {name} {labels}: {sorted(metrics)}"
        return sum(values)

    def _metric_pages(self, role: str) -> Iterable[str]:
        for entry in self.processes(role):
            socket = entry["admin_address"].removeprefix("unix:")
            with httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=10) as client:
                yield client.get("http://admin/metrics").text

    def stop(self) -> int:
        """Ends the fleet as Ctrl-C would, and returns its exit status."""
        status = self._end(signal.SIGINT, timeout=60.0)
        self._dir.cleanup()
        return status
