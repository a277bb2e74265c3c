"""The worker's end of `services.worker.grammar.trial`: starts it, asks it, replaces it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading

from services.common.errors import InvalidRequest
from services.common.process import child_environment
from services.worker.core import Grammar
from services.worker.grammar.compiler import invalid

log = logging.getLogger(__name__)


class TrialProcess:
    """A child that compiles grammars first. `source` is for one thread at a time, `kill` for any.

    It is started by the first grammar, and again after one that it did not survive.
    """

    def __init__(self, model: str, seconds: float) -> None:
        self._model = model
        self._seconds = seconds
        self._lock = threading.Lock()  # of what `source` and `kill` share
        self._child: subprocess.Popen[str] | None = None
        self._closed = False

    def source(self, grammar: Grammar) -> str:
        """What `compiler.compile_source` compiles in bounded time.

        Raises InvalidRequest if the grammar cannot be used, or takes too long.
        """
        child = self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps([grammar.kind, grammar.value]) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise invalid(self._end(child))
        source, reason = json.loads(answer)
        if reason is not None:
            raise InvalidRequest(reason, param="grammar")  # worded over there
        assert isinstance(source, str)
        return source

    def kill(self) -> None:
        """Ends the child, and with it a `source` that waits for it; there will be no other."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()

    def reap(self) -> None:
        """Leaves nothing of a killed child, once no `source` runs any more."""
        if self._child is not None:
            self._child.communicate()
            self._child = None

    def _start(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._closed:
                raise invalid("the worker is shutting down")
            if self._child is None:
                command = [sys.executable, "-m", "services.worker.grammar.trial"]
                self._child = subprocess.Popen(
                    [*command, self._model, str(self._seconds)],
                    env=child_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            return self._child

    def _end(self, child: subprocess.Popen[str]) -> str:
        """Takes leave of a child that a grammar has ended; says why."""
        child.communicate()
        with self._lock:
            self._child = None
        log.warning("a grammar ended its trial process, with status %d", child.returncode)
        if child.returncode == -signal.SIGPROF:
            return f"it takes more than {self._seconds:g} s to compile"
        return "it is too complex to compile"
