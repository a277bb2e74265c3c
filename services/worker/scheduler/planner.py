"""Which rows go into the next batch: who decodes, whose prompt goes on, who comes in, who must go.

It moves requests between the queue and the running ones, and launches nothing.
"""

from __future__ import annotations

from collections import deque

from services.worker.core import Admission
from services.worker.scheduler.batching import Rows
from services.worker.scheduler.policy import Policy, Quota
from services.worker.scheduler.request import Request, State
from services.worker.scheduler.residents import Residents
from services.worker.scheduler.stats import Counters
from services.worker.scheduler.waiting import WaitingQueue


class Planner:
    """Plans batch after batch over the running and the waiting requests."""

    def __init__(
        self, policy: Policy, residents: Residents, waiting: WaitingQueue, counters: Counters
    ) -> None:
        self.admissions: list[Admission] = []  # of the planned batch, until it is launched
        self.started: list[tuple[int, int]] = []  # (handle, cached tokens), for the first time
        self.stuck = False  # the last plan left somebody waiting
        self._next_prompt: Request | None = None  # the first to go on, when last it was looked at
        self._policy = policy
        self._residents = residents
        self._waiting = waiting
        self._counters = counters

    def plan(self, *, in_flight: bool) -> Rows | None:
        """The rows of the next batch: decode rows, then chunks, each in order of admission.

        Empty if there is nothing to do. None if pages ran out and a batch is in flight: what it
        writes to must not be given away under it.
        """
        decoding, prefilling = self._residents.split()
        quota = self._quota(len(decoding), prefilling)
        rows = Rows([], [], 0)
        if quota.decode:
            if not self._make_room(decoding, in_flight=in_flight):
                return None
            rows = _decode_rows(decoding)
        self._add_chunks(rows, prefilling, quota.prefill_tokens)
        self.stuck = len(self._waiting) > 0
        if not rows.requests:  # the prompts that wait do not fit now
            if not self._make_room(decoding, in_flight=in_flight):
                return None
            rows = _decode_rows(decoding)
        return rows

    def _quota(self, num_decode: int, prefilling: list[Request]) -> Quota:
        """What the policy allows beside so many rows, by the prompts there are and may come."""
        waiting = self._waiting.peek()
        to_come = cached = 0
        if waiting is not None:
            fitting, cached = self._residents.num_fitting(waiting)
            # Where no prompt is being computed one is tried, since `fitting` is an estimate.
            to_come = min(len(self._waiting), max(fitting, 0 if prefilling else 1))
        prompt, position = (
            (prefilling[0], prefilling[0].num_computed) if prefilling else (waiting, cached)
        )
        begins, self._next_prompt = prompt is not self._next_prompt, prompt
        return self._policy.quota(
            num_decode, len(prefilling) + to_come, position=position, begins=begins
        )

    def _make_room(self, decoding: list[Request], *, in_flight: bool) -> bool:
        """Makes room for one token of each request, by preemption if need be.

        False if that takes preemption and a batch is in flight.
        """
        for request in self._residents.without_room(decoding):
            while request.state is State.RUNNING and not self._residents.extend(request):
                if in_flight:
                    return False
                victim = self._residents.victim()
                self._residents.preempt(victim)
                self._waiting.push(victim)
                self._counters.num_preempted += 1
        return True

    def _add_chunks(self, rows: Rows, begun: list[Request], budget: int) -> None:
        """Adds chunks of prompts within the budget: of those begun, then of newly admitted ones."""
        # A preemption for decode rows may have taken one of those begun.
        queue = deque(request for request in begun if request.state is State.RUNNING)
        while budget > 0:
            request = queue.popleft() if queue else self._admit()
            if request is None:
                break
            length = min(budget, request.num_prefill - request.num_computed)
            rows.requests.append(request)
            rows.lengths.append(length)
            budget -= length

    def _admit(self) -> Request | None:
        """Admits the next waiting request, if there is room; nobody behind it is let past."""
        request = self._waiting.peek()
        if request is None or not self._residents.admit(request):
            return None
        self._waiting.remove(request)
        self.admissions.append(request.admission)
        if request.cached_tokens is None:
            request.cached_tokens = min(request.num_computed, len(request.prompt_ids) - 1)
            self._counters.num_prefix_query_tokens += len(request.prompt_ids)
            self._counters.num_prefix_hit_tokens += request.cached_tokens
            self.started.append((request.handle, request.cached_tokens))
        return request


def _decode_rows(decoding: list[Request]) -> Rows:
    """One token of each request that room was made for and that was not preempted for others."""
    running = [request for request in decoding if request.state is State.RUNNING]
    return Rows(running, [1] * len(running), len(running))
