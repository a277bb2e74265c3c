"""A real Prometheus that scrapes a fleet every second."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.programs import Program, eventually

SCRAPE_SECONDS = 1


class Prometheus(Program):
    """Runs `binary` in a directory; it is up when this is made."""

    def __init__(self, binary: str, directory: Path, targets: str, rules: Path) -> None:
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_SECONDS}s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": "shoal",
                    "http_sd_configs": [{"url": targets, "refresh_interval": "1s"}],
                }
            ],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as probe:  # it prints no port of its own choice
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._client = httpx.Client(base_url=f"http://{address}", timeout=30)
        super().__init__(
            [
                binary,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={address}",
            ]
        )
        try:
            eventually(self._is_up, timeout=60, what=lambda: self.log[-30:])
        except BaseException:
            self.stop()
            raise

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an API call. Raises AssertionError with what it says is wrong."""
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def stop(self) -> int:
        self._client.close()
        return super().stop()

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log[-30:]
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False
