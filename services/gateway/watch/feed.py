"""What those who watch a fleet are sent: snapshots, and the engines' steps as they come.

Nothing is taken, asked for or sent while nobody watches. With a watcher, workers are asked
to tell their steps, and a snapshot is taken every second and after every change of a peer.
A watcher that reads slowly gets the newest snapshot, and misses steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from protos import worker_pb2
from services.gateway.peers.worker import WorkerPeer
from services.gateway.sse import named_event
from services.gateway.watch.shapes import Step, WorkerSteps
from services.gateway.watch.snapshot import Seen, snapshot

log = logging.getLogger(__name__)

MAX_WATCHED = 64  # workers whose steps are shown; those with the first addresses
_MAX_UNREAD_STEPS = 4096  # of one watcher
_INTERVAL_SECONDS = 1.0
_SETTLE_SECONDS = 0.1  # for the changes that come with a change


class Watcher:
    """One who watches: what it has not been sent yet."""

    def __init__(self) -> None:
        self.closed = False
        self._snapshot: bytes | None = None
        self._steps: dict[str, list[Step]] = {}
        self._num_steps = 0
        self._news = asyncio.Event()

    async def events(self) -> bytes:
        """Waits for news; returns them as whole events, empty once there will be none."""
        await self._news.wait()
        self._news.clear()
        if self.closed:
            return b""
        events = [] if self._snapshot is None else [self._snapshot]
        for address, steps in self._steps.items():
            events.append(named_event("steps", msgspec.json.encode(WorkerSteps(address, steps))))
        self._snapshot, self._steps, self._num_steps = None, {}, 0
        return b"".join(events)

    def show(self, event: bytes) -> None:
        """A new snapshot, in place of one that was not sent."""
        self._snapshot = event
        self._news.set()

    def add(self, address: str, steps: Sequence[Step]) -> None:
        """Steps of a worker; left out where too many were not sent."""
        if self._num_steps < _MAX_UNREAD_STEPS:
            self._steps.setdefault(address, []).extend(steps)
            self._num_steps += len(steps)
            self._news.set()

    def close(self) -> None:
        """There will be no more news."""
        self.closed = True
        self._news.set()


class Feed:
    """The watchers of one gateway, and the one task that serves them all."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._watchers: set[Watcher] = set()
        self._publisher: asyncio.Task[None] | None = None
        self._closed = False
        seen.fleet.on_steps = self._on_steps

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A watcher for as long as the body runs."""
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            if self._closed:
                watcher.close()
            elif self._publisher is None:
                self._publisher = asyncio.create_task(self._publish())
                self._publisher.add_done_callback(self._on_published)
            else:  # the others have theirs
                watcher.show(self._event())
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._stop()

    def close(self) -> None:
        """Ends every watcher's stream, and those of whoever comes later."""
        self._closed = True
        self._stop()
        for watcher in self._watchers:
            watcher.close()

    def _on_published(self, task: asyncio.Task[None]) -> None:
        """A fault of ours ends the streams, rather than leaving them silent."""
        if task is self._publisher:
            self._publisher = None
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("fault while showing the fleet", exc_info=fault)
            for watcher in self._watchers:
                watcher.close()

    def _stop(self) -> None:
        if self._publisher is not None:
            self._publisher.cancel()
            self._publisher = None
        for worker in self._seen.fleet.workers:
            worker.watch_steps(on=False)

    async def _publish(self) -> None:
        fleet = self._seen.fleet
        while True:
            for position, worker in enumerate(sorted(fleet.workers, key=lambda w: w.address)):
                worker.watch_steps(on=position < MAX_WATCHED)
            event = self._event()
            for watcher in self._watchers:
                watcher.show(event)
            try:
                async with asyncio.timeout(_INTERVAL_SECONDS):
                    await fleet.change(fleet.num_changes)
                await asyncio.sleep(_SETTLE_SECONDS)
            except TimeoutError:
                pass

    def _event(self) -> bytes:
        return named_event("fleet", msgspec.json.encode(snapshot(self._seen)))

    def _on_steps(self, worker: WorkerPeer, steps: Sequence[worker_pb2.EngineStep]) -> None:
        now = time.monotonic()
        told = [
            Step(
                number=step.number,
                began=round(now - step.began_us_ago / 1e6, 6),
                duration=step.duration_us / 1e6,
                bubble=step.bubble_us / 1e6,
                prefill_tokens=step.num_prefill_tokens,
                decode_tokens=step.num_decode_tokens,
            )
            for step in steps
        ]
        for watcher in self._watchers:
            watcher.add(worker.address, told)
