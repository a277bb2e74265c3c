"""Commands that rank 0 has not been sent yet.

Submissions may be megabytes each, and a rank reads what its socket holds once a step. So
aborts overtake submissions, and a submission that is still here is taken back instead of
being sent and aborted. It knows neither sockets nor sessions.
"""

from __future__ import annotations

from protos import engine_pb2, worker_pb2

PIECE_BYTES = 256 << 10  # of submissions in a command, which holds one at least


class CommandQueue:
    """Submissions in order, and what goes before them."""

    def __init__(self) -> None:
        self._submits: dict[int, worker_pb2.Submit] = {}  # by handle, oldest first
        self._aborts: list[int] = []
        self._num_flushes = 0
        self._settings = engine_pb2.EngineCommand()  # of which the last word counts

    def add(self, command: engine_pb2.EngineCommand) -> None:
        """Queues a command. Its aborts are of handles that `withdraw` did not find here."""
        self._submits.update((submit.handle, submit) for submit in command.submits)
        self._aborts += command.aborts
        self._num_flushes += command.flush_cache
        if command.HasField("watch_steps"):
            self._settings.watch_steps = command.watch_steps
        if command.log_level:
            self._settings.log_level = command.log_level

    def withdraw(self, handle: int) -> bool:
        """Takes a submission back; False if it is not here (any more)."""
        return self._submits.pop(handle, None) is not None

    def next(self) -> engine_pb2.EngineCommand | None:
        """What to send next, taken out: every abort, and a piece of the submissions."""
        has_settings = self._settings.ByteSize() > 0
        if not (self._submits or self._aborts or self._num_flushes or has_settings):
            return None
        command, self._settings = self._settings, engine_pb2.EngineCommand()
        command.aborts.extend(self._aborts)
        self._aborts = []
        if self._num_flushes:  # each is a command, which the rank counts
            command.flush_cache = True
            self._num_flushes -= 1
        size = 0
        while self._submits and size < PIECE_BYTES:
            submit = self._submits.pop(next(iter(self._submits)))
            size += submit.ByteSize()
            command.submits.append(submit)
        return command
