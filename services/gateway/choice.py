"""One choice of a request: the ids a worker emits, the text they become, the unread news.

Owns the choice's state through any change of worker or detokenizer. It holds every
id emitted so far, so it can say at any moment from where another instance goes on:

    0 ......... sent ......... consumed ......... emitted
                |<-- unread -->|<-- in flight -->|
                               to the detokenizer

All its methods are plain calls that return at once; where it has to wait for another
instance it asks its owner.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from protos import worker_pb2
from services.common.errors import HandedBack, InternalError, PeerLost, ShoalError, Unavailable
from services.common.tracing import NO_TRACE, TraceContext
from services.gateway.domain import Chunk, FinishReason, TextOptions, TokenLogprobs
from services.gateway.peers.detokenizer import Decoder, TextStream
from services.gateway.peers.steps import Finished
from services.gateway.peers.worker import Submission, WorkerPeer
from services.gateway.watch.journeys import Journey


class Owner(Protocol):
    """The request a choice belongs to."""

    def send_text(self, choice: Choice, text: str, num_tokens: int) -> bool:
        """Sends text of that many tokens past `take`, if nothing waits before it."""
        ...

    def on_news(self, choice: Choice, num_bytes: int) -> None:
        """There is something to `take`; `num_bytes` of text are new."""
        ...

    def on_failed(self, error: ShoalError) -> None: ...

    def on_worker_lost(self, choice: Choice, error: ShoalError) -> None:
        """The choice needs another worker."""
        ...

    def on_moved(self, choice: Choice) -> None:
        """The choice needs another worker: its own handed it back."""
        ...

    def on_worker_draining(self, choice: Choice) -> None:
        """The choice waits at a worker that is about to go."""
        ...

    def on_decoder_lost(self, choice: Choice) -> None:
        """The choice needs another detokenizer."""
        ...

    def on_decoder_draining(self, choice: Choice) -> None:
        """The choice's detokenizer is about to go."""
        ...

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None: ...


