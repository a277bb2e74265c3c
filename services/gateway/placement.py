"""Getting a request's choices to instances: at first, and after one was lost.

Every loss costs the choice one of `max_moves`, so that a request which kills its
workers ends; what an instance hands back in order costs nothing. A worker's refusal is
tried elsewhere within the gateway's retry budget. Knows choices only as things to submit
and to decode.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from protos import worker_pb2
from services.common.errors import (
    HandedBack,
    InternalError,
    Overloaded,
    PeerLost,
    ShoalError,
    Unavailable,
)
from services.gateway import to_proto
from services.gateway.admission import Admission
from services.gateway.choice import Choice
from services.gateway.domain import GenerationRequest
from services.gateway.metrics import Metrics
from services.gateway.peers.catalog import Model
from services.gateway.peers.fleet import PeerFleet
from services.gateway.peers.worker import WorkerPeer
from services.gateway.retry_budget import RetryBudget
from services.gateway.watch.journeys import Journey
from services.gateway.watch.recent import Recent
from services.gateway.watch.shapes import EventKind

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0  # for another instance, when the request has no deadline
_AFTER_DEADLINE_SECONDS = 1.0  # that a wait for another instance would go on
_MAX_PAUSE_SECONDS = 1.0  # before a resume knocks again at workers that refused it


_LOST: dict[str, EventKind] = {"worker": "worker_lost", "detokenizer": "decoder_lost"}
_LEFT: dict[str, EventKind] = {"worker": "worker_left", "detokenizer": "decoder_left"}


class Host(Protocol):
    """What placing needs of the gateway."""

    @property
    def fleet(self) -> PeerFleet: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def admission(self) -> Admission: ...
    @property
    def retries(self) -> RetryBudget: ...
    @property
    def recent(self) -> Recent: ...
    @property
    def max_moves(self) -> int:
        """Times a choice may move to another instance."""
        ...

    @property
    def hold_timeout(self) -> float:
        """Seconds a new request waits for an instance when there is none."""
        ...


class Placement:
    """One request's way to workers and detokenizers.

    `deadline` is in the running loop's time. Raises nothing but ShoalErrors.
    """

    def __init__(
        self,
        host: Host,
        request: GenerationRequest,
        model: Model,
        prompt_ids: Sequence[int],
        max_tokens: int,
        deadline: float | None,
        journey: Journey,
    ) -> None:
        self._host = host
        self._journey = journey
        self._request = request
        self._model = model
        self._prompt_ids = prompt_ids
        self._max_tokens = max_tokens
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        seed = request.sampling.seed
        self._seed = secrets.randbits(63) if seed is None else seed

    async def place_all(self, choices: Sequence[Choice]) -> None:
        """Opens every choice's text and hands it to a worker; returns when all are accepted.

        They start on one worker, which computes their prompt once.
        """
        hold = self._host.hold_timeout
        self._host.retries.deposit()
        taken_in = await self._host.admission.enter(
            self._model.name, self._request, partial(self._journey.mark, "queued")
        )
        if taken_in:
            self._journey.mark("admitted")
            hold = max(hold, self._patience())  # from here on it waits like a resume
        worker = await self._pick_worker(choices[0], set(), hold)
        decoder = await self._host.fleet.pick_decoder(self._model, hold)
        for choice in choices:
            choice.decode_with(decoder, self._request.text)
        if len(choices) == 1:
            return await self._place(choices[0], worker, resuming=taken_in)
        tasks = [
            asyncio.create_task(self._place(choice, worker, resuming=taken_in))
            for choice in choices
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def starts_sooner_elsewhere(self, choice: Choice) -> bool:
        """Some ready worker that could take the choice has nobody waiting."""
        return self._host.fleet.has_idle_queue(self._model, choice.fingerprint)

    def has_another_decoder(self) -> bool:
        """Some detokenizer that is not draining is there."""
        return self._host.fleet.find_decoder(self._model) is not None

    async def resume(self, choice: Choice, *, error: ShoalError) -> None:
        """Continues a choice, which its worker gave up with `error`, on another."""
        if isinstance(error, InternalError):  # before the first token: a retry, no promise
            self._spend_retry(error)
        self._move(choice, "worker", error)
        await self._place(choice, None, resuming=True)

    async def redecode(self, choice: Choice, *, handed_back: bool = False) -> None:
        """Continues the text of a choice, whose detokenizer was lost or drains, on another."""
        error: ShoalError = PeerLost("its detokenizer was lost")
        if handed_back:
            error = HandedBack("its detokenizer is going away")
        while True:
            self._move(choice, "detokenizer", error)
            decoder = await self._host.fleet.pick_decoder(self._model, self._patience())
            try:
                return choice.decode_with(decoder, self._request.text)
            except PeerLost as lost:
                error = lost

    async def _place(self, choice: Choice, worker: WorkerPeer | None, *, resuming: bool) -> None:
        """Gives a choice to a worker, to `worker` first; returns when one has accepted it.

        One that is overloaded is replaced once; one that is lost, or will not take it
        now, costs the choice a move. A resume does not take overload for an answer, even
        if no id has come yet: the client may have been told that it is accepted. Nor does
        a request that has waited its turn (`resuming` too), or was lost on its way. Where
        nothing had been promised, going to another worker costs the retry budget, and the
        wait for one is no longer than any new request's.
        """
        refused: set[str] = set()
        overloaded = False
        promised = resuming
        give_up_at = self._loop.time() + self._patience()
        while True:
            if worker is None:
                patience = self._patience() if promised else self._host.hold_timeout
                worker = await self._pick_worker(choice, refused, patience)
            if choice.finish_reason is not None:
                return None  # a stop string was found in what it had, while it waited
            try:
                return await choice.submit_to(worker, self._submit_message(choice))
            except (PeerLost, HandedBack) as error:
                promised = True  # it may have been accepted
                self._move(choice, "worker", error)
            except Overloaded as error:
                if not overloaded and self._has_other(choice, refused, worker):
                    overloaded = True
                    self._refused(choice, refused, worker, error, promised=promised)
                elif promised and self._loop.time() < give_up_at:
                    await self._pause(error)
                    overloaded = False
                    refused.clear()
                else:
                    raise
            except (Unavailable, InternalError) as error:
                mends = promised and isinstance(error, Unavailable)
                if not mends and not self._has_other(choice, refused, worker):
                    raise
                self._refused(choice, refused, worker, error, promised=promised)
                self._spend_move(choice, "worker", error)
                if worker.address not in refused:  # there is no other
                    await self._pause(error)
            worker = None

    async def _pause(self, error: ShoalError) -> None:
        """Waits as long as a worker that refused asks for, within reason."""
        await asyncio.sleep(min(error.retry_after or 1.0, _MAX_PAUSE_SECONDS))

    def _refused(
        self,
        choice: Choice,
        refused: set[str],
        worker: WorkerPeer,
        error: ShoalError,
        *,
        promised: bool,
    ) -> None:
        """Notes a refusal, so that another worker is asked if there is one."""
        self._journey.mark("refused", choice.index, address=worker.address, detail=error.message)
        if not promised:
            self._spend_retry(error)
        if self._has_other(choice, refused, worker):
            refused.add(worker.address)

    def _has_other(self, choice: Choice, refused: set[str], worker: WorkerPeer) -> bool:
        """A worker is ready that could take the choice and has not refused it."""
        return self._host.fleet.has_worker(
            self._model, choice.fingerprint, avoid={*refused, worker.address}
        )

    async def _pick_worker(self, choice: Choice, avoid: set[str], patience: float) -> WorkerPeer:
        return await self._host.fleet.pick_worker(
            self._model,
            self._prompt_ids,
            self._request.cache_salt,
            fingerprint=choice.fingerprint,
            avoid=avoid,
            patience=patience,
        )

    def _submit_message(self, choice: Choice) -> worker_pb2.Submit:
        left = None
        if self._deadline is not None:
            left = max(1, round((self._deadline - self._loop.time()) * 1000))
        return to_proto.submit(
            self._request,
            self._prompt_ids,
            index=choice.index,
            seed=self._seed,
            max_tokens=self._max_tokens,
            resume_ids=choice.ids,
            deadline_ms=left,
        )

    def _spend_retry(self, error: ShoalError) -> None:
        """Raises the error, for the client, if the gateway has no retry left."""
        made = self._host.retries.withdraw(self._loop.time())
        self._host.metrics.count_retry(made=made)
        if not made:
            raise error

    def _move(self, choice: Choice, kind: str, error: ShoalError) -> None:
        """Spends a move on an instance that was lost or hands back, and notes it."""
        self._spend_move(choice, kind, error)
        kinds = _LEFT if isinstance(error, HandedBack) else _LOST
        self._host.recent.count_resume(self._loop.time())
        self._journey.mark(kinds[kind], choice.index, detail=error.message)

    def _spend_move(self, choice: Choice, kind: str, error: ShoalError) -> None:
        """Raises an error for the client if the choice has no move of this kind left."""
        log.info(
            "moving a choice",
            extra={"request_id": self._request.request_id, "peer": kind, "reason": error.reason},
        )
        if isinstance(error, HandedBack):
            self._host.metrics.count_handoff(kind)
            return
        if choice.num_moves[kind] >= self._host.max_moves:
            raise PeerLost(
                f"the {kind} that served this request was lost, and it has moved"
                f" {choice.num_moves[kind]} times already",
                retry_after=1.0,
            )
        choice.num_moves[kind] += 1
        self._host.metrics.count_move(kind)

    def _patience(self) -> float:
        if self._deadline is None:
            return PATIENCE_SECONDS
        # The deadline itself is to end the wait, since only that is told as one; uvloop rounds to
        # milliseconds, and this wait could end first.
        return max(0.0, self._deadline - self._loop.time()) + _AFTER_DEADLINE_SECONDS
