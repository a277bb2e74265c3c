"""Services as processes of their own, joined by TCP: what containers are in a cluster."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from types import TracebackType

import httpx

from tests.programs import Program, eventually

_LISTENING = re.compile(r'"message": "listening".*"address": "([^"]+)"')
FAKE = ("--model", "byte", "--engine", "fake")


class ServiceProcess(Program):
    """One `shoal ROLE`, what it prints, and where it says that it listens."""

    def __init__(self, role: str, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self.role = role
        super().__init__(
            [sys.executable, "-m", "services", role, "--log-format=json", *flags],
            {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})},
        )

    @property
    def address(self) -> str:
        """Where its gRPC server listens."""
        return self.wait_for_line(_LISTENING).group(1)

    @property
    def endpoints(self) -> dict[str, str]:
        """A gateway's {"http": "host:port", "grpc": ...}."""
        found: dict[str, str] = json.loads(self.wait_for_line(r'(\{"http".*\})').group(1))
        return found

    @property
    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


class TcpFleet:
    """A gateway, a tokenizer, a detokenizer and a worker with the fake engine, over TCP.

    `backend` flags go to the services behind the gateway, `gateway` flags to it.
    """

    def __init__(
        self,
        *,
        backend: tuple[str, ...] = (),
        gateway: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.services: list[ServiceProcess] = []
        listen = ("--address=127.0.0.1:0", "--model=byte", *backend)
        try:
            self.tokenizer = self._start("tokenizer", *listen, env=env)
            self.detokenizer = self._start("detokenizer", *listen, env=env)
            self.worker = self._start("worker", *listen, "--engine=fake", env=env)
            self.gateway = self._start(
                "gateway",
                *("--port=0", "--grpc-port=0"),
                f"--tokenizer-addresses={self.tokenizer.address}",
                f"--detokenizer-addresses={self.detokenizer.address}",
                f"--worker-addresses={self.worker.address}",
                *gateway,
                env=env,
            )
        except BaseException:
            self.stop()
            raise

    def _start(self, role: str, *flags: str, env: Mapping[str, str] | None) -> ServiceProcess:
        service = ServiceProcess(role, *flags, env=env)
        self.services.append(service)
        return service

    def wait_ready(self, client: httpx.Client) -> None:
        """Returns once the gateway can serve; `client` knows its base URL."""

        def ready() -> bool:
            return client.get("/readyz").status_code == 200

        eventually(ready, timeout=60, what=lambda: str([s.log[-5:] for s in self.services]))

    def stop(self) -> list[int]:
        """Ends all; returns the exit statuses, the gateway's first."""
        return [service.stop() for service in reversed(self.services)]

    def __enter__(self) -> TcpFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
