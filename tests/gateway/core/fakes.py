"""Scripted peers in this process, over unix sockets: what a fleet looks like to a gateway.

The worker's token at a position is a hash of (prompt, position), so that any stream,
however often it moved, can be compared with the one that nothing disturbed. The
tokenizer and the detokenizer speak a vocabulary of code points: id n is chr(n).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from protos import (
    common_pb2,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.common import rpc

VOCAB_SIZE = 256
EOS = 3

Context = grpc.aio.ServicerContext[Any, Any]


def token_at(prompt_ids: tuple[int, ...], position: int) -> int:
    """A letter that depends on the whole prompt and the position alone."""
    digest = hashlib.sha256(repr((prompt_ids, position)).encode()).digest()
    return ord("a") + digest[0] % 26


def expected_ids(prompt: str, count: int) -> list[int]:
    """What an undisturbed stream emits."""
    prompt_ids = tuple(map(ord, prompt))
    return [token_at(prompt_ids, position) for position in range(count)]


def expected_text(prompt: str, count: int) -> str:
    return "".join(map(chr, expected_ids(prompt, count)))


class Activity:
    """Pulses whenever a fake hears something, so that a test can wait for its effect."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def pulse(self) -> None:
        self._event.set()
        self._event.clear()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self._event.wait()


