"""Every peer of the gateway, and who takes the next piece of work.

Whoever needs an instance says for how long it can wait for one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from protos import tokenizer_pb2, worker_pb2
from services.common.errors import PeerLost, Unavailable
from services.common.tls import NO_TLS, TlsFiles
from services.gateway.discovery import AddressSource
from services.gateway.local_decoder import LocalDecoder
from services.gateway.peers.breaker import State
from services.gateway.peers.catalog import Model, ModelCatalog
from services.gateway.peers.detokenizer import Decoder, DetokenizerPeer
from services.gateway.peers.pool import PeerPool
from services.gateway.peers.session import SessionTimes
from services.gateway.peers.tokenizer import TokenizerPeer
from services.gateway.peers.worker import WorkerPeer
from services.gateway.prefix_index import PrefixIndex
from services.gateway.router import Policy

T = TypeVar("T")
C = TypeVar("C", TokenizerPeer, DetokenizerPeer)

RETRY_AFTER_SECONDS = 1.0
REPEAT_PATIENCE_SECONDS = 30.0  # for another tokenizer after one was lost


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the peers of each kind are, and the files that prove both sides to each other."""

    workers: AddressSource
    tokenizers: AddressSource
    detokenizers: AddressSource
    tls: TlsFiles = NO_TLS


