"""The story of a request: encode, check, pick a worker, submit, stream, finish or abort.

`start` tells it up to the worker's acceptance; `LiveGeneration` is the rest. Frames
reach the choices by plain calls from the sessions' readers, and the reader of the
request is woken once a frame; a task is made only where a choice has to wait for
another instance.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from protos import worker_pb2
from services.common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PeerLost,
    ShoalError,
    Unavailable,
)
from services.gateway import to_proto
from services.gateway.choice import Choice
from services.gateway.domain import (
    ChatPrompt,
    Chunk,
    GenerationRequest,
    Prompt,
    TokenLogprobs,
    TokenPrompt,
    Usage,
)
from services.gateway.metrics import Metrics
from services.gateway.peers.fleet import Model, PeerFleet
from services.gateway.peers.worker import WorkerPeer

log = logging.getLogger(__name__)

RESUME_PATIENCE_SECONDS = 30.0  # for another instance, when the request has no deadline


class Host(Protocol):
    """What a generation needs of the gateway."""

    @property
    def fleet(self) -> PeerFleet: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def max_moves(self) -> int:
        """Times a choice may move to another instance."""
        ...

    @property
    def hold_timeout(self) -> float: ...
    @property
    def max_buffer_bytes(self) -> int: ...
    def admit(self, generation: LiveGeneration) -> None:
        """Counts it in. Raises Overloaded or Unavailable."""
        ...

    def release(self, generation: LiveGeneration) -> None: ...


async def start(host: Host, request: GenerationRequest) -> LiveGeneration:
    """Returns once a worker has accepted every choice.

    Raises what `services.gateway.domain.Gateway.start` lists. If it raises or is
    cancelled, nothing of the request is left anywhere.
    """
    generation = LiveGeneration(host, request)
    accepted = False
    try:
        host.admit(generation)
        async with generation.within_deadline():
            model = await host.fleet.find_model(request.model, host.hold_timeout)
            prompt_ids = await encode(host, model, request.prompt)
            max_tokens = check_prompt(request, model, prompt_ids)
            await generation.submit(model, prompt_ids, max_tokens)
        accepted = True
    except ShoalError as error:
        host.metrics.count_error(error)
        raise
    finally:
        if not accepted:
            generation.close()
    return generation


async def encode(host: Host, model: Model, prompt: Prompt) -> Sequence[int]:
    """A prompt's ids; ids are ids already."""
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    message = to_proto.encode_request(prompt)
    answer = await host.fleet.encode(model, message, host.hold_timeout, host.max_moves)
    return answer.token_ids


def check_prompt(request: GenerationRequest, model: Model, prompt_ids: Sequence[int]) -> int:
    """Checks what depends on the model; returns how many tokens may be generated.

    Raises InvalidRequest or ContextLengthExceeded.
    """
    sampling = request.sampling
    param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    if not prompt_ids:
        raise InvalidRequest(f"{param}: there is not one token in the prompt", param=param)
    room = model.max_model_len - len(prompt_ids)
    if room < 1:
        too_long = ContextLengthExceeded.of(len(prompt_ids), model.max_model_len)
        too_long.param = param
        raise too_long
    for name, ids in (
        (param, prompt_ids),
        ("logit_bias", tuple(sampling.logit_bias)),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
            raise InvalidRequest(
                f"{name}: a token id is outside the vocabulary of {model.vocab_size}", param=name
            )
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)


