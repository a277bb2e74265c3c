"""What a worker has to do: as it told last, and what this gateway has sent it since."""

from __future__ import annotations

from collections.abc import Iterable

from protos import worker_pb2

_MAX_COMPILING = 256  # requests that take no room while their grammar is compiled
_WAITING_SHARE = 8  # a few are this part of `max_running_requests`


class WorkerLoad:
    """The load of one worker. Handles are those of this gateway's requests there."""

    def __init__(self) -> None:
        self.reported = worker_pb2.Load()
        self._num_reported = 0  # running or waiting
        self._unreported: set[int] = set()  # handles that the reported load cannot know of
        self._compiling: set[int] = set()  # those that it has, but counts once they are accepted

    def report(self, load: worker_pb2.Load) -> None:
        self.reported = load
        self._num_reported = load.num_running + load.num_waiting

    def send(self, handle: int) -> None:
        """A request is on its way."""
        self._unreported.add(handle)

    def compile(self, handles: Iterable[int]) -> None:
        """Requests have come there, and wait for their grammar."""
        arrived = self._unreported.intersection(handles)
        self._unreported -= arrived
        self._compiling |= arrived

    def drop(self, handle: int) -> None:
        """A request is in the reported load from now on, or has ended."""
        self._unreported.discard(handle)
        self._compiling.discard(handle)

    def lose_session(self) -> None:
        self._unreported.clear()
        self._compiling.clear()

    def total(self, num_here: int) -> int:
        """Requests there: as reported, and those sent since; at least this gateway's own,
        `num_here`."""
        return max(self._num_reported + len(self._unreported) + len(self._compiling), num_here)

    def room(self, max_running: int, num_here: int) -> int:
        """Requests it can take before they would only wait there, `num_here` being this gateway's.

        Where requests wait already, pages are what it lacks, whatever `max_running` says. A few
        may always wait, so that the engine never lacks work for a round trip, and each gateway
        may always have so few there, so that none is kept out by another.

        Those that wait for a grammar keep nobody out of an engine that may be idle. But they
        are bounded: all that share one will be there at once.
        """
        if not max_running:
            return 1  # it does not say
        few = max(1, max_running // _WAITING_SHARE)
        load = self.reported
        free = 0 if load.num_waiting else max_running - load.num_running
        taken = load.num_waiting + len(self._unreported)
        taken += max(0, len(self._compiling) - _MAX_COMPILING)
        return max(free + few - taken, few - num_here)
