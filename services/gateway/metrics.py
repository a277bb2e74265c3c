"""The gateway's metrics: `shoal_gateway_*`, and the fleet's load as its workers report it.

What can be counted when somebody asks is counted then, by a collector, so that the
path of a token pays for as little as possible. Workers alone emit the `vllm:*` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.errors import ShoalError
from services.common.metrics import ERROR_CODES, TokenCounter, TokenHistogram
from services.gateway.admission import Admission
from services.gateway.peers.fleet import PeerFleet

_FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NEXT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Census(Protocol):
    """What the gauges count."""

    @property
    def fleet(self) -> PeerFleet: ...

    @property
    def admission(self) -> Admission: ...

    @property
    def num_chats(self) -> int:
        """Chat requests in flight."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        ...


class Metrics:
    """Counters and histograms, updated as things happen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._output_tokens = TokenCounter(
            "shoal_gateway_output_tokens", "Tokens handed to clients", registry
        )
        self._errors = Counter(
            "shoal_gateway_errors", "Requests that failed", ["code"], registry=registry
        )
        self._moves = Counter(
            "shoal_gateway_resumes",
            "Times a choice went on at another instance",
            ["peer"],
            registry=registry,
        )
        self._handoffs = Counter(
            "shoal_gateway_handoffs",
            "Times a choice went on at another instance because its own was going away in order",
            ["peer"],
            registry=registry,
        )
        self._retries = Counter(
            "shoal_gateway_retries",
            "Refusals by a worker before the first token: tried at another, or past the budget",
            ["outcome"],
            registry=registry,
        )
        for code in ERROR_CODES:  # at 0 from the start, so that a rate sees the first one
            self._errors.labels(code)
        for peer in ("worker", "detokenizer"):
            self._moves.labels(peer)
            self._handoffs.labels(peer)
        for outcome in ("made", "denied"):
            self._retries.labels(outcome)
        self._waits = Histogram(
            "shoal_gateway_queue_seconds",
            "How long requests waited for a worker with room, of those that waited",
            buckets=_WHOLE_BUCKETS,
            registry=registry,
        )
        self._first = TokenHistogram(
            "shoal_gateway_time_to_first_token_seconds",
            "From arrival to the first chunk",
            _FIRST_BUCKETS,
            registry,
        )
        self._next = TokenHistogram(
            "shoal_gateway_inter_chunk_seconds",
            "Between two chunks of a request",
            _NEXT_BUCKETS,
            registry,
        )
        self._whole = TokenHistogram(
            "shoal_gateway_request_seconds",
            "From arrival to the end, however it ended; not of those refused at the door",
            _WHOLE_BUCKETS,
            registry,
        )

    def count(self, census: Census) -> None:
        """Adds the gauges."""
        self._registry.register(_Gauges(census))

    def observe_first_chunk(self, num_tokens: int, seconds: float) -> None:
        """A request's first chunk was handed out, `seconds` after its arrival."""
        self._first.observe(seconds)
        self._output_tokens.value += num_tokens

    def observe_chunk(self, num_tokens: int, seconds: float) -> None:
        """A chunk was handed out, `seconds` after the one before."""
        self._next.observe(seconds)
        self._output_tokens.value += num_tokens

    def observe_request(self, seconds: float) -> None:
        """A request ended."""
        self._whole.observe(seconds)

    def count_error(self, error: ShoalError) -> None:
        """A request failed."""
        self._errors.labels(error.code.name.lower()).inc()

    def count_move(self, peer: str) -> None:
        """A choice goes on at another worker or detokenizer, as its own was lost."""
        self._moves.labels(peer).inc()

    def count_handoff(self, peer: str) -> None:
        """A choice goes on at another worker or detokenizer, as its own goes away in order."""
        self._handoffs.labels(peer).inc()

    def count_retry(self, *, made: bool) -> None:
        """A worker refused a new request, which goes to another or fails."""
        self._retries.labels("made" if made else "denied").inc()

    def observe_wait(self, seconds: float) -> None:
        """A request was let go to a worker after a wait."""
        self._waits.observe(seconds)


class _Gauges(Collector):
    def __init__(self, census: Census) -> None:
        self._census = census

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._peers()
        yield from self._breakers()
        yield from self._load()

    def _requests(self) -> Iterator[Metric]:
        census = self._census
        yield _family(
            "shoal_gateway_requests_in_flight",
            "Requests in flight",
            "kind",
            [
                ("chat", census.num_chats),
                ("completion", census.num_requests - census.num_chats),
            ],
        )
        yield GaugeMetricFamily(
            "shoal_gateway_requests_queued",
            "Requests that wait for a worker with room",
            value=census.admission.num_waiting,
        )
        yield _family(
            "shoal_gateway_requests_held",
            "Requests that wait for the first worker, by the expected model; others have none",
            "model",
            census.fleet.num_held.items(),
        )

    def _peers(self) -> Iterator[Metric]:
        fleet = self._census.fleet
        local = fleet.local_decoder
        detokenizer_handles = fleet.detokenizers.num_handles + (local.outstanding if local else 0)
        yield _family(
            "shoal_gateway_handles",
            "Handles open on sessions to peers",
            "peer",
            [
                ("worker", fleet.workers.num_handles),
                ("tokenizer", fleet.tokenizers.num_handles),
                ("detokenizer", detokenizer_handles),
            ],
        )
        yield _family(
            "shoal_gateway_peers_ready",
            "Peers that take new work",
            "peer",
            [
                ("worker", len(fleet.workers.ready)),
                ("tokenizer", len(fleet.tokenizers.ready)),
                ("detokenizer", len(fleet.detokenizers.ready)),
            ],
        )
        yield GaugeMetricFamily(
            "shoal_gateway_prefixes",
            "Different prefixes of 64 tokens and more that workers are believed to hold",
            value=fleet.num_prefixes,
        )
        yield CounterMetricFamily(
            "shoal_gateway_reencodes",
            "Encodes repeated because their tokenizer was lost",
            value=fleet.num_reencodes,
        )

    def _breakers(self) -> Iterator[Metric]:
        fleet = self._census.fleet
        yield _family(
            "shoal_gateway_breakers",
            "Connected workers by the state of their circuit breaker",
            "state",
            fleet.breaker_states().items(),
        )
        yield CounterMetricFamily(
            "shoal_gateway_breaker_openings",
            "Times a worker's circuit breaker opened",
            value=fleet.num_breaker_openings,
        )

    def _load(self) -> Iterator[Metric]:
        reports = [worker.reported for worker in self._census.fleet.workers.ready]
        yield GaugeMetricFamily(
            "shoal_fleet_requests_running",
            "Requests that hold KV pages, over all workers as last reported",
            value=sum(report.num_running for report in reports),
        )
        yield GaugeMetricFamily(
            "shoal_fleet_requests_waiting",
            "Requests that wait for KV pages, over all workers as last reported",
            value=sum(report.num_waiting for report in reports),
        )


def _family(name: str, help: str, label: str, values: Iterable[tuple[str, int]]) -> Metric:
    family = GaugeMetricFamily(name, help, labels=[label])
    for value, number in values:
        family.add_metric([value], number)
    return family
