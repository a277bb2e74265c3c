"""One REST call that generates: read, parse, start, then stream or collect.

What bodies mean and what answers look like is the business of the `Parse` function and
of the `Answer` that it leads to.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import InternalError, InvalidRequest, ShoalError
from services.common.numerals import read_float
from services.gateway.asgi import BodyLimits, header, read_body, while_connected
from services.gateway.domain import Gateway
from services.gateway.openai.answer import Answer, Parse, collect
from services.gateway.openai.decode import Caller
from services.gateway.openai.fanout import start_all
from services.gateway.spans import trace_of
from services.gateway.sse import EventStream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Exchange:
    """One call and its way back; it has an answer once workers have accepted it."""

    scope: Scope
    receive: Receive
    send: Send
    stream: EventStream
    answer: Answer | None = None


class GenerationEndpoint:
    """One endpoint that generates; `keepalive` is how long a stream may be silent, in seconds."""

    def __init__(
        self, gateway: Gateway, parse: Parse, limits: BodyLimits, keepalive: float
    ) -> None:
        self._gateway = gateway
        self._parse = parse
        self._limits = limits
        self._keepalive = keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive, self._limits)
        stream = EventStream(send, scope, keepalive=self._keepalive)
        exchange = _Exchange(scope, receive, send, stream)
        error = await while_connected(
            scope,
            receive,
            self._serve(raw, caller_of(scope), exchange),
            until_tick=stream.until_keepalive,
            tick=stream.keep_alive,
        )
        if error is None:
            return
        if not isinstance(error, ShoalError):
            log_fault(scope, error)
            error = InternalError("internal error")
        error.__traceback__ = None  # its frames have the body and the ids, for as long as it lives
        if exchange.answer is None or not stream.started:
            try:
                raise error  # the application's handlers answer with a status
            finally:
                del error
        await stream.end(exchange.answer.failure(error))

    async def _serve(self, raw: bytes, caller: Caller, exchange: _Exchange) -> None:
        job = await self._parse(raw, caller, self._gateway)
        try:
            generation = await start_all(self._gateway, job.requests)
        except ShoalError as error:
            if error.param is not None:
                error.param = job.params.get(error.param, error.param)
            raise
        stream = exchange.stream
        try:
            answer = exchange.answer = job.answer(self._gateway, generation)
            choices, last = [], b""
            if job.stream:
                await stream.start()
                if first := answer.first_events():
                    await stream.write(first)
                generation.send_text_to(partial(_write_text, answer, stream))
                async for chunk in generation:
                    events = await answer.events(chunk)
                    if generation.ended:
                        last = events  # one write with what ends the stream
                        break
                    if events:
                        await stream.write(events)
            else:
                choices = await collect(generation)
        finally:
            await generation.aclose()
        # Given up before the last byte: after it the client counts as gone.
        if job.stream:
            await stream.end(last + answer.last_events(generation.usage))
        else:
            body = await answer.body(choices, generation.usage)
            response = Response(body, media_type="application/json")
            await response(exchange.scope, exchange.receive, exchange.send)


def _write_text(answer: Answer, stream: EventStream, index: int, text: str) -> bool:
    event = answer.text_event(index, text)
    return event is not None and stream.write_now(event)


def caller_of(scope: Scope) -> Caller:
    """What the headers say.

    Raises:
        InvalidRequest: if X-Request-Timeout is no number of seconds.
    """
    timeout = header(scope, b"x-request-timeout")
    return Caller(
        request_id=scope["state"]["request_id"],
        timeout=None if timeout is None else _seconds(timeout),
        trace=trace_of(scope),
        tenant=scope["state"].get("tenant", ""),
    )


def _seconds(text: str) -> float:
    try:
        seconds = read_float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidRequest(
            "the header X-Request-Timeout must be a number of seconds above 0", param="timeout"
        )
    return seconds


def log_fault(scope: Scope, error: BaseException) -> None:
    """Logs what no request should lead to, with the request's id."""
    log.error(
        "fault in %s %s",
        scope["method"],
        scope["path"],
        exc_info=error,
        extra={"request_id": scope["state"]["request_id"]},
    )
