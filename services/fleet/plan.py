"""Which processes a fleet consists of, and where each listens. Pure: starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from services.common.config import env_name, secret_environment, to_argv
from services.common.errors import StartupError
from services.common.listening import MAX_SOCKET_PATH
from services.fleet.config import FleetConfig
from services.fleet.gpus import deal

Role = Literal["gateway", "tokenizer", "detokenizer", "worker"]

_PER_SERVICE = ("address", "admin_address", "num_threads")  # the fleet alone decides these


@dataclass(frozen=True)
class ServiceSpec:
    """One service of the fleet: how to start it and where it will listen."""

    name: str
    role: Role
    command: tuple[str, ...]
    address: str = ""  # gRPC; empty for the gateway, which tells its own
    admin_address: str = ""
    # Its GPUs, and its secrets, as variables: everybody on the machine can read a command.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def plan_fleet(config: FleetConfig, run_dir: Path, gpus: Sequence[str] = ()) -> list[ServiceSpec]:
    """The services of a fleet, in the order in which a display shows them.

    `gpus` are this machine's, which the workers share out.

    Raises:
        StartupError: the run directory's path is too long for a unix socket.
    """
    names = {
        role: [f"{role}-{index}" for index in range(count)]
        for role, count in (
            ("worker", config.workers),
            ("tokenizer", config.tokenizers),
            ("detokenizer", config.detokenizers),
        )
    }
    addresses = {role: [_socket(run_dir, name) for name in names[role]] for role in names}
    specs = []
    for name in gateway_names(config.gateways):
        gateway = config.gateway(
            name,
            _socket(run_dir, f"{name}.admin"),
            workers=addresses["worker"],
            tokenizers=addresses["tokenizer"],
            detokenizers=addresses["detokenizer"],
        )
        specs.append(
            ServiceSpec(
                name,
                "gateway",
                command_of("gateway", gateway),
                admin_address=gateway.admin_address,
                environment=secret_environment(gateway),
            )
        )
    gpu_environments = deal(gpus, config.workers, config.tp)
    for role in ("tokenizer", "detokenizer", "worker"):
        for index, (name, address) in enumerate(zip(names[role], addresses[role], strict=True)):
            admin = _socket(run_dir, f"{name}.admin")
            make = config.worker if role == "worker" else config.tokenizer
            command = command_of(role, make(address, admin))
            environment = gpu_environments[index] if role == "worker" else {}
            specs.append(ServiceSpec(name, role, command, address, admin, environment))
    return specs


def gateway_names(count: int) -> list[str]:
    """The names of a fleet's gateways; a lone one needs no number."""
    return ["gateway"] if count == 1 else [f"gateway-{index}" for index in range(count)]


def command_of(role: Role, config: Any) -> tuple[str, ...]:
    """The command that starts a service: `shoal ROLE`, which is what a container runs.

    A config's secrets are not in it.
    """
    return (sys.executable, "-m", "services", role, *to_argv(config))


def service_environment(environment: dict[str, str]) -> dict[str, str]:
    """The environment for a service: without the variables that the fleet has read itself.

    What the fleet has no flag for still reaches the service.
    """
    peers = ("tokenizer_addresses", "detokenizer_addresses", "worker_addresses")
    own = (field.name for field in fields(FleetConfig))
    taken = {env_name(name) for name in (*own, *peers, *_PER_SERVICE)}
    return {key: value for key, value in environment.items() if key not in taken}


def _socket(run_dir: Path, name: str) -> str:
    path = str(run_dir / f"{name}.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise StartupError(
            f"the path {path} is too long for a unix socket ({MAX_SOCKET_PATH} bytes at most);"
            " choose a shorter --run-dir"
        )
    return f"unix:{path}"