class LiveGeneration:
    """A request in flight: its choices, its unread chunks, its end.

    A choice's last chunk carries the id that ended it: a stop token has no text but is
    counted, so that token ids, logprobs and `usage.completion_tokens` agree.
    """

    def __init__(self, host: Host, request: GenerationRequest) -> None:
        self.request = request
        self.prompt_token_ids: Sequence[int] = ()
        self.prompt_logprobs: Sequence[TokenLogprobs] | None = None
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()
        self._deadline = None if request.timeout is None else self._arrived + request.timeout
        self._timer: asyncio.TimerHandle | None = None
        self._scope: asyncio.Timeout | None = None  # around the time before acceptance
        self._seed = request.sampling.seed
        self._max_tokens = 0
        self._model: Model | None = None
        self._choices: list[Choice] = []
        self._news: dict[Choice, None] = {}  # choices with something to take, in order
        self._unread_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._last_chunk_at: float | None = None
        self._moves: set[asyncio.Task[None]] = set()
        self._error: ShoalError | None = None
        self._closed = False

    # -- before acceptance

    @asynccontextmanager
    async def within_deadline(self) -> AsyncIterator[None]:
        """Ends with DeadlineExceeded at the deadline, or with the error of `fail`."""
        try:
            async with asyncio.timeout_at(self._deadline) as self._scope:
                yield
        except TimeoutError:
            raise self._error or DeadlineExceeded("the request's deadline passed")
        finally:
            self._scope = None

    async def submit(self, model: Model, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Places every choice; returns when all are accepted."""
        self._model = model
        self.prompt_token_ids = prompt_ids
        self._max_tokens = max_tokens
        if self._seed is None:
            self._seed = secrets.randbits(63)
        sampling = self.request.sampling
        self._choices = [
            Choice(
                index,
                self,
                sampling.stop_token_ids,
                with_logprobs=sampling.logprobs is not None,
            )
            for index in range(self.request.n)
        ]
        hold = self._host.hold_timeout
        worker = await self._pick_worker(self._choices[0], set(), hold)
        decoder = await self._host.fleet.pick_decoder(model, hold)
        for choice in self._choices:
            choice.decode_with(decoder, self.request.text)
        if len(self._choices) == 1:
            await self._place(self._choices[0], worker)
        else:
            await self._place_all(worker)
        if self._deadline is not None:
            self._timer = self._loop.call_at(
                self._deadline, self.fail, DeadlineExceeded("the request's deadline passed")
            )

    async def _place_all(self, worker: WorkerPeer) -> None:
        tasks = [asyncio.create_task(self._place(choice, worker)) for choice in self._choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _place(self, choice: Choice, worker: WorkerPeer | None) -> None:
        """Gives a choice to a worker, to `worker` first; returns when one has accepted it.

        One that is overloaded is replaced once; one that is lost, or will not take it
        now, costs the choice one of its moves.
        """
        avoid: set[str] = set()
        while True:
            if worker is None:
                worker = await self._pick_worker(choice, avoid, self._patience())
            try:
                await choice.submit_to(worker, self._submit_message(choice))
                return
            except Overloaded:
                if avoid or not self._host.fleet.has_other_worker(self.model, worker):
                    raise
                avoid.add(worker.address)
            except Unavailable as error:
                self._spend_move(choice, "worker", error)
            worker = None

    async def _pick_worker(self, choice: Choice, avoid: set[str], patience: float) -> WorkerPeer:
        return await self._host.fleet.pick_worker(
            self.model,
            self.prompt_token_ids,
            self.request.cache_salt,
            fingerprint=choice.fingerprint,
            avoid=avoid,
            patience=patience,
        )

    def _submit_message(self, choice: Choice) -> worker_pb2.Submit:
        assert self._seed is not None
        left = None
        if self._deadline is not None:
            left = max(1, round((self._deadline - self._loop.time()) * 1000))
        return to_proto.submit(
            self.request,
            self.prompt_token_ids,
            index=choice.index,
            seed=self._seed,
            max_tokens=self._max_tokens,
            resume_ids=choice.ids,
            deadline_ms=left,
        )

    # -- the stream

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            if self._news:
                return self._next_chunk()
            if self._error is not None:
                self.close()
                raise self._error
            if self._closed or all(choice.finish_reason for choice in self._choices):
                self.close()
                raise StopAsyncIteration
            self._reader = self._loop.create_future()
            await self._reader

    def _next_chunk(self) -> Chunk:
        choice = next(iter(self._news))
        del self._news[choice]
        self._unread_bytes -= choice.unread_bytes
        chunk = choice.take()
        now = self._loop.time()
        self._host.metrics.observe_chunk(
            len(chunk.token_ids),
            now - (self._last_chunk_at or self._arrived),
            first=self._last_chunk_at is None,
        )
        self._last_chunk_at = now
        return chunk

    @property
    def model(self) -> Model:
        assert self._model is not None, "submit sets it"
        return self._model

    @property
    def usage(self) -> Usage:
        num_prompt = len(self.prompt_token_ids)
        cached = max((choice.cached_tokens for choice in self._choices), default=0)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=sum(len(choice.ids) for choice in self._choices),
            cached_tokens=max(0, min(cached, num_prompt - 1)),
        )

    # -- what the choices call

    def on_news(self, choice: Choice, num_bytes: int) -> None:
        self._news[choice] = None
        self._unread_bytes += num_bytes
        if self._unread_bytes > self._host.max_buffer_bytes:
            self._news.clear()
            self.fail(Cancelled("the client reads too slowly: too much text waits for it"))
        self._wake()

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self.prompt_logprobs = logprobs

    def on_failed(self, error: ShoalError) -> None:
        self.fail(error)

    def on_worker_lost(self, choice: Choice) -> None:
        if len(choice.ids) >= self._max_tokens:
            choice.finish_at_length()
        else:
            self._begin_move(self._resume(choice))

    def on_decoder_lost(self, choice: Choice) -> None:
        self._begin_move(self._redecode(choice))

    # -- moving to other instances

    def _begin_move(self, move: Coroutine[None, None, None]) -> None:
        if self._closed or self._error is not None:
            move.close()
            return
        task = asyncio.create_task(move)
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    async def _resume(self, choice: Choice) -> None:
        """Continues a choice on another worker, or fails the request."""
        try:
            self._spend_move(choice, "worker", PeerLost("its worker was lost"))
            await self._place(choice, None)
        except ShoalError as error:
            self.fail(error)

    async def _redecode(self, choice: Choice) -> None:
        """Continues a choice's text on another detokenizer, or fails the request."""
        try:
            while True:
                self._spend_move(choice, "detokenizer", PeerLost("its detokenizer was lost"))
                decoder = await self._host.fleet.pick_decoder(self.model, self._patience())
                try:
                    return choice.decode_with(decoder, self.request.text)
                except PeerLost as error:
                    log.info("a detokenizer left early", extra={"reason": error.message})
        except ShoalError as error:
            self.fail(error)

    def _spend_move(self, choice: Choice, kind: str, error: Unavailable) -> None:
        """Raises an error for the client if the choice has no move left."""
        log.info(
            "moving a choice",
            extra={"request_id": self.request.request_id, "peer": kind, "reason": error.message},
        )
        if choice.num_moves >= self._host.max_moves:
            raise PeerLost(
                f"the {kind} that served this request was lost, and it has moved"
                f" {choice.num_moves} times already",
                retry_after=1.0,
            )
        choice.num_moves += 1
        self._host.metrics.count_move(kind)

    def _patience(self) -> float:
        if self._deadline is None:
            return RESUME_PATIENCE_SECONDS
        return max(0.0, self._deadline - self._loop.time())

    # -- the end

    def fail(self, error: ShoalError) -> None:
        """Ends the request with an error, after what is unread."""
        if self._closed or self._error is not None:
            return
        self._error = error
        if self._scope is not None:
            if not self._scope.expired():
                self._scope.reschedule(self._loop.time())
        else:
            self._host.metrics.count_error(error)
        self._let_go()
        self._wake()

    def close(self) -> None:
        """Gives the request up wherever it is; harmless after the end."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        self._news.clear()
        self._wake()
        self._host.metrics.observe_request(self._loop.time() - self._arrived)
        self._host.release(self)

    async def aclose(self) -> None:
        self.close()

    def _let_go(self) -> None:
        """Leaves nothing of the request at any peer."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._moves):
            task.cancel()
        for choice in self._choices:
            choice.close()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
