"""What a gateway is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.bounds import above, at_least, between
from services.common.config import borrow, check_bounds, option
from services.common.numerals import read_float
from services.common.tls import TlsFiles, TlsOptions
from services.common.tracing import TracingOptions

_SERVER = "server"
_PEERS = "peers"
_MODEL = "model"
_LIMITS = "limits"
_SECURITY = "security"


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway's configuration."""

    host: str = option("127.0.0.1", "address the REST server listens on", group=_SERVER)
    port: int = option(
        8000, "port of the REST server; 0 takes a free one", group=_SERVER, bounds=between(0, 65535)
    )
    grpc_port: int = option(
        8001,
        "port of the public gRPC API; 0 takes a free one, -1 turns it off",
        group=_SERVER,
        bounds=between(-1, 65535),
    )
    admin_address: str = option(
        "",
        "where /livez, /readyz, /metrics and /loglevel are also served, plain and without keys;"
        " default: nowhere",
        group=_SERVER,
    )
    reuse_port: bool = option(
        False,
        "share both ports with other gateways on this host (SO_REUSEPORT); /metrics is then served"
        " at --admin-address alone",
        group=_SERVER,
    )
    web: Literal["on", "off"] = option(
        "on", "serve the web page (chat, fleet and requests) at /", group=_SERVER
    )
    drain_timeout: float = option(
        30.0, "seconds that open streams get after SIGTERM", group=_SERVER, bounds=at_least(0)
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe log line shown", group=_SERVER
    )
    log_format: Literal["auto", "json", "human"] = option(
        "auto", "form of log lines; auto is human on a terminal, json elsewhere", group=_SERVER
    )

    tokenizer_addresses: tuple[str, ...] = option(
        (),
        "tokenizers, comma-separated: host:port, unix:/path, dns:name:port (every address of the"
        " name) or k8s:namespace/service:portname (a Service's ready endpoints)",
        group=_PEERS,
        metavar="ADDR,...",
    )
    detokenizer_addresses: tuple[str, ...] = option(
        (),
        "detokenizers; with none, and --model given, the gateway decodes by itself",
        group=_PEERS,
        metavar="ADDR,...",
    )
    worker_addresses: tuple[str, ...] = option(
        (),
        "workers, in the same forms as tokenizers",
        group=_PEERS,
        metavar="ADDR,...",
    )
    model: str = option(
        "", "whose tokenizer to decode with when there is no detokenizer service", group=_PEERS
    )
    routing: Literal["least-loaded", "prefix", "round-robin"] = option(
        "prefix",
        "which worker takes a request: the less loaded of two, the one with the longest cached"
        " prefix unless it is too busy, or each in turn",
        group=_PEERS,
    )
    max_worker_sessions: int = option(
        0,
        "of how many workers of each address this gateway keeps sessions; default: all of them",
        group=_PEERS,
        bounds=at_least(0),
    )
    gateway_id: str = option(
        "",
        "what those workers are chosen by; default: the host's name and the process's number",
        group=_PEERS,
    )
    max_resumes: int = option(
        3,
        "times a request may move to another worker, and likewise to another detokenizer",
        group=_PEERS,
        bounds=at_least(0),
    )
    hold_timeout: float = option(
        0.0,
        "seconds a new request waits for a worker when there is none",
        group=_PEERS,
        bounds=at_least(0),
    )
    expect_models: tuple[str, ...] = option(
        (),
        "models whose workers may all be away, scaled to none or not started yet: requests for"
        " them wait for --hold-timeout and then get 503; unknown models get 404 once there has been"
        " any worker",
        group=_PEERS,
        metavar="NAME,...",
    )

    tool_call_parser: Literal["auto", "hermes", "llama3_json", "none"] = option(
        "auto",
        "format of the tool calls in the model's text; auto is what its chat template shows",
        group=_MODEL,
    )
    reasoning_parser: Literal["auto", "deepseek_r1", "qwen3", "none"] = option(
        "auto",
        "format of the reasoning in the model's text; auto is what its chat template shows",
        group=_MODEL,
    )

    api_key: tuple[str, ...] = option(
        (),
        "a key that clients must send, or name:key; may be repeated. Others can read a command"
        " line: better use the variable or the file",
        group=_SECURITY,
        metavar="KEY",
        secret=True,
    )
    api_key_file: str = option(
        "",
        "more keys, one a line; read again when it changes",
        group=_SECURITY,
        metavar="FILE",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "origins whose pages may call the REST API from a browser; * is all of them",
        group=_SECURITY,
        metavar="ORIGIN,...",
    )
    tls_cert: str = borrow(TlsOptions, "tls_cert")
    tls_key: str = borrow(TlsOptions, "tls_key")
    tls_ca: str = borrow(TlsOptions, "tls_ca")
    peer_tls_cert: str = borrow(
        TlsOptions, "tls_cert", help="certificate (PEM) to show to tokenizers, workers, ..."
    )
    peer_tls_key: str = borrow(TlsOptions, "tls_key", help="private key of --peer-tls-cert")
    peer_tls_ca: str = borrow(
        TlsOptions,
        "tls_ca",
        help="authorities (PEM) one of which must have signed the peers' certificates; default:"
        " peers are reached without TLS",
    )
    peer_tls_server_name: str = option(
        "",
        "name that the peers' certificates must carry; default: the host in their address",
        group="TLS",
        metavar="NAME",
    )

    otlp_endpoint: str = borrow(TracingOptions, "otlp_endpoint")

    max_body_bytes: int = option(
        16 * 1024 * 1024, "largest request body", group=_LIMITS, bounds=at_least(1)
    )
    max_buffer_bytes: int = option(
        1024 * 1024,
        "unsent text of one slow client before it is aborted",
        group=_LIMITS,
        bounds=at_least(1),
    )
    unread_timeout: float = option(
        60.0,
        "seconds for which a client may take nothing of what is sent to it, REST or gRPC",
        group=_LIMITS,
        bounds=above(0),
    )
    max_requests: int = option(
        4096,
        "requests in flight before new ones are refused with 429",
        group=_LIMITS,
        bounds=at_least(1),
    )
    admission_queue: int = option(
        1024,
        "requests, each of their n choices counted, that may wait for a worker with room, for each"
        " model; more are refused with 429, 0 lets all wait at the workers",
        group=_LIMITS,
        bounds=at_least(0),
    )
    tenant_weights: tuple[str, ...] = option(
        (),
        "shares of API keys while requests wait, by the keys' names; others have 1",
        group=_LIMITS,
        metavar="NAME=N,...",
    )
    max_json_depth: int = option(
        128, "deepest nesting of a request body", group=_LIMITS, bounds=at_least(1)
    )
    max_header_bytes: int = option(
        64 * 1024,
        "largest request line and headers, and gRPC metadata",
        group=_LIMITS,
        bounds=at_least(1),
    )
    read_timeout: float = option(
        60.0, "seconds in which a whole request must have arrived", group=_LIMITS, bounds=above(0)
    )
    keep_alive_timeout: float = option(
        75.0,
        "seconds that a REST connection may rest between requests",
        group=_LIMITS,
        bounds=above(0),
    )
    max_connections: int = option(
        10_000, "open REST connections", group=_LIMITS, bounds=at_least(1)
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.port == self.grpc_port != 0:
            raise ValueError(f"--port and --grpc-port are both {self.port}")
        self.tls.check()
        self.peer_tls.check("--peer-tls", listens=False)
        parse_weights(self.tenant_weights)

    @property
    def tls(self) -> TlsFiles:
        """What the REST and the gRPC listener show."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def peer_tls(self) -> TlsFiles:
        """What peers are connected to with."""
        return TlsFiles(
            self.peer_tls_cert, self.peer_tls_key, self.peer_tls_ca, self.peer_tls_server_name
        )


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Weights by tenant, from `name=weight`. Raises ValueError."""
    weights: dict[str, float] = {}
    for text in texts:
        name, separator, number = text.rpartition("=")
        try:
            weights[name] = read_float(number)
        except ValueError:
            separator = ""
        if not separator or not 0 < weights[name] < math.inf:
            raise ValueError(f"--tenant-weights {text!r} is not name=weight, weight above 0")
    return weights
