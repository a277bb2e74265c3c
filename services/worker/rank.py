"""`python -m services.worker.rank`: one rank of the engine, as the agent starts it.

Rank 0 owns the scheduler and the socket to the agent; other ranks follow it. No gRPC and
no event loop run here: the loop below has the interpreter to itself.

    while the engine has work: read what has come, make a step, send what the socket takes
    while it has none:         wait on the socket, with a sign of life every two seconds
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import NoReturn

from protos import common_pb2, engine_pb2, worker_pb2
from services.common import logs
from services.common.errors import StartupError
from services.common.process import die_with_parent
from services.worker.config import WorkerConfig
from services.worker.core import Engine
from services.worker.engine.build import build
from services.worker.framing import CONFIG_ENV, SOCKET_ENV, FrameSocket
from services.worker.grammar.cache import GrammarCache
from services.worker.grammar.gate import GrammarGate
from services.worker.last_words import leave_reason
from services.worker.rank_messages import (
    StepMerger,
    commands_from_proto,
    info_to_proto,
    load_to_proto,
    stats_to_proto,
)
from services.worker.scheduler.scheduler import Scheduler
from services.worker.step_log import StepLog

_SIGN_OF_LIFE = 2.0  # seconds; the digest goes out no more often either
_FAREWELL = 5.0  # seconds that the agent gets to read the last words

log = logging.getLogger(__name__)


class RankLoop:
    """Rank 0's loop: commands from the agent, steps of the scheduler, events to the agent."""

    def __init__(
        self,
        link: FrameSocket,
        scheduler: Scheduler,
        gate: GrammarGate,
        epoch: int,
        check_engine: Callable[[], None],
    ) -> None:
        self._link = link
        self._check_engine = check_engine
        self._scheduler = scheduler
        self._gate = gate
        self._epoch = epoch
        self._merger = StepMerger()
        self._steps = StepLog()
        self._has_news = False
        self._last_event = 0.0
        self._last_digest = float("-inf")
        self._checked = True  # nothing has happened since the books were checked

    def run(self) -> None:
        """Serves until the agent is gone (EOFError), or an exception of the engine."""
        while True:
            if self._scheduler.idle:
                self._rest()
            messages = list(self._link.receive(engine_pb2.EngineCommand))
            self._steps.obey(messages)
            for message in messages:
                if message.log_level:
                    logs.change_level(message.log_level)
            received = commands_from_proto(messages)
            commands, refused = self._gate.take(received, time.monotonic())
            held = [one.handle for one in received.submits if self._gate.holds(one.handle)]
            if held:
                self._merger.add_compiling(held)
                self._has_news = True
            made = self._scheduler.step(commands, time.monotonic())
            self._steps.add(made.steps, time.monotonic())
            for output in (refused, made):
                if output:
                    self._merger.add(output)
                    self._has_news = True
                    self._checked = False
            self._send()

    def _rest(self) -> None:
        """Waits for a command, a grammar or the next sign of life; checks the engine, and once
        the books."""
        started = time.monotonic()
        # Until the agent reads again, which wakes this too, no step can be told.
        report = None if self._link.congested else self._steps.due_in(started)
        self._link.wait(_SIGN_OF_LIFE if report is None else report, self._gate.fd)
        self._check_engine()
        if not self._checked and time.monotonic() - started >= _SIGN_OF_LIFE:
            self._scheduler.check_integrity()
            self._checked = True

    def _send(self) -> None:
        """Sends the merged news if there are any, or a sign of life if one is due.

        While the agent has not read the last event, news gather instead: the engine never
        waits for it.
        """
        self._link.flush()
        now = time.monotonic()
        due = self._steps.due_in(now) == 0 or now - self._last_event >= _SIGN_OF_LIFE
        if self._link.congested or not (self._has_news or due):
            return
        event = self._merger.take()
        event.step.epoch = self._epoch
        event.step.step = self._scheduler.counters.num_steps
        event.step.load.CopyFrom(load_to_proto(self._scheduler))
        event.stats.CopyFrom(stats_to_proto(self._scheduler, self._gate.stats))
        if self._steps.due_in(now) == 0:
            self._steps.report_to(event, now)
        if now - self._last_digest >= _SIGN_OF_LIFE:
            event.step.load.prefix_digest.extend(self._scheduler.digest())
            event.step.load.has_digest = True
            self._last_digest = now
        self._link.send(event)
        self._has_news = False
        self._last_event = now