class PeerFleet:
    """The pools, and the choice among their members."""

    def __init__(
        self,
        sources: Sources,
        times: SessionTimes,
        policy: Policy,
        index: PrefixIndex,
        local_decoder: LocalDecoder | None = None,
        expected_models: Sequence[str] = (),
    ) -> None:
        self.workers = PeerPool(
            sources.workers,
            lambda address: self._make_worker(address, times),
            sources.tls,
            self.announce_change,
        )
        self.tokenizers = PeerPool(
            sources.tokenizers,
            lambda address: TokenizerPeer(address, times, self.announce_change),
            sources.tls,
            self.announce_change,
        )
        self.detokenizers = PeerPool(
            sources.detokenizers,
            lambda address: DetokenizerPeer(address, times, self.announce_change),
            sources.tls,
            self.announce_change,
        )
        self.catalog = ModelCatalog(self.workers, expected_models)
        self.local_decoder = local_decoder
        self.num_reencodes = 0  # encodes repeated because their tokenizer was lost
        self.num_breaker_openings = 0  # also of workers that have gone since
        self.on_change: Callable[[], None] = lambda: None  # peers came, went or drain
        self.on_load: Callable[[WorkerPeer], None] = lambda worker: None  # a worker told its load
        self.on_steps: Callable[[WorkerPeer, Sequence[worker_pb2.EngineStep]], None] = _ignore
        self._policy = policy
        self._index = index
        self._changed = asyncio.Event()
        self._num_changes = 0
        # Who has a model's tokenizer: tokenizers or detokenizers, by pool and the model's name.
        self._instances: dict[tuple[PeerPool[Any], str], list[Any]] = {}
        self._instances_at = -1  # after how many changes it was so
        self.num_held: dict[str, int] = dict.fromkeys(("", *expected_models), 0)

    async def run(self) -> None:
        """Keeps all sessions until cancelled."""
        async with asyncio.TaskGroup() as group:
            for pool in (self.workers, self.tokenizers, self.detokenizers):
                group.create_task(pool.run())

    def announce_change(self) -> None:
        """Wakes everybody who waits for a change, once."""
        self._num_changes += 1
        self.catalog.look_again()
        self._changed.set()
        self._changed.clear()
        self.on_change()

    @property
    def num_changes(self) -> int:
        """How many changes there have been."""
        return self._num_changes

    async def change(self, since: int) -> int:
        """Waits until there have been more than `since` changes; returns how many."""
        while self._num_changes <= since:
            await self._changed.wait()
        return self._num_changes

    def missing(self) -> tuple[str, ...]:
        """Why no request can be served; empty if one can."""
        reasons = []
        if not self.workers.ready:
            broken = any(worker.broken for worker in self.workers)
            reasons.append(
                "every worker's circuit breaker is open" if broken else "no worker is ready"
            )
        if not self.tokenizers.ready:
            reasons.append("no tokenizer is ready")
        if self.local_decoder is None and not self.detokenizers.ready:
            reasons.append("no detokenizer is ready")
        return tuple(reasons)

    def breaker_states(self) -> dict[State, int]:
        """Connected workers by the state of their circuit breaker."""
        states: dict[State, int] = {"closed": 0, "open": 0, "half-open": 0}
        for worker in self.workers:
            if worker.connected:
                states[worker.breaker_state] += 1
        return states

    @property
    def num_prefixes(self) -> int:
        """Prefixes that workers are believed to hold."""
        return len(self._index)

    # -- models

    async def find_model(self, name: str, patience: float) -> Model:
        """The model of that name, with a worker ready for it; empty means the only one.

        Raises ModelNotFound, InvalidRequest or Unavailable.
        """

        def find() -> Model | None:
            model = self.catalog.named(name)
            return model if model and self.ready_workers(model.name) else None

        if (found := find()) is not None:
            return found
        held = self.catalog.expected_name(name)
        self.num_held[held] += 1
        try:
            return await self.wait_for(find, patience, "no worker is ready")
        finally:
            self.num_held[held] -= 1

    # -- instances

    async def pick_worker(
        self,
        model: Model,
        prompt_ids: Sequence[int],
        salt: str,
        *,
        fingerprint: str | None,
        avoid: Collection[str],
        patience: float,
    ) -> WorkerPeer:
        """A worker for a request. `fingerprint` limits a resume to workers that compute
        the same function. Raises Unavailable."""

        def find() -> WorkerPeer | None:
            workers = self._able_workers(model, fingerprint, avoid)
            if not workers:
                return None
            with_room = [worker for worker in workers if worker.room > 0]
            return self._policy.choose(with_room or workers, prompt_ids, salt)

        return await self.wait_for(find, patience, "no worker is ready")

    def has_worker(self, model: Model, fingerprint: str | None, avoid: Collection[str]) -> bool:
        """Whether `pick_worker` would find one now."""
        return bool(self._able_workers(model, fingerprint, avoid))

    def has_idle_queue(self, model: Model, fingerprint: str | None) -> bool:
        """Some worker that `pick_worker` would find has nobody waiting, as last reported."""
        workers = self._able_workers(model, fingerprint, ())
        return any(not worker.reported.num_waiting for worker in workers)

    async def pick_decoder(self, model: Model, patience: float) -> Decoder:
        """Where to open a text. Raises Unavailable."""
        find = partial(self.find_decoder, model)
        return await self.wait_for(find, patience, "no detokenizer is ready")

    def find_decoder(self, model: Model) -> Decoder | None:
        """Where a text can be opened now."""
        local = self.local_decoder
        if local is None:
            return self._least_outstanding(self.detokenizers, model.name)
        if _same_model(local.model, model.name) or len(self.catalog.models()) == 1:
            return local
        return None  # it would decode with another model's vocabulary

    async def encode(
        self, model: Model, request: tokenizer_pb2.EncodeRequest, patience: float, max_moves: int
    ) -> tokenizer_pb2.EncodeResponse:
        """Encodes on some tokenizer, again on another where one is lost.

        Raises Unavailable or what the tokenizer answered.
        """
        find = partial(self._least_outstanding, self.tokenizers, model.name)

        async def attempt(patience: float) -> tokenizer_pb2.EncodeResponse:
            tokenizer = await self.wait_for(find, patience, "no tokenizer is ready")
            return await tokenizer.encode(request)

        return await repeat_when_lost(attempt, patience, max_moves, self._count_reencode)

    def _count_reencode(self) -> None:
        self.num_reencodes += 1

    async def tokenizer_info(self, model: Model, patience: float) -> tokenizer_pb2.TokenizerInfo:
        """What a tokenizer of the model says of it. Raises Unavailable."""
        find = partial(self._least_outstanding, self.tokenizers, model.name)
        tokenizer = await self.wait_for(find, patience, "no tokenizer is ready")
        assert tokenizer.info is not None, "it is ready only once it has told"
        return tokenizer.info

    async def decoding(
        self, model: Model, call: Callable[[Decoder], Awaitable[T]], patience: float, max_moves: int
    ) -> T:
        """A call to some detokenizer, repeated on another where one is lost."""

        async def attempt(patience: float) -> T:
            return await call(await self.pick_decoder(model, patience))

        return await repeat_when_lost(attempt, patience, max_moves)

    async def wait_for(self, find: Callable[[], T | None], patience: float, reason: str) -> T:
        """What `find` finds, asked again after every change of a peer.

        Raises Unavailable, with the reason, when patience (seconds) ends.
        """
        if (found := find()) is not None:
            return found
        try:
            async with asyncio.timeout(patience):
                while (found := find()) is None:
                    await self._changed.wait()
                return found
        except TimeoutError:
            raise Unavailable(reason, retry_after=RETRY_AFTER_SECONDS)

    def ready_workers(self, model: str) -> list[WorkerPeer]:
        """The workers that take new work for a model."""
        return [worker for worker in self.workers.ready if worker.model == model]

    # -- inside

    def _make_worker(self, address: str, times: SessionTimes) -> WorkerPeer:
        worker = WorkerPeer(address, times, self.announce_change, self._index)
        worker.on_load = self._tell_load
        worker.on_breaker_open = self._count_opening
        worker.on_steps = self._tell_steps
        return worker

    def _count_opening(self) -> None:
        self.num_breaker_openings += 1

    def _tell_steps(self, worker: WorkerPeer, steps: Sequence[worker_pb2.EngineStep]) -> None:
        self.on_steps(worker, steps)

    def _tell_load(self, worker: WorkerPeer) -> None:
        self.on_load(worker)

    def _able_workers(
        self, model: Model, fingerprint: str | None, avoid: Collection[str]
    ) -> list[WorkerPeer]:
        workers = self.ready_workers(model.name)
        if fingerprint is None and not avoid:
            return workers
        return [
            worker
            for worker in workers
            if worker.address not in avoid
            and (fingerprint is None or worker.fingerprint == fingerprint)
        ]

    def _least_outstanding(self, pool: PeerPool[C], model: str) -> C | None:
        """The idlest instance with the model's tokenizer."""
        if self._instances_at != self._num_changes:
            self._instances.clear()
            self._instances_at = self._num_changes
        matching: list[C] | None = self._instances.get((pool, model))
        if matching is None:
            matching = self._instances[pool, model] = self._matching(pool, model)
        if len(matching) == 1:
            return matching[0]
        # Among equals any: with little to do the first would get everything.
        return min(matching, key=lambda peer: (peer.outstanding, random.random()), default=None)

    def _matching(self, pool: PeerPool[C], model: str) -> list[C]:
        """The ready instances with the model's tokenizer.

        The names are the same, or end the same (a path, a hub id); with one model on
        either side there is nothing to confuse.
        """
        ready = pool.ready
        matching = [peer for peer in ready if _same_model(peer.model, model)]
        if not matching and len(self.catalog.models()) == 1:
            names = {peer.model for peer in pool if peer.info is not None}
            matching = ready if len(names) == 1 else []
        return matching


async def repeat_when_lost(
    attempt: Callable[[float], Awaitable[T]],
    patience: float,
    max_repeats: int,
    on_repeat: Callable[[], None] = lambda: None,
) -> T:
    """Awaits `attempt(patience)`, again where the instance was lost or would not do it."""
    for _ in range(max_repeats):
        try:
            return await attempt(patience)
        except PeerLost:
            on_repeat()
            patience = REPEAT_PATIENCE_SECONDS
    return await attempt(patience)


def _ignore(worker: WorkerPeer, steps: Sequence[worker_pb2.EngineStep]) -> None:
    pass


def _same_model(tokenizer: str, model: str) -> bool:
    return tokenizer == model or _last_part(tokenizer) == _last_part(model)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
