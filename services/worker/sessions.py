"""Sessions, and the map from the engine's handles to theirs.

Clients name their requests with handles of their own; the engine gets handles that
are unique in it, and its frames are cut up and renamed for the sessions here. When a
handle is claimed, given up or freed is the agent's decision.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protos import worker_pb2
from services.common.errors import ShoalError
from services.common.rpc import FRAME_SECONDS, Outbox
from services.common.wire import error_to_proto

MAX_HANDLE = (1 << 32) - 1
_MAX_UNSENT_STEPS = 1024


class Session:
    """One client: what it calls its requests, and what it will be sent next."""

    def __init__(self) -> None:
        self.outbox = Outbox(
            worker_pb2.WorkerSessionResponse,
            busy=lambda: bool(self.names),
            interval=FRAME_SECONDS,
        )
        # Done when the worker ends the session: with a result to end it in order,
        # with an exception to abort it.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.engine_handles: dict[int, int] = {}  # the client's handle -> the engine's
        self.names: dict[int, int] = {}  # the engine's handle -> the client's

    def add(self, frame: worker_pb2.StepFrame) -> None:
        """Merges a frame, under the client's names, into what is sent next."""
        step = self.outbox.pending.step
        keeps_digest = step.load.has_digest and not frame.load.has_digest
        digest = step.load.prefix_digest[:]
        # Lists grow; the load is replaced, zeros included, which a merge would skip. Only
        # its digest stays until there is a newer one: most frames come without.
        step.ClearField("load")
        step.MergeFrom(frame)
        if keeps_digest:
            step.load.has_digest = True
            step.load.prefix_digest.extend(digest)
        self.outbox.notify()

    def add_steps(self, steps: Sequence[worker_pb2.EngineStep]) -> None:
        """Steps for one who watches; left out while too many wait to be sent."""
        if len(self.outbox.pending.steps) < _MAX_UNSENT_STEPS:
            self.outbox.pending.steps.extend(steps)
            self.outbox.notify()

    def reject(self, handle: int, error: ShoalError) -> None:
        self.outbox.pending.step.rejected.add(handle=handle, error=error_to_proto(error))
        self.outbox.notify()

    def end(self, error: ShoalError | None = None) -> None:
        """Asks the session's stream to end; the first reason stands."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # a stream that ended by itself reads it no more


@dataclass(slots=True)
class _Rows:
    """One session's rows of a frame."""

    handles: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class HandleMap:
    """Whose each live request of the engine is, and which are given up."""

    def __init__(self) -> None:
        # The engine's handle -> whose it is; None once it was handed back.
        self._owners: dict[int, Session | None] = {}
        self._aborted: set[int] = set()  # engine handles whose rows nobody waits for
        self._last_handle = 0
        self._last_digest_empty = True

    def __len__(self) -> int:
        return len(self._owners)

    def claim(self, session: Session, name: int) -> int:
        """A new engine handle for what the session calls `name`."""
        handle = self._new_handle()
        session.engine_handles[name] = handle
        session.names[handle] = name
        self._owners[handle] = session
        return handle

    def give_up(self, handle: int) -> bool:
        """Drops the handle's rows from now on; False if they were dropped already."""
        if handle in self._aborted:
            return False
        self._aborted.add(handle)
        return True

    def hand_back(self, handle: int) -> bool:
        """Drops the handle's rows from now on and frees its name; False if they were dropped
        already. The session is told, after what it has been told so far."""
        session = self._owners[handle]
        if session is None or not self.give_up(handle):
            return False
        name = session.names.pop(handle)
        del session.engine_handles[name]
        self._owners[handle] = None
        session.outbox.pending.step.moved.append(name)
        session.outbox.notify()
        return True

    def is_given_up(self, handle: int) -> bool:
        return handle in self._aborted

    def release(self, handle: int) -> None:
        """Frees a handle that the engine has ended, on both sides."""
        session = self._owners.pop(handle)
        if session is not None:
            del session.engine_handles[session.names.pop(handle)]
        self._aborted.discard(handle)

    def deliver(self, frame: worker_pb2.StepFrame, sessions: Iterable[Session]) -> None:
        """Adds to each open session its part of a frame, under its own names.

        With one session and nothing given up the frame is renamed in place.
        """
        sessions = list(sessions)
        tells_digest = self._tells_digest(frame.load)
        if len(sessions) == 1 and not self._aborted:
            if tells_digest or _has_news(frame):
                _rename(frame, sessions[0].names)
                sessions[0].add(frame)
            return  # without news, the session's heartbeat is enough
        for session, part in self._split(frame, sessions).items():
            if not tells_digest and not part.ByteSize():
                continue
            part.epoch, part.step = frame.epoch, frame.step
            part.load.CopyFrom(frame.load)
            session.add(part)

    def _split(
        self, frame: worker_pb2.StepFrame, sessions: list[Session]
    ) -> dict[Session, worker_pb2.StepFrame]:
        """Each open session's part of a frame, without the rows of aborted requests."""
        parts = {session: worker_pb2.StepFrame() for session in sessions}
        for session, rows in self._split_rows(frame).items():
            parts[session].handles.extend(rows.handles)
            parts[session].counts.extend(rows.counts)
            parts[session].token_ids.extend(rows.token_ids)
        for group in ("compiling", "accepted"):
            for handle in getattr(frame, group):
                owner = self._owners[handle]
                if owner is not None and owner in parts:
                    getattr(parts[owner], group).append(owner.names[handle])
        for group in ("rejected", "started", "prefilled", "finished", "logprobs"):
            for item in getattr(frame, group):
                owner = self._owners[item.handle]
                if owner is None or owner not in parts:
                    continue
                if not (group == "logprobs" and item.handle in self._aborted):
                    copy = getattr(parts[owner], group).add()
                    copy.CopyFrom(item)
                    copy.handle = owner.names[item.handle]
        return parts

    def _tells_digest(self, load: worker_pb2.Load) -> bool:
        """Whether a load's digest must reach every session now.

        An empty one after another is no news: an idle worker's heartbeats may stay rare.
        """
        if not load.has_digest:
            return False
        was_empty, self._last_digest_empty = self._last_digest_empty, not load.prefix_digest
        return not (was_empty and self._last_digest_empty)

    def _split_rows(self, frame: worker_pb2.StepFrame) -> dict[Session, _Rows]:
        """The rows by session, in plain lists: appending to a message's list is slow."""
        parts: defaultdict[Session, _Rows] = defaultdict(_Rows)
        owners, aborted = self._owners, self._aborted
        token_ids = frame.token_ids[:]
        start = 0
        for handle, count in zip(frame.handles[:], frame.counts[:], strict=True):
            if handle not in aborted and (session := owners[handle]) is not None:
                rows = parts[session]
                rows.handles.append(session.names[handle])
                rows.counts.append(count)
                rows.token_ids += token_ids[start : start + count]
            start += count
        return parts

    def _new_handle(self) -> int:
        while True:
            self._last_handle = self._last_handle % MAX_HANDLE + 1
            if self._last_handle not in self._owners:
                return self._last_handle


def _has_news(frame: worker_pb2.StepFrame) -> bool:
    """A frame that a client waits for; most are."""
    return bool(
        frame.handles
        or frame.compiling
        or frame.accepted
        or frame.rejected
        or frame.started
        or frame.prefilled
        or frame.finished
        or frame.logprobs
    )


def _rename(frame: worker_pb2.StepFrame, names: Mapping[int, int]) -> None:
    """Puts the client's handles in place of the engine's, in every part of a frame."""
    for handles in (frame.handles, frame.compiling, frame.accepted):
        if handles:
            handles[:] = [names[handle] for handle in handles[:]]  # a copied list iterates faster
    groups = (frame.rejected, frame.started, frame.prefilled, frame.finished, frame.logprobs)
    for group in groups:
        for item in group:
            item.handle = names[item.handle]