class FakeServer:
    """A servicer on a unix socket that can vanish and come back."""

    def __init__(self, path: Path, add: Callable[[grpc.aio.Server], None]) -> None:
        self.address = f"unix:{path}"
        self._add = add
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=rpc.server_options(public=False))
        self._add(self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def kill(self) -> None:
        """Breaks every stream at once."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)


class Link:
    """The peer's side of one session: an outbox, and all that was received."""

    def __init__(self, new: Callable[[], Any], activity: Activity) -> None:
        self.outbox: rpc.Outbox[Any] = rpc.Outbox(new)
        self._activity = activity
        self.frozen = False  # nothing is written any more, not even a heartbeat
        self.cancelled = asyncio.Event()

    async def serve(self, requests: AsyncIterator[Any], context: Context, on: Any) -> None:
        writer = asyncio.create_task(self.outbox.run(context.write))

        async def read() -> None:
            async for request in requests:
                on(request)
                self._activity.pulse()
                if self.frozen:
                    writer.cancel()

        reader = asyncio.create_task(read())
        canceller = asyncio.create_task(self.cancelled.wait())
        try:
            await asyncio.wait([reader, canceller], return_when=asyncio.FIRST_COMPLETED)
            if self.cancelled.is_set():
                await context.abort(grpc.StatusCode.CANCELLED)
        finally:
            self._activity.pulse()
            for task in (reader, writer, canceller):
                task.cancel()
            await asyncio.gather(reader, writer, canceller, return_exceptions=True)

    def send(self) -> None:
        self.outbox.notify()


@dataclass
class Running:
    """A request on a fake worker."""

    submit: worker_pb2.Submit
    prompt_ids: tuple[int, ...]
    position: int


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Emits when the test says `step()`, or by itself when `auto` is set."""

    def __init__(
        self, path: Path, activity: Activity, *, model: str = "fake", fingerprint: str = "f"
    ) -> None:
        self.activity = activity
        self.info = worker_pb2.WorkerInfo(
            epoch=1,
            model=model,
            fingerprint=fingerprint,
            max_model_len=1000,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
        )
        self.server = FakeServer(
            path, lambda server: worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        )
        self.auto = True
        self.accept = True
        self.reject_with: common_pb2.Error | None = None
        self.eos_at: int | None = None  # position at which EOS comes
        self.submits: list[worker_pb2.Submit] = []
        self.aborts: list[int] = []
        self.running: dict[int, Running] = {}
        self.flushes = 0
        self.watched: list[bool] = []  # what gateways asked for, of the engine's steps
        self._session: Link | None = None

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_pb2.WorkerSessionRequest], context: Context
    ) -> None:
        self._session = Link(worker_pb2.WorkerSessionResponse, self.activity)
        self.running = {}
        self._session.outbox.pending.info.CopyFrom(self.info)
        self._session.send()
        stepper = asyncio.create_task(self._step_for_ever())
        try:
            await self._session.serve(request_iterator, context, self._on_request)
        finally:
            stepper.cancel()
            await asyncio.gather(stepper, return_exceptions=True)
            self.running = {}
            self.activity.pulse()

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: Context
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(info=self.info)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        self.drain()
        return worker_pb2.DrainResponse(num_requests=len(self.running))

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        for token_id in request.submit.prompt_ids:
            yield worker_pb2.WorkerGenerateResponse(token_ids=[token_id])

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: Context
    ) -> worker_pb2.FlushCacheResponse:
        self.flushes += 1
        return worker_pb2.FlushCacheResponse(num_pages=1)

    def _on_request(self, request: worker_pb2.WorkerSessionRequest) -> None:
        if request.HasField("watch_steps"):
            self.watched.append(request.watch_steps)
        for submit in request.submits:
            self.submits.append(submit)
            if self.reject_with is not None:
                self.pending.step.rejected.add(handle=submit.handle, error=self.reject_with)
                self.send()
            elif self.accept:
                self.pending.step.accepted.append(submit.handle)
                prompt_ids = tuple(submit.prompt_ids)
                running = Running(submit, prompt_ids, len(submit.resume_ids))
                self.running[submit.handle] = running
                self.send()
        for handle in request.aborts:
            self.aborts.append(handle)
            self.running.pop(handle, None)

    async def _step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            if self.auto and self.running:
                self.step()
                self.activity.pulse()

    @property
    def pending(self) -> worker_pb2.WorkerSessionResponse:
        assert self._session is not None
        pending: worker_pb2.WorkerSessionResponse = self._session.outbox.pending
        return pending

    def send(self) -> None:
        assert self._session is not None
        self._session.send()

    def cancel_session(self) -> None:
        """Ends the session with the status that a cancelled call has."""
        assert self._session is not None
        self._session.cancelled.set()

    def freeze(self) -> None:
        """The session stays open and falls silent from the next message on."""
        assert self._session is not None
        self._session.frozen = True
        self.auto = False

    def drain(self) -> None:
        self.pending.draining = True
        self.send()

    def step(self, tokens: int = 1) -> None:
        """Each running request emits; the ends follow from max_tokens and eos_at."""
        frame = self.pending.step
        frame.epoch = self.info.epoch
        frame.step += 1
        for handle, running in list(self.running.items()):
            for _ in range(tokens):
                if not self._emit(frame, handle, running):
                    break
        frame.load.num_running = len(self.running)
        frame.load.num_waiting = 2
        self.send()

    def _emit(self, frame: worker_pb2.StepFrame, handle: int, running: Running) -> bool:
        position, sampling = running.position, running.submit.sampling
        token = EOS if position == self.eos_at else token_at(running.prompt_ids, position)
        running.position += 1
        if position == 0:
            frame.started.add(handle=handle, cached_tokens=len(running.prompt_ids))
        frame.handles.append(handle)
        frame.counts.append(1)
        frame.token_ids.append(token)
        if sampling.HasField("logprobs"):
            row = frame.logprobs.add(handle=handle)
            row.tokens.add(token_id=token, logprob=-float(position))
        if sampling.HasField("prompt_logprobs") and position == 0:
            frame.logprobs.add(handle=handle).prompt_tokens.extend(
                common_pb2.TokenLogprobs(token_id=token_id) for token_id in running.prompt_ids
            )
        if token == EOS:
            frame.finished.add(
                handle=handle, reason=common_pb2.FINISH_REASON_STOP, stop_token_id=EOS
            )
        elif running.position >= sampling.max_tokens:
            frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_LENGTH)
        else:
            return True
        del self.running[handle]
        return False


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """One id a character. `hold` keeps answers back; text "bad" is refused."""

    def __init__(self, path: Path, activity: Activity, *, model: str = "fake") -> None:
        self.activity = activity
        self.server = FakeServer(
            path, lambda server: tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self, server)
        )
        self.info = tokenizer_pb2.TokenizerInfo(epoch=1, model=model, vocab_size=VOCAB_SIZE)
        self.reasoning = tokenizer_pb2.REASONING_STATE_UNSPECIFIED
        self.hold = False
        self.jobs: list[tokenizer_pb2.EncodeJob] = []
        self.cancels: list[int] = []
        self._session: Link | None = None

    async def Session(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.TokenizerSessionRequest],
        context: Context,
    ) -> None:
        session = self._session = Link(tokenizer_pb2.TokenizerSessionResponse, self.activity)
        session.outbox.pending.info.CopyFrom(self.info)
        session.send()

        def on_request(request: tokenizer_pb2.TokenizerSessionRequest) -> None:
            for job in request.jobs:
                self.jobs.append(job)
                if not self.hold:
                    self._answer(session, job)
            for handle in request.cancels:
                self.cancels.append(handle)

        await session.serve(request_iterator, context, on_request)

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        return tokenizer_pb2.EncodeResponse(token_ids=map(ord, request.text))

    def answer_held(self) -> None:
        """Answers every job so far; for those that were kept back."""
        assert self._session is not None
        for job in self.jobs:
            self._answer(self._session, job)

    def _answer(self, session: Link, job: tokenizer_pb2.EncodeJob) -> None:
        request = job.request
        text = request.text
        if request.HasField("chat"):
            text = "".join(f"<{m.role}>{m.content}" for m in request.chat.messages)
        result = session.outbox.pending.results.add(handle=job.handle)
        if text == "bad":
            result.error.code = common_pb2.ERROR_CODE_INVALID_ARGUMENT
            result.error.message = "bad text"
        else:
            result.response.token_ids.extend(map(ord, text))
            result.response.reasoning = self.reasoning
            if request.return_token_strs:
                result.response.token_strs.extend(text)
        session.send()


@dataclass
class Text:
    """A text on a fake detokenizer."""

    stop: list[str]
    skip: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    sent: int = 0


class FakeDetokenizer(tokenizer_pb2_grpc.DetokenizerServicer):
    """Holds back as many characters as a stop string may yet need; cuts before a match."""

    def __init__(self, path: Path, activity: Activity, *, model: str = "fake") -> None:
        self.activity = activity
        self.server = FakeServer(
            path,
            lambda server: tokenizer_pb2_grpc.add_DetokenizerServicer_to_server(self, server),
        )
        self.info = tokenizer_pb2.TokenizerInfo(epoch=1, model=model, vocab_size=VOCAB_SIZE)
        self.hold = False  # take ids in, answer nothing
        self.frames: list[tokenizer_pb2.DetokenizerSessionRequest] = []
        self.texts: dict[int, Text] = {}
        self.closes: list[int] = []
        self.lookups = 0
        self._session: Link | None = None

    def release(self) -> None:
        """Answers what was held, and holds no more."""
        assert self._session is not None
        self.hold = False
        self._session.send()

    def drain(self) -> None:
        assert self._session is not None
        self._session.outbox.pending.draining = True
        self._session.send()

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Context
    ) -> tokenizer_pb2.DecodeResponse:
        return tokenizer_pb2.DecodeResponse(text="".join(map(chr, request.token_ids)))

    async def Lookup(
        self, request: tokenizer_pb2.LookupRequest, context: Context
    ) -> tokenizer_pb2.LookupResponse:
        self.lookups += 1
        return tokenizer_pb2.LookupResponse(token_bytes=[bytes([i]) for i in request.token_ids])

    async def Session(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.DetokenizerSessionRequest],
        context: Context,
    ) -> None:
        session = Link(tokenizer_pb2.DetokenizerSessionResponse, self.activity)
        self._session = session
        self.texts = {}
        session.outbox.pending.info.CopyFrom(self.info)
        session.send()
        try:
            await session.serve(
                request_iterator, context, lambda request: self._on_request(session, request)
            )
        finally:
            self.texts = {}
            self.activity.pulse()

    def _on_request(self, session: Link, request: tokenizer_pb2.DetokenizerSessionRequest) -> None:
        if request.ByteSize():
            self.frames.append(request)
        for opened in request.opens:
            text = self.texts[opened.handle] = Text(list(opened.options.stop), opened.skip_chars)
            self._feed(session, opened.handle, text, list(opened.replay_ids))
        start = 0
        for handle, count in zip(request.handles, request.counts, strict=True):
            ids = list(request.token_ids[start : start + count])
            start += count
            if handle in self.texts:
                self._feed(session, handle, self.texts[handle], ids)
        for handle in request.ends:
            if (ended := self.texts.pop(handle, None)) is not None:
                self._give_out(session, handle, ended, len(ended.text))
                session.outbox.pending.ended.add(handle=handle)
        for handle in request.closes:
            self.closes.append(handle)
            self.texts.pop(handle, None)
        if not self.hold:  # else what is pending waits, and is lost with the session
            session.send()

    def _feed(self, session: Link, handle: int, text: Text, ids: list[int]) -> None:
        stopped = None
        for token_id in ids:
            text.ids.append(token_id)
            text.text += chr(token_id)
            stopped = next((stop for stop in text.stop if stop in text.text), None)
            if stopped is not None:
                text.text = text.text[: text.text.index(stopped)]
                break
        held = max((len(stop) - 1 for stop in text.stop), default=0)
        self._give_out(session, handle, text, len(text.text) - (0 if stopped else held))
        if stopped is not None:
            del self.texts[handle]
            session.outbox.pending.ended.add(
                handle=handle, stop=stopped, ids_consumed=len(text.ids)
            )

    def _give_out(self, session: Link, handle: int, text: Text, end: int) -> None:
        pending = session.outbox.pending
        pending.handles.append(handle)
        pending.texts.append(text.text[max(text.sent, text.skip) : max(end, 0)])
        pending.ids_consumed.append(len(text.ids))
        pending.held_chars.append(len(text.text) - max(end, 0))
        text.sent = max(text.sent, end)


@asynccontextmanager
async def serving(*fakes: Any) -> AsyncIterator[None]:
    """Starts fakes, and kills them at the end."""
    for fake in fakes:
        await fake.server.start()
    try:
        yield
    finally:
        for fake in fakes:
            await fake.server.kill()
