"""The fleet as one gateway sees it at one moment. Reads everything, changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from protos import worker_pb2
from services import __version__
from services.gateway.admission import Admission
from services.gateway.domain import Readiness
from services.gateway.peers.detokenizer import DetokenizerPeer
from services.gateway.peers.fleet import PeerFleet
from services.gateway.peers.tokenizer import TokenizerPeer
from services.gateway.peers.worker import WorkerPeer
from services.gateway.watch.recent import Recent
from services.gateway.watch.shapes import (
    EngineFigures,
    FleetSnapshot,
    GatewayFigures,
    Instance,
    InstanceState,
    Service,
)

_AnyPeer = WorkerPeer | TokenizerPeer | DetokenizerPeer


class Seen(Protocol):
    """What a snapshot is taken of."""

    @property
    def fleet(self) -> PeerFleet: ...
    @property
    def admission(self) -> Admission: ...
    @property
    def recent(self) -> Recent: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def name(self) -> str:
        """The gateway's."""
        ...

    @property
    def started(self) -> float:
        """When the gateway began, in the loop's time."""
        ...

    def readiness(self) -> Readiness: ...


def snapshot(seen: Seen) -> FleetSnapshot:
    """The fleet now; loops count the same seconds, if not so finely."""
    now = time.monotonic()
    return FleetSnapshot(now, time.time(), _gateway(seen, now), list(_instances(seen.fleet, now)))


def _gateway(seen: Seen, now: float) -> GatewayFigures:
    readiness = seen.readiness()
    tokens_in, tokens_out = seen.recent.rates(now)
    return GatewayFigures(
        id=seen.name,
        version=__version__,
        started=seen.started,
        ready=readiness.ready,
        draining=readiness.draining,
        reasons=list(readiness.reasons),
        streams=seen.num_requests,
        queued=seen.admission.num_waiting,
        max_requests=seen.max_requests,
        local_decoder=seen.fleet.local_decoder is not None,
        tokens_in_per_s=tokens_in,
        tokens_out_per_s=tokens_out,
        minute=seen.recent.minute(now),
    )


def _instances(fleet: PeerFleet, now: float) -> Iterator[Instance]:
    for worker in sorted(fleet.workers, key=_address):
        yield _instance("worker", worker, _engine(worker, now))
    for tokenizer in sorted(fleet.tokenizers, key=_address):
        yield _instance("tokenizer", tokenizer)
    for detokenizer in sorted(fleet.detokenizers, key=_address):
        yield _instance("detokenizer", detokenizer)


def _address(peer: _AnyPeer) -> str:
    return peer.address


def _instance(service: Service, peer: _AnyPeer, engine: EngineFigures | None = None) -> Instance:
    info = peer.info
    state = _state(peer)
    return Instance(
        service=service,
        address=peer.address,
        state=state,
        since=peer.since,
        epoch=str(info.epoch) if info else "",
        model=info.model if info else "",
        version=info.version if info else "",
        outstanding=peer.outstanding,
        heard=peer.heard,
        detail=_detail(peer, state),
        engine=engine,
    )


def _state(peer: _AnyPeer) -> InstanceState:
    if not peer.connected:
        return peer.absence
    if peer.draining:
        return "draining"
    if isinstance(peer, WorkerPeer) and not peer.breaker.closed:
        return "breaker-open"
    return "ready"


def _detail(peer: _AnyPeer, state: InstanceState) -> str:
    if state in ("starting", "dead"):
        return peer.why_absent
    if state == "breaker-open":
        return "its last requests failed; it is tried again now and then"
    return "it finishes what it has and takes no new work" if state == "draining" else ""


def _engine(worker: WorkerPeer, now: float) -> EngineFigures | None:
    """What the engine last said of itself; of one that is away, what holds without it."""
    info = worker.info
    if info is None:
        return None
    load = worker.reported if worker.connected else worker_pb2.Load(num_pages=info.num_pages)
    rates = worker.speed.rates(now)
    looked_up = load.num_prefix_query_tokens
    return EngineFigures(
        running=load.num_running,
        waiting=load.num_waiting,
        max_running=info.max_running_requests,
        pages=load.num_pages or info.num_pages,
        pages_free=load.num_free_pages if worker.connected else info.num_pages,
        pages_evictable=load.num_evictable_pages,
        page_size=info.page_size,
        preempted=load.num_preempted,
        prefix_hit_rate=load.num_prefix_hit_tokens / looked_up if looked_up else None,
        tokens_in_per_s=rates.tokens_in if worker.connected else 0.0,
        tokens_out_per_s=rates.tokens_out if worker.connected else 0.0,
        busy=rates.busy if worker.connected else 0.0,
        bubble=rates.bubble if worker.connected else 0.0,
        step_s=load.step_us / 1e6,
        tensor_parallel=info.tensor_parallel_size,
        max_model_len=info.max_model_len,
    )
