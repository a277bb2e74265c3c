"""What `shoal doctor` is told."""

from __future__ import annotations

from dataclasses import dataclass

from services.client.endpoint import EndpointOptions, check_headers, check_url
from services.common.bounds import above
from services.common.config import borrow, check_bounds, option
from services.common.tls import TlsFiles
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig

_MACHINE = "this machine"
_FLEET = "a running fleet"


@dataclass(frozen=True)
class DoctorConfig:
    """What to look at: always this machine, and a fleet if one is named."""

    model: str = borrow(WorkerConfig, "model", group=_MACHINE)
    host: str = borrow(GatewayConfig, "host", group=_MACHINE)
    port: int = borrow(GatewayConfig, "port", group=_MACHINE)
    grpc_port: int = borrow(GatewayConfig, "grpc_port", group=_MACHINE)

    url: str = option(
        "", "a gateway to look at: http://host:port or https://...", group=_FLEET, metavar="URL"
    )
    api_key: tuple[str, ...] = borrow(EndpointOptions, "api_key", group=_FLEET)
    header: tuple[str, ...] = borrow(EndpointOptions, "header", group=_FLEET)
    tls_ca: str = borrow(EndpointOptions, "tls_ca", group=_FLEET)
    workers: tuple[str, ...] = option(
        (), "workers to look at: host:port or unix:/path", group=_FLEET, metavar="ADDR,..."
    )
    tokenizers: tuple[str, ...] = option(
        (), "tokenizers to look at", group=_FLEET, metavar="ADDR,..."
    )
    detokenizers: tuple[str, ...] = option(
        (), "detokenizers to look at", group=_FLEET, metavar="ADDR,..."
    )
    peer_tls_cert: str = borrow(GatewayConfig, "peer_tls_cert")
    peer_tls_key: str = borrow(GatewayConfig, "peer_tls_key")
    peer_tls_ca: str = borrow(GatewayConfig, "peer_tls_ca")
    peer_tls_server_name: str = borrow(GatewayConfig, "peer_tls_server_name")
    timeout: float = option(
        5.0,
        "seconds that each instance gets to answer",
        group=_FLEET,
        metavar="SECONDS",
        bounds=above(0),
    )

    json: bool = option(False, "print the findings as JSON", group="output")

    def __post_init__(self) -> None:
        self.peer_tls.check("--peer-tls", listens=False)
        if self.url:
            check_url(self.url)
        check_headers(self.header)
        check_bounds(self)

    @property
    def peer_tls(self) -> TlsFiles:
        """What peers are connected to with."""
        return TlsFiles(
            self.peer_tls_cert, self.peer_tls_key, self.peer_tls_ca, self.peer_tls_server_name
        )

    @property
    def peers(self) -> list[tuple[str, str]]:
        """(role, address) of each peer to look at."""
        roles = (
            ("worker", self.workers),
            ("tokenizer", self.tokenizers),
            ("detokenizer", self.detokenizers),
        )
        return [(role, address) for role, addresses in roles for address in addresses]
