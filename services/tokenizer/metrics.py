"""What a tokenizer and a detokenizer tell Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.common.metrics import ERROR_CODES, TokenCounter, TokenHistogram
from services.tokenizer.session import Sessions

_ENCODE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class TokenizerMetrics:
    """The `shoal_tokenizer_*` series."""

    def __init__(self, registry: CollectorRegistry, sessions: Sessions) -> None:
        _gauges(registry, "tokenizer", sessions, "jobs", "Encodes in flight.")
        self.tokens = TokenCounter(
            "shoal_tokenizer_tokens", "Tokens that prompts were encoded to.", registry
        )
        self.failures = Counter(
            "shoal_tokenizer_failures", "Encodes that failed.", ("code",), registry=registry
        )
        for code in ERROR_CODES:
            self.failures.labels(code)
        self.seconds = TokenHistogram(
            "shoal_tokenizer_encode_seconds",
            "From a prompt's receipt to its ids, queueing included.",
            _ENCODE_BUCKETS,
            registry,
        )


class DetokenizerMetrics:
    """The `shoal_detokenizer_*` series."""

    def __init__(self, registry: CollectorRegistry, sessions: Sessions) -> None:
        _gauges(registry, "detokenizer", sessions, "open_texts", "Texts that are growing.")
        self.tokens = Counter(
            "shoal_detokenizer_tokens", "Tokens that were decoded.", registry=registry
        )
        self.stops = Counter(
            "shoal_detokenizer_stops", "Texts that a stop string ended.", registry=registry
        )


def _gauges(
    registry: CollectorRegistry, role: str, sessions: Sessions, work: str, meaning: str
) -> None:
    connected = Gauge(f"shoal_{role}_sessions", "Clients connected.", registry=registry)
    connected.set_function(lambda: len(sessions))
    in_flight = Gauge(f"shoal_{role}_{work}", meaning, registry=registry)
    in_flight.set_function(lambda: sessions.work)
