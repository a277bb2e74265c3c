"""Which request goes to a worker next when the workers are full.

Knows the workers by their room alone. As long as some worker of the model has room and
nobody waits, a request passes without waiting. Otherwise it waits in the model's queue,
fair between tenants, and each frame that tells of room lets as many go:

    request --> [ queue of the model, round robin by tenant ] --> worker with room
                  full: 429                                        running + few waiting

So the workers' own queues stay short, and who is next is decided here, where the tenants
are known. A resume does not come here: its stream has begun.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from services.common.errors import Overloaded, ShoalError, Unavailable
from services.gateway.domain import GenerationRequest
from services.gateway.fair_queue import Entry, FairQueue

PATIENCE_SECONDS = 30.0  # of a queue all of whose workers are away
_RATE_SAMPLES = 64
_MAX_RETRY_SECONDS = 60.0

Turn = asyncio.Future[None]


class Worker(Protocol):
    """What admission may know of a worker."""

    @property
    def model(self) -> str: ...

    @property
    def room(self) -> int:
        """Requests it can take before they would only wait there; may be negative."""
        ...


class _ModelQueue:
    """The requests that wait for one model's workers."""

    def __init__(self, model: str, limit: int, weights: Mapping[str, float]) -> None:
        self.model = model
        self.turns: FairQueue[Turn] = FairQueue(limit, weights)
        self.num_called = 0  # who were let go and have not yet run since
        # When the last ones were let go, and what they cost: the queue's pace.
        self.called: deque[tuple[float, int]] = deque(maxlen=_RATE_SAMPLES)
        self.gives_up: asyncio.TimerHandle | None = None  # set while no worker is ready


class Admission:
    """The queues in front of the workers. Make it inside a running loop.

    `ready_workers` answers a model's ready workers. With `limit` 0 nobody ever waits. `clock`
    is in seconds, by default the loop's.
    """

    def __init__(
        self,
        ready_workers: Callable[[str], Iterable[Worker]],
        limit: int,
        weights: Mapping[str, float],
        observe_wait: Callable[[float], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._ready_workers = ready_workers
        self._limit = limit
        self._weights = weights
        self._observe_wait = observe_wait
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time if clock is None else clock
        self._queues: dict[str, _ModelQueue] = {}

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.turns) for queue in self._queues.values())

    async def enter(
        self,
        model: str,
        request: GenerationRequest,
        on_wait: Callable[[], None] = lambda: None,
    ) -> bool:
        """Returns when the request may go to a worker; whether it had to wait.

        `on_wait` is called before it waits.
        Whoever is let go must submit without giving up control in between, so that the
        next one sees the worker's room without it. Raises Overloaded if the queue is
        full, Unavailable if the model's workers stay away.
        """
        if not self._limit:
            return False
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = _ModelQueue(model, self._limit, self._weights)
        if not len(queue.turns) and self._has_room(model, queue):
            return False
        arrived = self._clock()
        turn: Turn = self._loop.create_future()
        entry, losers = queue.turns.push(
            turn, request.tenant, now=arrived, priority=request.priority, cost=request.n
        )
        for loser in losers:
            self._refuse(queue, loser)
        on_wait()
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(queue, entry)
            self._call_next(queue)  # the turn may have been called already
            raise
        except ShoalError:
            self._leave(queue, entry)
            raise
        self._leave(queue, entry)
        self._observe_wait(self._clock() - arrived)
        return True

    def on_load(self, worker: Worker) -> None:
        """A worker told its load: lets as many go as it has room for."""
        queue = self._queues.get(worker.model)
        if queue is None or not len(queue.turns):
            return
        room = worker.room - queue.num_called
        while room > 0 and (entry := queue.turns.pop()) is not None:
            room -= self._call(queue, entry)

    def on_change(self) -> None:
        """Workers came or went."""
        for queue in self._queues.values():
            absent = not list(self._ready_workers(queue.model))
            # Also of an empty queue: who comes later is not to end with the wait of others.
            self._watch_absence(queue, absent=absent and len(queue.turns) > 0)
            if len(queue.turns):
                self._call_next(queue)

    def retry_after(self, model: str, request: GenerationRequest) -> float:
        """Seconds until such a request could leave the queue, as it moves now."""
        return self._wait(self._queues.get(model), request.tenant, request.n)

    # -- inside

    def _wait(self, queue: _ModelQueue | None, tenant: str, cost: int) -> float:
        if queue is None or not queue.called:
            return 1.0
        elapsed = max(self._clock() - queue.called[0][0], 1e-3)
        let_go = sum(cost for _, cost in queue.called)
        seconds = queue.turns.ahead(tenant, cost) * elapsed / let_go
        return min(max(seconds, 1.0), _MAX_RETRY_SECONDS)

    def _has_room(self, model: str, queue: _ModelQueue) -> bool:
        """Also where no worker is ready: what then is not for a queue to decide."""
        workers = list(self._ready_workers(model))
        room = sum(max(worker.room, 0) for worker in workers)
        return not workers or room > queue.num_called

    def _call_next(self, queue: _ModelQueue) -> None:
        for worker in self._ready_workers(queue.model):
            self.on_load(worker)

    def _leave(self, queue: _ModelQueue, entry: Entry[Turn]) -> None:
        """Whoever waited runs on, however the wait ended."""
        queue.turns.remove(entry)
        turn = entry.item
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            queue.num_called -= entry.cost
        if not len(queue.turns):
            queue.called.clear()  # what is not saturated tells nothing of the capacity

    def _call(self, queue: _ModelQueue, entry: Entry[Turn]) -> int:
        """Lets one go; returns the room it takes."""
        if entry.item.done():  # it left in this moment
            return 0
        entry.item.set_result(None)
        queue.num_called += entry.cost
        queue.called.append((self._clock(), entry.cost))
        return entry.cost

    def _refuse(self, queue: _ModelQueue, entry: Entry[Turn]) -> None:
        if entry.item.done():
            return
        if entry.cost > self._limit:
            message = f"the workers are full, and {entry.cost} choices are more than may ever wait"
            entry.item.set_exception(Overloaded(f"{message} ({self._limit})"))
        else:
            choices = f", too many for {entry.cost} more choices" if entry.cost > 1 else ""
            entry.item.set_exception(
                Overloaded(
                    f"{len(queue.turns)} requests are waiting already{choices}; try again later",
                    retry_after=self._wait(queue, entry.tenant, entry.cost),
                )
            )

    def _watch_absence(self, queue: _ModelQueue, *, absent: bool) -> None:
        if absent and queue.gives_up is None:
            queue.gives_up = self._loop.call_later(PATIENCE_SECONDS, self._give_up, queue)
        elif not absent and queue.gives_up is not None:
            queue.gives_up.cancel()
            queue.gives_up = None

    def _give_up(self, queue: _ModelQueue) -> None:
        queue.gives_up = None
        while (entry := queue.turns.pop()) is not None:
            if not entry.item.done():
                entry.item.set_exception(Unavailable("no worker is ready", retry_after=1.0))
