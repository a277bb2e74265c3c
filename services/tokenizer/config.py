"""What a tokenizer or a detokenizer is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.common.bounds import at_least
from services.common.config import borrow, check_bounds, option
from services.common.tls import TlsFiles, TlsOptions
from services.common.tracing import TracingOptions


@dataclass(frozen=True)
class TokenizerConfig:
    """The configuration of a tokenizer, and of a detokenizer but for its port."""

    address: str = option(
        "127.0.0.1:50061", "where the gRPC server listens: host:port or unix:/path", group="server"
    )
    admin_address: str = option(
        "",
        "where /livez, /readyz, /metrics and /loglevel are served over HTTP; default: nowhere",
        group="server",
    )
    drain_timeout: float = option(
        30.0, "seconds that open work gets after SIGTERM", group="server", bounds=at_least(0)
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe log line shown", group="server"
    )
    log_format: Literal["auto", "json", "human"] = option(
        "auto", "form of log lines; auto is human on a terminal, json elsewhere", group="server"
    )
    model: str = option(
        "",
        "hub id, local directory or .gguf file; default: the embedded SmolLM2-135M-Instruct",
        group="model",
    )
    served_model_name: str = option(
        "",
        "the name under which workers serve the model, where a gateway serves several; default:"
        " that of --model",
        group="model",
    )
    num_threads: int = option(
        0,
        "threads that encode; default: one, and one more for long prompts",
        group="model",
        bounds=at_least(0),
    )

    otlp_endpoint: str = borrow(TracingOptions, "otlp_endpoint")
    tls_cert: str = borrow(TlsOptions, "tls_cert")
    tls_key: str = borrow(TlsOptions, "tls_key")
    tls_ca: str = borrow(TlsOptions, "tls_ca")

    def __post_init__(self) -> None:
        check_bounds(self)
        self.tls.check()

    @property
    def tls(self) -> TlsFiles:
        """What the gRPC server listens with."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True)
class DetokenizerConfig(TokenizerConfig):
    """The configuration of a detokenizer."""

    address: str = borrow(TokenizerConfig, "address", default="127.0.0.1:50071")
    num_threads: int = 0  # no flag: it encodes nothing
