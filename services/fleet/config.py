"""What a local fleet is told, and what it tells each of its services.

Help texts and defaults are borrowed from the services' own configs. Nothing here
starts a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.bounds import at_least
from services.common.config import borrow, check_bounds, option, share
from services.common.cores import available_cores
from services.gateway.config import GatewayConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig

_FLEET = "fleet"
# Of the services behind the gateway: only this machine reaches their unix sockets.
_NO_TLS = {"tls_cert": "", "tls_key": "", "tls_ca": ""}


@dataclass(frozen=True)
class FleetConfig:
    """The configuration of `shoal serve`."""

    model: str = borrow(WorkerConfig, "model")
    served_model_name: str = borrow(WorkerConfig, "served_model_name")
    max_model_len: int = borrow(WorkerConfig, "max_model_len")
    engine: str = borrow(WorkerConfig, "engine")
    fake_step_ms: float = borrow(WorkerConfig, "fake_step_ms")
    device: str = borrow(WorkerConfig, "device")
    dtype: str = borrow(WorkerConfig, "dtype")
    quantization: str = borrow(WorkerConfig, "quantization")
    attention_backend: str = borrow(WorkerConfig, "attention_backend")
    disable_cuda_graph: bool = borrow(WorkerConfig, "disable_cuda_graph")
    cuda_graph_max_batch: int = borrow(WorkerConfig, "cuda_graph_max_batch")
    tool_call_parser: str = borrow(GatewayConfig, "tool_call_parser")
    reasoning_parser: str = borrow(GatewayConfig, "reasoning_parser")

    host: str = borrow(GatewayConfig, "host")
    port: int = borrow(GatewayConfig, "port")
    grpc_port: int = borrow(GatewayConfig, "grpc_port")
    web: str = borrow(GatewayConfig, "web")
    hold_timeout: float = borrow(GatewayConfig, "hold_timeout", group="server")
    routing: str = borrow(GatewayConfig, "routing", group="server")
    max_worker_sessions: int = borrow(GatewayConfig, "max_worker_sessions", group="server")
    admission_queue: int = borrow(GatewayConfig, "admission_queue", group="server")
    tenant_weights: tuple[str, ...] = borrow(GatewayConfig, "tenant_weights", group="server")
    drain: str = borrow(WorkerConfig, "drain", help="what a draining worker does with requests")
    drain_timeout: float = borrow(
        GatewayConfig, "drain_timeout", help="seconds that open streams get when the fleet stops"
    )
    log_level: str = borrow(GatewayConfig, "log_level")
    log_format: str = borrow(GatewayConfig, "log_format")

    max_buffer_bytes: int = borrow(GatewayConfig, "max_buffer_bytes")
    unread_timeout: float = borrow(GatewayConfig, "unread_timeout")

    api_key: tuple[str, ...] = borrow(GatewayConfig, "api_key")
    api_key_file: str = borrow(GatewayConfig, "api_key_file")
    cors_origins: tuple[str, ...] = borrow(GatewayConfig, "cors_origins")
    otlp_endpoint: str = borrow(GatewayConfig, "otlp_endpoint")
    tls_cert: str = borrow(GatewayConfig, "tls_cert")
    tls_key: str = borrow(GatewayConfig, "tls_key")
    tls_ca: str = borrow(GatewayConfig, "tls_ca")

    gateways: int = option(
        1, "gateway processes, which share the ports", group=_FLEET, bounds=at_least(1)
    )
    workers: int = option(
        1, "worker processes, each with a copy of the model", group=_FLEET, bounds=at_least(1)
    )
    tokenizers: int = option(1, "tokenizer processes", group=_FLEET, bounds=at_least(1))
    detokenizers: int = option(
        1,
        "detokenizer processes; with 0 the gateway decodes by itself",
        group=_FLEET,
        bounds=at_least(0),
    )
    tp: int = borrow(WorkerConfig, "tp", help="tensor-parallel ranks a worker", group=_FLEET)
    admin_address: str = option(
        "",
        "host:port where Prometheus finds every service: /targets lists them for its HTTP service"
        " discovery; /livez, /readyz and /loglevel of the supervisor; default: nowhere",
        group="observability",
        metavar="ADDRESS",
    )
    run_dir: str = option(
        "",
        "directory for the fleet's sockets and its fleet.json; default: a fresh one, removed at"
        " the end",
        group=_FLEET,
    )

    schedule: str = borrow(WorkerConfig, "schedule")
    max_running_requests: int = borrow(WorkerConfig, "max_running_requests")
    max_queue: int = borrow(WorkerConfig, "max_queue")
    max_prefill_tokens: int = borrow(WorkerConfig, "max_prefill_tokens")
    disable_overlap: bool = borrow(WorkerConfig, "disable_overlap")
    deterministic: bool = borrow(WorkerConfig, "deterministic")

    cache: str = borrow(WorkerConfig, "cache")
    page_size: int = borrow(WorkerConfig, "page_size")
    num_pages: int = borrow(WorkerConfig, "num_pages")
    memory_ratio: float = borrow(WorkerConfig, "memory_ratio")

    def __post_init__(self) -> None:
        check_bounds(self)
        share(GatewayConfig, self)
        share(WorkerConfig, self)  # its own checks, before anything is started

    def worker(self, address: str, admin_address: str) -> WorkerConfig:
        """The configuration of one worker; the workers share the CPU cores evenly."""
        ranks = self.workers * self.tp
        return share(
            WorkerConfig,
            self,
            address=address,
            admin_address=admin_address,
            num_threads=max(1, available_cores() // ranks),
            **_NO_TLS,
        )

    def tokenizer(self, address: str, admin_address: str) -> TokenizerConfig:
        """The configuration of one tokenizer or detokenizer."""
        return share(TokenizerConfig, self, address=address, admin_address=admin_address, **_NO_TLS)

    def gateway(
        self,
        name: str,
        admin_address: str,
        *,
        workers: list[str],
        tokenizers: list[str],
        detokenizers: list[str],
    ) -> GatewayConfig:
        """A gateway's configuration, given its peers' addresses."""
        return share(
            GatewayConfig,
            self,
            admin_address=admin_address,
            gateway_id=name,
            reuse_port=self.gateways > 1,
            worker_addresses=tuple(workers),
            tokenizer_addresses=tuple(tokenizers),
            detokenizer_addresses=tuple(detokenizers),
        )