class Choice:
    """See the module's picture. `finish_reason` is set once all text is there."""

    def __init__(
        self,
        index: int,
        owner: Owner,
        stop_token_ids: Sequence[int],
        journey: Journey,
        *,
        with_logprobs: bool,
        trace: TraceContext = NO_TRACE,
    ) -> None:
        self.index = index
        self.unread_bytes = 0
        self.ids: list[int] = []  # emitted; after a stop string, those it needed
        self.cached_tokens = 0
        self.fingerprint: str | None = None  # of the worker that emitted the first id
        self.finish_reason: FinishReason | None = None
        self.num_moves: Counter[str] = Counter()  # by kind of peer
        self._owner = owner
        self._journey = journey
        self._trace = trace
        self._stop_token_ids = frozenset(stop_token_ids)
        self._logprobs: list[TokenLogprobs] | None = [] if with_logprobs else None  # unread
        self._logprob_bytes = 0  # of those that came since the last text
        self._submission: Submission | None = None
        self._accepted: asyncio.Future[None] | None = None
        self._started = False  # the worker that has it has begun to compute it
        self._awaits_token = False  # of that worker none has come yet
        self._finished: Finished | None = None
        self._text: TextStream | None = None
        self._num_fed = 0  # ids that are for the detokenizer: all but a stop token
        self._consumed = 0
        self._num_chars = 0
        self._sent = 0
        self._unread: list[str] = []
        self._stop_reason: str | int | None = None
        self._closed = False

    # -- what the owner calls

    def submit_to(self, worker: WorkerPeer, submit: worker_pb2.Submit) -> asyncio.Future[None]:
        """Hands the choice to a worker; the future is done when it is accepted.

        The future raises PeerLost or what the worker refused it with; the call itself
        raises PeerLost if the session is gone.
        """
        self._accepted = asyncio.get_running_loop().create_future()
        self._started, self._awaits_token = False, True
        self._submission = worker.submit(submit, self)
        self._journey.mark("submitted", self.index, address=worker.address)
        return self._accepted

    def leave_worker(self) -> None:
        """Takes the choice from its worker, to be given to another."""
        if self._submission is not None:
            self._submission.abort()
            self._submission = None

    def leave_decoder(self) -> None:
        """Takes the text from its detokenizer, to be given to another."""
        if self._text is not None:
            self._text.close()
            self._text = None

    def decode_with(self, decoder: Decoder, options: TextOptions) -> None:
        """Opens the text, or takes it over: consumed ids are replayed, others sent again.

        Raises PeerLost if the session is gone.
        """
        replay = self.ids[: self._consumed]
        self._text = decoder.open(options, self, replay, self._num_chars, self._trace)
        in_flight = self.ids[self._consumed : self._num_fed]
        if in_flight:
            self._text.push(in_flight)
        if self._finished is not None:
            self._text.end()

    def take(self) -> Chunk:
        """The unread news."""
        end = len(self.ids) if self.finish_reason else self._consumed
        start, self._sent = self._sent, end
        text = "".join(self._unread)
        self._unread.clear()
        self.unread_bytes = 0
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs[: end - start]
            del self._logprobs[: end - start]
        return Chunk(
            self.index, text, self.ids[start:end], logprobs, self.finish_reason, self._stop_reason
        )

    def finish_at_length(self) -> None:
        """Every allowed id was emitted, though no worker lived to say so."""
        self._end_ids(Finished("length", None))

    def close(self) -> None:
        """Gives the choice up, at the worker and at the detokenizer."""
        self._closed = True
        if self._submission is not None:
            self._submission.abort()
        if self._text is not None:
            self._text.close()
        accepted, self._accepted = self._accepted, None
        if accepted is not None and not accepted.cancel() and not accepted.cancelled():
            accepted.exception()  # nobody may be left to ask for it

    # -- what the worker's session calls

    def on_accepted(self) -> None:
        self._journey.mark("accepted", self.index)
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_result(None)

    def on_started(self, cached_tokens: int) -> None:
        self._started = True
        self._journey.mark("started", self.index, tokens=cached_tokens)
        if not self.ids:  # later it is a resume, whose hits are of the client's own making
            self.cached_tokens = cached_tokens

    def on_rejected(self, error: ShoalError) -> None:
        self._submission = None
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_exception(error)
        elif isinstance(error, Unavailable) or (isinstance(error, InternalError) and not self.ids):
            self._owner.on_worker_lost(self, error)
        else:
            self._owner.on_failed(error)

    def on_prefilled(self, num_tokens: int) -> None:
        self._journey.mark("prefilled", self.index, tokens=num_tokens)

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._owner.on_prompt_logprobs(logprobs)

    def on_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        finished: Finished | None,
    ) -> None:
        if finished is not None and finished.reason == "abort":
            self.on_rejected(Unavailable("the worker gave the request up"))
            return
        if self._awaits_token:
            self._note_first_token()
        self.ids += token_ids
        if logprobs is not None and self._logprobs is not None:
            self._logprobs.extend(logprobs)
            self._logprob_bytes += sum(map(_size, logprobs))
        if finished is not None and token_ids and token_ids[-1] == finished.stop_token_id:
            token_ids = token_ids[:-1]  # it ends the text and is no part of it
        if token_ids:
            self._num_fed += len(token_ids)
            if self._text is not None:
                self._text.push(token_ids)
        if finished is not None and not self._closed and self.finish_reason is None:
            self._end_ids(finished)

    def on_worker_lost(self, error: PeerLost) -> None:
        self._submission = None
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_exception(error)
        else:
            self._owner.on_worker_lost(self, error)

    def on_moved(self) -> None:
        self._submission = None
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_exception(HandedBack("the worker handed the request back"))
        else:
            self._owner.on_moved(self)

    def on_worker_draining(self) -> None:
        accepted = self._accepted is not None and self._accepted.done()
        if accepted and not self._started and self._submission is not None:
            self._owner.on_worker_draining(self)

    # -- what the detokenizer's session calls

    def on_text(self, text: str, ids_consumed: int) -> None:
        self._consumed = ids_consumed
        if not text:
            return
        self._num_chars += len(text)
        if self._logprobs is None and self._owner.send_text(self, text, ids_consumed - self._sent):
            self._sent = ids_consumed
            return
        self._unread.append(text)
        num_bytes = len(text) if text.isascii() else len(text.encode())
        num_bytes += self._logprob_bytes
        self._logprob_bytes = 0
        self.unread_bytes += num_bytes
        self._owner.on_news(self, num_bytes)

    def on_text_end(self, stop: str | None, ids_consumed: int) -> None:
        self._text = None
        self._journey.mark("last_text", self.index)
        if stop is not None:
            self._cut_at_stop(stop, ids_consumed)
        elif self._finished is not None:
            self.finish_reason = self._finished.reason
            if self._finished.stop_token_id in self._stop_token_ids:
                self._stop_reason = self._finished.stop_token_id
        else:
            self._owner.on_failed(InternalError("a text ended before its tokens did"))
            return
        self._owner.on_news(self, 0)

    def on_text_error(self, error: ShoalError) -> None:
        self._text = None
        self._owner.on_failed(error)

    def on_decoder_lost(self, error: PeerLost) -> None:
        self._text = None
        self._owner.on_decoder_lost(self)

    def on_decoder_draining(self) -> None:
        self._owner.on_decoder_draining(self)

    # -- inside

    def _note_first_token(self) -> None:
        self._awaits_token = False
        self._journey.mark("first_token", self.index)
        if self.fingerprint is None and self._submission is not None:
            self.fingerprint = self._submission.peer.fingerprint

    def _end_ids(self, finished: Finished) -> None:
        self._submission = None
        self._finished = finished
        self._journey.mark("last_token", self.index, tokens=len(self.ids))
        if self._text is not None:
            self._text.end()

    def _cut_at_stop(self, stop: str, ids_consumed: int) -> None:
        del self.ids[ids_consumed:]
        if self._logprobs is not None:
            del self._logprobs[ids_consumed - self._sent :]
        self._consumed = ids_consumed
        self.finish_reason = "stop"
        self._stop_reason = stop
        if self._submission is not None:
            self._submission.abort()
            self._submission = None


def _size(logprobs: TokenLogprobs) -> int:
    """About what a token's log-probabilities take in a message."""
    return 16 + 10 * len(logprobs.top)