def serve(config: WorkerConfig, link: FrameSocket) -> None:
    """Builds the engine, tells the agent so, and runs the loop.

    Raises EOFError when the agent is gone, StartupError if the model cannot be served.
    """

    def progress(phase: str, done: int, total: int) -> None:
        report = worker_pb2.LoadProgress(phase=phase, done=done, total=total)
        link.send(engine_pb2.EngineEvent(progress=report))

    with ExitStack() as resources:
        grammars = GrammarCache(
            config.model, size=config.grammar_cache, seconds=config.grammar_timeout
        )
        resources.callback(grammars.close)
        engine = build(config, progress)
        resources.callback(engine.close)
        scheduler = make_scheduler(engine, config)
        resources.callback(scheduler.abandon)
        epoch = secrets.randbits(63)
        ready = info_to_proto(scheduler.info, config, epoch)
        link.send(engine_pb2.EngineEvent(ready=ready))
        gate = GrammarGate(grammars, engine.info)
        RankLoop(link, scheduler, gate, epoch, engine.check).run()


def make_scheduler(engine: Engine, config: WorkerConfig) -> Scheduler:
    """The scheduler that a configuration asks for."""
    return Scheduler(
        engine,
        schedule=config.schedule,
        cache=config.cache,
        max_running_requests=config.max_running_requests,
        max_queue=config.max_queue,
        overlap=not config.disable_overlap,
    )


def run_rank_zero(config: WorkerConfig, socket_path: str) -> int:
    """Serves the agent that listens at a unix socket; returns the exit status."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(socket_path)
    link = FrameSocket(sock)
    try:
        serve(config, link)
    except EOFError:
        log.info("the agent is gone")
        return 0
    except StartupError as error:
        _say_last(link, str(error))
    except Exception as error:  # whatever the engine raised: its state cannot be trusted now
        log.exception("the engine failed")
        _say_last(link, f"the engine failed: {type(error).__name__}: {error}")
    return 1


def run_follower(config: WorkerConfig) -> int:
    """Computes what rank 0 decides until it is gone; returns the exit status."""
    from services.worker.engine import follower  # torch, which rank 0 may not need

    try:
        follower.run(config)
    except StartupError as error:  # rank 0 may not meet it, and all others may
        leave_reason(os.environ[SOCKET_ENV], str(error))
        return 1
    return 0


def _say_last(link: FrameSocket, message: str) -> None:
    """Tells the agent why this rank ends, as far as it still listens."""
    error = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message=message)
    give_up = time.monotonic() + _FAREWELL
    try:
        link.send(engine_pb2.EngineEvent(fatal=error))
        while link.congested and time.monotonic() < give_up:
            link.wait_writable(give_up - time.monotonic())
            link.flush()
    except EOFError:
        log.warning("the agent is gone and did not hear why")


def _exit_on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def main() -> int:
    """Runs the rank that the environment describes; returns the exit status."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when a rank ends
    config = WorkerConfig(**json.loads(os.environ[CONFIG_ENV]))
    rank = int(os.environ.get("RANK", "0"))
    logs.setup(f"rank{rank}", level=config.log_level, format=config.log_format)
    return run_follower(config) if rank > 0 else run_rank_zero(config, os.environ[SOCKET_ENV])


if __name__ == "__main__":
    sys.exit(main())
