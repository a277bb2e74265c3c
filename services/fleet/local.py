"""A fleet on this machine: every service a child process, joined by unix sockets.

`LocalFleet` owns the run directory (sockets, `fleet.json`), the order of start and
stop, and nothing of what the services do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from services.common.errors import StartupError
from services.common.listening import require_all_free
from services.common.process import child_environment
from services.fleet.config import FleetConfig
from services.fleet.display import Display, SilentDisplay
from services.fleet.gpus import visible_gpus
from services.fleet.plan import Role, ServiceSpec, plan_fleet, service_environment
from services.fleet.ports import SharedPort, port_of
from services.fleet.probes import (
    GatewayProbe,
    HealthProbe,
    WorkerProbe,
    admin_client,
    wait_readyz,
)
from services.fleet.run_dir import ProcessInfo, RunDir
from services.fleet.service import Probe, Service

log = logging.getLogger(__name__)

Plan = Callable[[FleetConfig, Path], list[ServiceSpec]]


def plan_here(config: FleetConfig, run_dir: Path) -> list[ServiceSpec]:
    """The plan with the GPUs of this machine."""
    return plan_fleet(config, run_dir, () if config.device == "cpu" else visible_gpus())


_STOP_ORDER: tuple[tuple[Role, ...], ...] = (
    ("gateway",),
    ("worker",),
    ("tokenizer", "detokenizer"),
)


class LocalFleet:
    """Starts, watches, restarts and stops a fleet; an async context manager.

    Use it from the main thread: children die with the thread that started them.
    """

    def __init__(
        self,
        config: FleetConfig,
        display: Display | None = None,
        *,
        plan: Plan = plan_here,
        stop_margin: float = 5.0,
    ) -> None:
        if config.log_format == "auto":  # the services' stdout is a pipe: they cannot tell
            form = "human" if sys.stderr.isatty() else "json"
            config = dataclasses.replace(config, log_format=form)
        self.config = config
        self._display = display or SilentDisplay()
        self._plan = plan
        self._stop_bound = config.drain_timeout + stop_margin  # seconds, then SIGKILL
        self._gateway = GatewayProbe()
        self._worker = WorkerProbe()
        self._services: list[Service] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._run_dir: RunDir | None = None
        self._shared_ports: list[SharedPort] = []
        self._changed = asyncio.Condition()
        self._notifier: asyncio.Task[None] | None = None
        self._written: list[ProcessInfo] = []

    @property
    def url(self) -> str:
        """The base of the OpenAI API, `http://host:port/v1`, or https."""
        scheme = "https" if self.config.tls_cert else "http"
        return f"{scheme}://{self._http_address}/v1"

    @property
    def grpc_address(self) -> str:
        """Where the public gRPC API listens; empty if it is off."""
        return self._gateway.addresses.grpc if self._gateway.addresses else ""

    @property
    def model(self) -> str:
        """The served model's name, known once a worker is ready."""
        return self._worker.model

    @property
    def run_dir(self) -> Path:
        """Where the sockets and `fleet.json` are."""
        assert self._run_dir is not None
        return self._run_dir.path

    @property
    def processes(self) -> list[ProcessInfo]:
        """Every service and the process that serves it now."""
        return [self._info(service) for service in self._services]

    async def start(self) -> None:
        """Starts every service and returns when requests can be served.

        Raises:
            StartupError: a mistake of the person who starts it, in one sentence; nothing
                is left running.
        """
        ports = ((self.config.port, "--port"), (self.config.grpc_port, "--grpc-port"))
        require_all_free((f"{self.config.host}:{port}", flag) for port, flag in ports if port > 0)
        self._run_dir = RunDir.open(self.config.run_dir)
        try:
            self._begin_table()
            self._share_ports()
            specs = self._plan(self.config, self._run_dir.path)
            environment = service_environment(child_environment())
            self._services = [
                Service(
                    spec,
                    self._probe(spec.role),
                    {**environment, **spec.environment},
                    on_change=self._on_change,
                    on_output=self._display.line,
                )
                for spec in specs
            ]
            self._tasks = [
                asyncio.create_task(service.run(), name=service.spec.name)
                for service in self._services
            ]
            await self._or_failure(self._all_ready())
            self._pin_gateway()
        except BaseException:
            self._display.close()
            self.kill()
            await self._finish()
            raise
        finally:
            self._display.close()

    async def ready(self) -> None:
        """Returns when every service is ready and the gateway says that it can serve."""
        await self._or_failure(self._all_ready())
        gateways = [service for service in self._services if service.spec.role == "gateway"]
        for gateway in gateways:
            async with admin_client(gateway.spec.admin_address) as client:
                await self._or_failure(wait_readyz(client))

    async def replaced(self, name: str, pid: int) -> None:
        """Returns when `name` runs in another process than `pid` and all is ready again."""
        (service,) = [service for service in self._services if service.spec.name == name]
        async with self._changed:
            await self._changed.wait_for(lambda: service.pid not in (None, pid))
        await self.ready()

    async def run_until(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set. Raises what a service's supervision raised."""
        await self._or_failure(stop.wait())

    async def stop(self) -> None:
        """Drains and ends everything: the gateway, then workers, then the others."""
        for roles in _STOP_ORDER:
            chosen = [service for service in self._services if service.spec.role in roles]
            await asyncio.gather(*(service.stop(self._stop_bound) for service in chosen))
        await self._finish()

    def kill(self) -> None:
        """Ends every process at once."""
        for service in self._services:
            service.kill()

    def abandon(self) -> None:
        """Ends every process at once and removes what the fleet made for itself, for a process
        that is about to end without its event loop."""
        self.kill()
        self._leave_run_dir()

    async def __aenter__(self) -> LocalFleet:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def _http_address(self) -> str:
        if self._gateway.addresses is None:
            return f"{self.config.host}:{self.config.port}"
        return self._gateway.addresses.http

    def _probe(self, role: Role) -> Probe:
        if role == "gateway":
            return self._gateway
        return self._worker if role == "worker" else HealthProbe()

    async def _all_ready(self) -> None:
        await asyncio.gather(*(service.wait_ready() for service in self._services))

    async def _or_failure(self, awaitable: Awaitable[Any]) -> None:
        """Awaits, unless a service's supervision fails first: then raises its error."""
        wanted = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait([wanted, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
            await wanted
        finally:
            wanted.cancel()
            await asyncio.gather(wanted, return_exceptions=True)

    def _share_ports(self) -> None:
        """Takes the ports, free ones where none was asked for, if several gateways share them."""
        if self.config.gateways == 1:
            return
        port = self._share(self.config.port, "--port")
        grpc_port = self.config.grpc_port
        if grpc_port >= 0:
            grpc_port = self._share(grpc_port, "--grpc-port")
        self.config = dataclasses.replace(self.config, port=port, grpc_port=grpc_port)

    def _share(self, port: int, flag: str) -> int:
        shared = SharedPort(self.config.host, port, flag)
        self._shared_ports.append(shared)
        return shared.number

    def _pin_gateway(self) -> None:
        """Has a restarted gateway listen where the first one did, whatever ports were asked for."""
        assert self._gateway.addresses is not None
        ports = [f"--port={port_of(self._gateway.addresses.http)}"]
        if self._gateway.addresses.grpc:
            ports.append(f"--grpc-port={port_of(self._gateway.addresses.grpc)}")
        for service in self._services:
            if service.spec.role == "gateway":
                command = (*service.spec.command, *ports)
                service.spec = dataclasses.replace(service.spec, command=command)

    async def _finish(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._notifier is not None:
            await self._notifier
        for shared in self._shared_ports:
            shared.close()
        self._leave_run_dir()

    def _leave_run_dir(self) -> None:
        if self._run_dir is not None:
            specs = [service.spec for service in self._services]
            addresses = [a for spec in specs for a in (spec.address, spec.admin_address)]
            unix = [a.removeprefix("unix:") for a in addresses if a.startswith("unix:")]
            self._run_dir.close(map(Path, unix))

    def _info(self, service: Service) -> ProcessInfo:
        spec = service.spec
        gateway = spec.role == "gateway"
        return ProcessInfo(
            name=spec.name,
            role=spec.role,
            pid=service.pid,
            state=service.state.value,
            address=self.grpc_address if gateway else spec.address,
            admin_address=spec.admin_address,
        )

    def _on_change(self) -> None:
        self._display.update(self._services)
        if self.processes != self._written and self._run_dir is not None:
            self._written = self.processes
            self._write_table(self._run_dir)
            if self._notifier is None or self._notifier.done():
                self._notifier = asyncio.create_task(self._notify())

    def _begin_table(self) -> None:
        """Raises StartupError if there is no room for a table, as long as nobody is served."""
        assert self._run_dir is not None
        try:
            self._run_dir.write_table(self.url, "", [])
        except OSError as error:
            raise StartupError(f"cannot write to {self._run_dir.path}: {error.strerror}") from error

    def _write_table(self, run_dir: RunDir) -> None:
        """Without it others do not find the fleet; who has found it is served all the same."""
        try:
            run_dir.write_table(self.url, self.model, self._written)
        except OSError as error:
            log.error("the fleet's table is not up to date", extra={"reason": str(error)})

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
