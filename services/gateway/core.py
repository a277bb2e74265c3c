"""The gateway that every front end calls: admission, readiness, drain, the simple calls.

Implements `services.gateway.domain.Gateway`. What happens to a generation is told in
`services.gateway.generate`; who serves it is decided in `services.gateway.peers.fleet`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from services.common.errors import InvalidRequest, Overloaded, ShoalError, Unavailable
from services.common.tracing import NoTracing, Tracing
from services.gateway import generate
from services.gateway.admission import Admission
from services.gateway.config import GatewayConfig, parse_weights
from services.gateway.dialect import dialect_of
from services.gateway.discovery import Subset, address_source
from services.gateway.domain import (
    ChatPrompt,
    Dialect,
    GenerationRequest,
    ModelCard,
    Readiness,
    TextPrompt,
    Tokenized,
)
from services.gateway.live import LiveGeneration
from services.gateway.local_decoder import LocalDecoder
from services.gateway.metrics import Metrics
from services.gateway.peers.catalog import Model
from services.gateway.peers.fleet import RETRY_AFTER_SECONDS, PeerFleet, Sources
from services.gateway.peers.session import SessionTimes
from services.gateway.peers.worker import flush_all
from services.gateway.placement import PATIENCE_SECONDS
from services.gateway.prefix_index import PrefixIndex
from services.gateway.retry_budget import RetryBudget
from services.gateway.router import make_policy
from services.gateway.watch.feed import Feed
from services.gateway.watch.journeys import Journeys
from services.gateway.watch.recent import Recent

_NO_WORKER_YET = "no worker has been seen yet"


class Core:
    """One gateway process's requests and peers. Make it inside a running loop."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: CollectorRegistry,
        *,
        times: SessionTimes | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.tracing = tracing or NoTracing()
        self.metrics = Metrics(registry)
        self.name = gateway_name(config)
        self.started = time.monotonic()
        self.recent = Recent()
        self.journeys = Journeys(time.monotonic)  # finer than the loop's
        index = PrefixIndex()
        self.fleet = PeerFleet(
            Sources(
                address_source(config.worker_addresses, subset=make_subset(config)),
                address_source(config.tokenizer_addresses),
                address_source(config.detokenizer_addresses),
                config.peer_tls,
            ),
            times or SessionTimes(),
            make_policy(config.routing, index),
            index,
            make_local_decoder(config, self.tracing),
            config.expect_models,
        )
        self.admission = Admission(
            self.fleet.ready_workers,
            config.admission_queue,
            parse_weights(config.tenant_weights),
            self.metrics.observe_wait,
        )
        self.fleet.on_load = self.admission.on_load
        self.fleet.on_change = self.admission.on_change
        self.retries = RetryBudget(asyncio.get_running_loop().time())
        self.metrics.count(self)
        self.max_moves = config.max_resumes
        self.hold_timeout = config.hold_timeout
        self.max_buffer_bytes = config.max_buffer_bytes
        self.max_requests = config.max_requests
        self._tool_call_parser = config.tool_call_parser
        self._reasoning_parser = config.reasoning_parser
        self._generations: set[LiveGeneration] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._dialects: dict[str, Dialect] = {}  # by the name that a request has for its model
        self._dialects_at = -1  # after how many changes of the peers they were so
        self._token_bytes: dict[str, dict[int, bytes]] = {}  # by model; at most a vocabulary
        self.feed = Feed(self)

    async def run(self) -> None:
        """Keeps the sessions to all peers until cancelled."""
        await self.fleet.run()

    # -- generations

    async def start(self, request: GenerationRequest) -> LiveGeneration:
        return await generate.start(self, request)

    def admit(self, generation: LiveGeneration) -> None:
        self._refuse_when_draining()
        if len(self._generations) >= self.max_requests:
            raise Overloaded(
                f"{self.max_requests} requests are in flight already",
                retry_after=self._retry_after(generation.request),
            )
        self._generations.add(generation)
        self._idle.clear()

    def _retry_after(self, request: GenerationRequest) -> float:
        model = request.model or next(iter(self.fleet.catalog.models()), "")
        return self.admission.retry_after(model, request)

    def release(self, generation: LiveGeneration) -> None:
        self._generations.discard(generation)
        if not self._generations:
            self._idle.set()

    @property
    def num_requests(self) -> int:
        return len(self._generations)

    @property
    def num_chats(self) -> int:
        return sum(
            isinstance(generation.request.prompt, ChatPrompt) for generation in self._generations
        )

    # -- the simple calls

    async def tokenize(
        self, model: str, prompt: ChatPrompt | TextPrompt, *, return_token_strs: bool = False
    ) -> Tokenized:
        self._refuse_when_draining()
        message = await generate.encode_message(prompt, return_token_strs=return_token_strs)
        found = await self._find_model(model)
        answer = await self.fleet.encode(found, message, self.hold_timeout, self.max_moves)
        strs = answer.token_strs if return_token_strs else None
        return Tokenized(answer.token_ids, strs, found.max_model_len)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        self._refuse_when_draining()
        found = await self._find_model(model)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < found.vocab_size):
            raise InvalidRequest(
                f"a token id is outside the vocabulary of {found.vocab_size}", param="tokens"
            )
        return await self.fleet.decoding(
            found,
            lambda decoder: decoder.decode(token_ids),
            self.hold_timeout,
            self.max_moves,
        )

    async def token_bytes(self, token_ids: Sequence[int], model: str = "") -> Sequence[bytes]:
        found = await self._find_model(model)
        known = self._token_bytes.setdefault(found.name, {})
        missing = sorted({token_id for token_id in token_ids if token_id not in known})
        if missing:
            # For a request that is being answered already: it waits as its text would.
            answers = await self.fleet.decoding(
                found, lambda decoder: decoder.lookup(missing), PATIENCE_SECONDS, self.max_moves
            )
            known.update(zip(missing, answers, strict=True))
        return [known[token_id] for token_id in token_ids]

    async def dialect(self, model: str) -> Dialect:
        if self._dialects_at != self.fleet.num_changes:
            self._dialects.clear()
            self._dialects_at = self.fleet.num_changes
        known = self._dialects.get(model)
        if known is not None:
            return known
        found = await self._find_model(model)
        info = await self.fleet.tokenizer_info(found, self.hold_timeout)
        dialect = dialect_of(info, self._tool_call_parser, self._reasoning_parser)
        if self._dialects_at == self.fleet.num_changes:
            self._dialects[model] = dialect
        return dialect

    def models(self) -> Sequence[ModelCard]:
        return [_card(model) for model in self.fleet.catalog.models().values()]

    def model(self, id: str) -> ModelCard:
        found = self.fleet.catalog.named(id)
        if found is None:
            raise Unavailable(_NO_WORKER_YET, retry_after=RETRY_AFTER_SECONDS)
        return _card(found)

    async def flush_cache(self) -> None:
        await flush_all(self.fleet.workers.ready)

    async def _find_model(self, name: str) -> Model:
        return await self.fleet.wait_for(
            lambda: self.fleet.catalog.named(name), self.hold_timeout, _NO_WORKER_YET
        )

    # -- readiness and the end

    def readiness(self) -> Readiness:
        reasons = self.fleet.missing()
        if self._draining:
            reasons = ("draining", *reasons)
        return Readiness(not reasons, reasons, self._draining)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("this gateway is shutting down", retry_after=RETRY_AFTER_SECONDS)

    async def drain(self, timeout: float) -> None:
        """Takes no new work, and returns when the open requests have ended.

        After `timeout` seconds those that are left end with an error. Whoever watches is
        shown the end of it.
        """
        self._draining = True
        self.fleet.announce_change()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            self.fail_all(Unavailable("this gateway is shutting down"))
        self.feed.close()

    def fail_all(self, error: ShoalError) -> None:
        """Ends every open request with an error."""
        for generation in list(self._generations):
            generation.fail(error)


def _card(model: Model) -> ModelCard:
    return ModelCard(model.name, model.max_model_len, model.created, model.quantizations)


def make_local_decoder(config: GatewayConfig, tracing: Tracing) -> LocalDecoder | None:
    """The decoder in this process, where there is no detokenizer service.

    Raises StartupError if the tokenizer does not load.
    """
    return None if config.detokenizer_addresses else LocalDecoder(config.model, tracing)


def make_subset(config: GatewayConfig) -> Subset | None:
    """Which of the workers this gateway keeps sessions to; None: all."""
    if not config.max_worker_sessions:
        return None
    return Subset(gateway_name(config), config.max_worker_sessions)


def gateway_name(config: GatewayConfig) -> str:
    """What tells this gateway from others."""
    return config.gateway_id or f"{socket.gethostname()}-{os.getpid()}"
