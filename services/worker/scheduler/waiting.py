"""The requests that wait for pages: who is next, and who has waited too long.

Waiting is worth priority: a request of priority p counts as if it had come p * AGEING
seconds earlier than it did. That order never changes while requests wait, so a heap keeps
it, and one request can be overtaken only by what comes within a bounded time after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from services.worker.scheduler.request import Request, State

AGEING = 5.0  # seconds of waiting that are worth one step of priority
_MAX_PRIORITY = 128  # beyond it priorities are equal, or their lead would have no end


class WaitingQueue:
    """A priority queue with ageing and deadlines. Entries of requests that left are void.

    `least_time` says how many seconds a request needs at the very least once it is next.
    """

    def __init__(self, least_time: Callable[[Request], float]) -> None:
        self._least_time = least_time
        # Ordered by (key, new after resumed, arrival); the count of pushes settles ties.
        self._heap: list[tuple[float, bool, int, int, Request]] = []
        # By the latest start that could still meet the deadline, as estimated when entered.
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_pushes = 0
        self._waiting: dict[int, Request] = {}  # by order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Adds a request. One that another worker has begun goes before the others of its
        priority: it counts as come with the first of them."""
        if request.resumed:
            equals = (r for r in self._waiting.values() if r.priority == request.priority)
            request.queue_time = min((r.queue_time for r in equals), default=request.queue_time)
        priority = max(-_MAX_PRIORITY, min(request.priority, _MAX_PRIORITY))
        key = request.queue_time - priority * AGEING
        self._waiting[request.sequence] = request
        self._num_pushes += 1
        entry = (key, not request.resumed, request.sequence, self._num_pushes, request)
        heapq.heappush(self._heap, entry)
        self._watch_deadline(request)

    def peek(self) -> Request | None:
        """The next request, left where it is."""
        while self._heap and not self._waits(self._heap[0][-1]):
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def remove(self, request: Request) -> None:
        """Takes a request out: it runs now, or it ended."""
        del self._waiting[request.sequence]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if self._waits(entry[-1])]
            heapq.heapify(self._heap)
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._deadlines = [entry for entry in self._deadlines if self._waits(entry[2])]
            heapq.heapify(self._deadlines)

    def pop_late(self, now: float) -> list[Request]:
        """Takes out the requests whose deadline cannot be met any more, were they next.

        The estimate is made anew when its hour comes: the engine may have become quicker, or
        the prompt's prefix cached.
        """
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if self._waits(request) and self._watch_deadline(request) <= now:
                self.remove(request)
                late.append(request)
        return late

    def _watch_deadline(self, request: Request) -> float:
        """Enters a request's latest start, if it has a deadline, and answers it."""
        if request.deadline is None:
            return float("inf")
        latest_start = request.deadline - self._least_time(request)
        self._num_pushes += 1
        heapq.heappush(self._deadlines, (latest_start, self._num_pushes, request))
        return latest_start

    def _waits(self, request: Request) -> bool:
        return request.state is State.WAITING and request.sequence in self._waiting
