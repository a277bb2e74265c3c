"""What a gateway is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.common.config import option

_SERVER = "server"
_PEERS = "peers"
_MODEL = "model"
_LIMITS = "limits"


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway's configuration."""

    host: str = option("127.0.0.1", "address the REST server listens on", group=_SERVER)
    port: int = option(8000, "port of the REST server; 0 takes a free one", group=_SERVER)
    grpc_port: int = option(
        8001, "port of the public gRPC API; 0 takes a free one, -1 turns it off", group=_SERVER
    )
    drain_timeout: float = option(
        30.0, "seconds that open streams get after SIGTERM", group=_SERVER
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
        "least-loaded",
        "which worker takes a request: the less loaded of two, the one with the longest cached"
        " prefix, or each in turn",
        group=_PEERS,
    )
    max_resumes: int = option(
        3,
        "times a request may move to another worker, and likewise to another detokenizer",
        group=_PEERS,
    )
    hold_timeout: float = option(
        0.0, "seconds a new request waits for a worker when there is none", group=_PEERS
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

    max_body_bytes: int = option(16 * 1024 * 1024, "largest request body", group=_LIMITS)
    max_buffer_bytes: int = option(
        1024 * 1024, "unsent text of one slow client before it is aborted", group=_LIMITS
    )
    max_requests: int = option(
        4096, "requests in flight before new ones are refused with 429", group=_LIMITS
    )
