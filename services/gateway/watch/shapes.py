"""What `/fleet` and its kin answer: the contract of everybody who shows a fleet.

The web page and `shoal top` read these, as JSON. One gateway tells what it sees itself: its
own requests, and its peers as their sessions show them. Where several gateways share the
work each has its own view, and only what workers report of themselves (running, waiting,
pages, tokens) is of all gateways together.

Times are seconds on the gateway's own monotonic clock, whose reading `FleetSnapshot.now`
is; a duration is a difference of two, an age is `now` minus one. `time` is the same moment
in Unix seconds, for a calendar. Rates are means over about the last two seconds. What is
not known is null. Clients must ignore fields that they do not know.
"""

from __future__ import annotations

from typing import Literal

import msgspec

InstanceState = Literal["starting", "ready", "draining", "breaker-open", "dead"]
Service = Literal["worker", "tokenizer", "detokenizer"]
EventKind = Literal[
    "received",
    "encoded",
    "queued",
    "admitted",
    "submitted",
    "accepted",
    "refused",
    "started",
    "prefilled",
    "first_token",
    "first_text",
    "worker_lost",
    "worker_left",
    "decoder_lost",
    "decoder_left",
    "last_token",
    "last_text",
    "ended",
]


class EngineFigures(msgspec.Struct, frozen=True):
    """What a worker last said of its engine, over the requests of all gateways.

    A page of the pool is free, evictable (only the prefix cache uses it) or held by
    requests: the rest. Ratios are between 0 and 1.
    """

    running: int  # requests that hold pages
    waiting: int  # requests that wait for pages
    max_running: int  # the most requests in one batch
    pages: int
    pages_free: int
    pages_evictable: int
    page_size: int  # tokens a page
    preempted: int  # times a request lost its pages, since the engine's start
    prefix_hit_rate: float | None  # of the prompt tokens since the start; null before any
    tokens_in_per_s: float  # prompt tokens computed, those from the cache not counted
    tokens_out_per_s: float
    busy: float  # share of the time with a step running
    bubble: float  # share of the time idle although requests were there
    step_s: float  # how long the last step took
    tensor_parallel: int
    max_model_len: int


class Instance(msgspec.Struct, frozen=True):
    """One instance of one service, as its session shows it.

    `starting`: it has never been ready for this gateway, or says itself that it loads.
    `dead`: it was there, and cannot be reached. `breaker-open`: it answers, but its last
    requests failed, so it gets no more for a while. `epoch` changes when it restarts.
    """

    service: Service
    address: str
    state: InstanceState
    since: float  # when it came into this state
    epoch: str  # "" before it has said what it is
    model: str
    version: str
    outstanding: int  # requests, encodes or texts of this gateway that are open there
    heard: float | None  # when anything was last heard of it; null if it is not connected
    detail: str  # why it is not ready, in words; or ""
    engine: EngineFigures | None = None  # of a worker that has told its load


class Percentiles(msgspec.Struct, frozen=True):
    """Of durations in seconds; each is exact to about 5 %. Null where there were none."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Minute(msgspec.Struct, frozen=True):
    """What happened in this gateway in the last 60 seconds."""

    ttft: Percentiles  # from a request's arrival to its first text
    itl: Percentiles  # between two texts of a request; one may hold several tokens
    requests: int  # that ended, however
    errors: int  # of them with an error
    cancelled: int  # of them given up by their clients
    tokens_in: int  # of prompts, cached ones included
    tokens_out: int
    resumes: int  # times a request went on at another instance


class GatewayFigures(msgspec.Struct, frozen=True):
    """The gateway that answers."""

    id: str
    version: str
    started: float
    ready: bool
    draining: bool
    reasons: list[str]  # why it is not ready
    streams: int  # requests in flight
    queued: int  # of them in this gateway's queue, for a worker with room
    max_requests: int
    local_decoder: bool  # it decodes by itself: there are no detokenizers
    tokens_in_per_s: float
    tokens_out_per_s: float
    minute: Minute


class FleetSnapshot(msgspec.Struct, frozen=True):
    """`GET /fleet`, and each `fleet` event of `GET /fleet/events`."""

    now: float
    time: float
    gateway: GatewayFigures
    instances: list[Instance]  # workers, tokenizers, detokenizers, each by address


class FleetHistory(msgspec.Struct, frozen=True):
    """`GET /fleet/history`: the last three minutes of this gateway, a column a figure.

    Row i is of the second that begins at `start[i]`; seconds without anything have a row
    too. Percentiles are null where nothing was measured.
    """

    now: float
    start: list[float]
    ttft_p50: list[float | None]
    ttft_p99: list[float | None]
    itl_p50: list[float | None]
    itl_p99: list[float | None]
    tokens_in: list[int]
    tokens_out: list[int]
    errors: list[int]


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One engine step, a JSON array in this order."""

    number: int
    began: float  # on the gateway's clock
    duration: float  # seconds
    bubble: float  # seconds idle right before it although requests were there
    prefill_tokens: int
    decode_tokens: int


class WorkerSteps(msgspec.Struct, frozen=True):
    """A `steps` event of `GET /fleet/events`: what one worker's engine has done since."""

    address: str
    steps: list[Step]


class JourneyEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened to a request.

    received     it is here, whole
    encoded      its prompt is token ids: `tokens`
    queued       no worker has room: it waits in this gateway
    admitted     it may go to a worker
    submitted    it was sent to the worker `address`
    accepted     that worker has it in its queue
    refused      that worker did not take it: `detail`
    started      its prompt is being computed; `tokens` of it were cached
    prefilled    a part of its prompt is done: `tokens` from the start
    first_token  its first token came back from the worker, after a move that of the new one
    first_text   its first text was handed to the client
    worker_lost, decoder_lost  the instance was lost, or failed: `detail`; it goes on at another
    worker_left, decoder_left  the instance is going away in order; it goes on at another
    last_token   the worker has ended it, with `tokens` of output
    last_text    the text is complete
    ended        `detail` is why: stop, length, cancelled, or an error's code
    """

    kind: EventKind
    at: float
    choice: int = 0
    address: str = ""
    tokens: int = 0
    detail: str = ""


class RequestSummary(msgspec.Struct, frozen=True):
    """A line of the list of requests. There is no text of the request in it."""

    id: str  # this gateway's own name for it
    request_id: str  # the client's, from X-Request-Id, or made up; may repeat
    model: str
    kind: Literal["chat", "text", "tokens"]
    tenant: str
    choices: int
    received: float
    ended: float | None
    outcome: str  # "" while it runs; then as the event `ended` says
    phase: str  # the kind of its newest event
    worker: str  # where it is, or was last
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    resumes: int
    ttft: float | None  # seconds from its arrival to its first text


class RequestList(msgspec.Struct, frozen=True):
    """`GET /fleet/requests`: those in flight and the last that ended, newest first."""

    now: float
    time: float
    requests: list[RequestSummary]


class RequestJourney(msgspec.Struct, frozen=True):
    """`GET /fleet/requests/{id}`."""

    now: float
    time: float
    request: RequestSummary
    events: list[JourneyEvent]
    left_out: int  # events beyond those that are kept for a request
