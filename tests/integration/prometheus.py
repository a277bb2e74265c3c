"""A real Prometheus that scrapes a fleet every second."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from tests.integration.served import eventually

SCRAPE_SECONDS = 1


class Prometheus:
    """Runs `binary` in a directory, from entering to leaving."""

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
        self._log = (directory / "log").open("w+")
        self._process = subprocess.Popen(
            [
                binary,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an API call. Raises AssertionError with what it says is wrong."""
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._said()
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]

    def __enter__(self) -> Prometheus:
        try:
            eventually(self._is_up, timeout=60, what=self._said)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._client.close()
        self._log.close()
