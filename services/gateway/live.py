"""A request in flight: its choices, its unread chunks, its end.

Frames reach the choices by plain calls from the sessions' readers. What is nothing but text
goes on to the client's socket within that call, as long as the client keeps up and nothing
waits before it; for the rest the request's reader is woken, once a frame. A task is made only
where a choice has to wait for another instance. Knows nothing of what comes before: prompts,
models, routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from services.common.errors import Cancelled, DeadlineExceeded, HandedBack, ShoalError
from services.common.tracing import Span, Tracing
from services.gateway import placement, spans
from services.gateway.choice import Choice
from services.gateway.domain import (
    Chunk,
    GenerationRequest,
    ReasoningState,
    TextWriter,
    TokenLogprobs,
    Usage,
)
from services.gateway.peers.catalog import Model
from services.gateway.placement import Placement
from services.gateway.watch.journeys import Journeys


class Host(placement.Host, Protocol):
    """What a generation needs of the gateway."""

    @property
    def max_buffer_bytes(self) -> int: ...
    @property
    def tracing(self) -> Tracing: ...
    @property
    def journeys(self) -> Journeys: ...
    def admit(self, generation: LiveGeneration) -> None:
        """Counts it in. Raises Overloaded or Unavailable."""
        ...

    def release(self, generation: LiveGeneration) -> None: ...


log = logging.getLogger(__name__)


class LiveGeneration:
    """A request in flight: its choices, its unread chunks, its end.

    A choice's last chunk carries the id that ended it: a stop token has no text but is
    counted, so that token ids, logprobs and `usage.completion_tokens` agree.
    """

    def __init__(self, host: Host, request: GenerationRequest) -> None:
        self.request = request
        self.prompt_token_ids: Sequence[int] = ()
        self.prompt_logprobs: Sequence[TokenLogprobs] | None = None
        self.reasoning: ReasoningState = "unknown"
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()
        self.journey = host.journeys.begin(request)
        self._deadline = None if request.timeout is None else self._arrived + request.timeout
        self._timer: asyncio.TimerHandle | None = None
        self._scope: asyncio.Timeout | None = None  # around the time before acceptance
        self._max_tokens = 0
        self._placement: Placement | None = None
        self._choices: list[Choice] = []
        self._news: dict[Choice, None] = {}  # choices with something to take, in order
        self._unread_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._write: TextWriter | None = None  # for text, while the reader waits
        self._last_chunk_at: float | None = None
        self._moves: set[asyncio.Task[None]] = set()
        self._error: ShoalError | None = None
        self._closed = False
        self._final_usage: Usage | None = None  # once it is closed
        self.span: Span | None = None  # once it is accepted

    # -- before acceptance

    def before_acceptance(self) -> asyncio.Timeout:
        """Around what comes before it; ends with TimeoutError at the deadline or by `fail`."""
        self._scope = asyncio.timeout_at(self._deadline)
        return self._scope

    def accept(self) -> None:
        """A worker has accepted every choice."""
        self._scope = None

    def why_not_accepted(self) -> ShoalError:
        """Why `before_acceptance` ended."""
        return self._error or DeadlineExceeded("the request's deadline passed")

    async def submit(self, model: Model, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Places every choice; returns when all are accepted."""
        self.prompt_token_ids = prompt_ids
        self._max_tokens = max_tokens
        self._placement = Placement(
            self._host, self.request, model, prompt_ids, max_tokens, self._deadline, self.journey
        )
        self.journey.model = model.name
        self.journey.mark("encoded", tokens=len(prompt_ids))
        self.journey.count_with(lambda: self.usage)
        sampling = self.request.sampling
        self._choices = [
            Choice(
                index,
                self,
                sampling.stop_token_ids,
                self.journey,
                with_logprobs=sampling.logprobs is not None,
                trace=self.request.trace,
            )
            for index in range(self.request.n)
        ]
        try:
            await self._placement.place_all(self._choices)
        except ShoalError as error:
            self._name_field(error)
            raise
        self.journey.served = True
        self._host.recent.count_prompt(self._loop.time(), len(prompt_ids))
        if self._deadline is not None:
            self._timer = self._loop.call_at(
                self._deadline, self.fail, DeadlineExceeded("the request's deadline passed")
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
            if self._closed or self.ended:
                self.close()
                raise StopAsyncIteration
            self._reader = self._loop.create_future()
            await self._reader

    @property
    def ended(self) -> bool:
        return not (self._news or self._error) and all(
            choice.finish_reason for choice in self._choices
        )

    def _next_chunk(self) -> Chunk:
        choice = next(iter(self._news))
        del self._news[choice]
        self._unread_bytes -= choice.unread_bytes
        chunk = choice.take()
        self._count_chunk(len(chunk.token_ids))
        return chunk

    def _count_chunk(self, num_tokens: int) -> None:
        now, last = self._loop.time(), self._last_chunk_at
        if last is None:
            self._host.metrics.observe_first_chunk(num_tokens, now - self._arrived)
            self._host.recent.observe_first_chunk(now, num_tokens, now - self._arrived)
            self.journey.mark_first_text()
        else:
            self._host.metrics.observe_chunk(num_tokens, now - last)
            self._host.recent.observe_chunk(now, num_tokens, now - last)
        self._last_chunk_at = now

    def send_text_to(self, write: TextWriter) -> None:
        self._write = write

    @property
    def usage(self) -> Usage:
        if self._final_usage is not None:
            return self._final_usage
        num_prompt = len(self.prompt_token_ids)
        cached = max((choice.cached_tokens for choice in self._choices), default=0)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=sum(len(choice.ids) for choice in self._choices),
            cached_tokens=max(0, min(cached, num_prompt - 1)),
        )

    # -- what the choices call

    def send_text(self, choice: Choice, text: str, num_tokens: int) -> bool:
        reader = self._reader
        if (
            self._write is None
            or self._news
            or reader is None
            or reader.done()  # it is busy with an earlier chunk, or leaves
            or not self._write(choice.index, text)
        ):
            return False
        self._count_chunk(num_tokens)
        return True

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

    def on_worker_lost(self, choice: Choice, error: ShoalError) -> None:
        if len(choice.ids) >= self._max_tokens:
            choice.finish_at_length()
        else:
            assert self._placement is not None, "it placed the choice"
            self._begin_move(partial(self._placement.resume, error=error), choice)

    def on_moved(self, choice: Choice) -> None:
        self.on_worker_lost(choice, HandedBack("its worker is going away"))

    def on_worker_draining(self, choice: Choice) -> None:
        assert self._placement is not None, "it placed the choice"
        if self._placement.starts_sooner_elsewhere(choice):
            choice.leave_worker()
            self.on_moved(choice)

    def on_decoder_lost(self, choice: Choice) -> None:
        assert self._placement is not None, "it opened the text"
        self._begin_move(self._placement.redecode, choice)

    def on_decoder_draining(self, choice: Choice) -> None:
        assert self._placement is not None, "it opened the text"
        if self._placement.has_another_decoder():
            choice.leave_decoder()
            self._begin_move(partial(self._placement.redecode, handed_back=True), choice)

    async def _move(self, move: Callable[[Choice], Awaitable[None]], choice: Choice) -> None:
        try:
            await move(choice)
        except ShoalError as error:
            self.fail(error)

    def _begin_move(self, move: Callable[[Choice], Awaitable[None]], choice: Choice) -> None:
        """Moves a choice to another instance meanwhile, or fails the request."""
        if self._closed or self._error is not None:
            return
        task = asyncio.create_task(self._move(move, choice))
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    # -- the end

    def fail(self, error: ShoalError) -> None:
        """Ends the request with an error, after what is unread."""
        if self._closed or self._error is not None:
            return
        self._name_field(error)
        self._error = error
        if self._scope is not None:
            if not self._scope.expired():
                self._scope.reschedule(self._loop.time())
        else:
            self._host.metrics.count_error(error)
        self._let_go()
        self._wake()

    def _name_field(self, error: ShoalError) -> None:
        """Names the field that a grammar came in, which a worker does not know."""
        grammar = self.request.sampling.grammar
        if grammar is not None and error.param == "grammar" and grammar.param:
            error.param = grammar.param

    def close(self) -> None:
        """Gives the request up wherever it is; harmless after the end."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        self._news.clear()
        self._wake()
        self._final_usage = self.usage
        self._host.metrics.observe_request(self._loop.time() - self._arrived)
        self._tell_end()
        self._host.release(self)
        # Those who know each other would be garbage in a cycle.
        self._choices, self._write = [], None

    async def aclose(self) -> None:
        self.close()

    def _tell_end(self) -> None:
        """Says how the request ended, to its journey and its trace and, where that is shown, to
        the log. One that was never accepted is for `generate.start` to tell of."""
        reasons = [choice.finish_reason for choice in self._choices if choice.finish_reason]
        error = self._error.code.name.lower() if self._error else ""
        if not error and len(reasons) < len(self._choices):
            error = "cancelled"
        if self.span is not None:
            num_resumes = sum(choice.num_moves.total() for choice in self._choices)
            spans.finish(self.span, self.usage, reasons, num_resumes, error)
            self.journey.end(error or reasons[-1])
            cancelled = error == "cancelled"
            failed = bool(error) and not cancelled
            self._host.recent.count_end(self._loop.time(), failed=failed, cancelled=cancelled)
        if log.isEnabledFor(logging.DEBUG):
            extra = {"tokens": self.usage.completion_tokens, "outcome": error or "finished"}
            log.debug("a request ended", extra={"request_id": self.request.request_id, **extra})

    def tell_refused(self, outcome: str) -> None:
        """Says why no worker accepted it: an error's code in lower case, or cancelled."""
        self.journey.end(outcome)
        cancelled = outcome == "cancelled"
        self._host.recent.count_end(self._loop.time(), failed=not cancelled, cancelled=cancelled)

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
