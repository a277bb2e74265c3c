"""Compiled grammars: each is compiled once, on a thread of its own, and kept while in use.

The thread first lets a child process try a grammar (`trial_process`), so that none can
take more than its time or end the worker, and then compiles it here. Whoever waits for a
grammar holds a future; neither the scheduler nor the engine ever waits.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLTokenizer

from services.common.errors import Overloaded, Unavailable
from services.worker.core import Grammar
from services.worker.grammar.compiler import LibraryMatcher, compile_source
from services.worker.grammar.trial_process import TrialProcess
from services.worker.grammar.vocabulary import load_vocabulary
from services.worker.scheduler.stats import GrammarStats

_MAX_BACKLOG = 256  # grammars that wait to be compiled
_RETRY_SECONDS = 1.0


class GrammarCache:
    """Futures of compiled grammars, least recently used first. Called from one thread."""

    def __init__(
        self,
        model: str,
        *,
        size: int,
        seconds: float,
        load: Callable[[str], LLTokenizer] = load_vocabulary,
    ) -> None:
        self.stats = GrammarStats()
        self._size = size
        self._entries: OrderedDict[Grammar, Future[LibraryMatcher]] = OrderedDict()
        self._trial = TrialProcess(model, seconds)
        self._thread = ThreadPoolExecutor(1, "grammar-compiler")
        self._vocabulary = self._thread.submit(load, model)  # meanwhile the weights are loaded

    def get(self, grammar: Grammar) -> Future[LibraryMatcher]:
        """The compiled grammar, now or later; the future may hold a ShoalError.

        Raises Overloaded if too many others wait to be compiled.
        """
        future = self._entries.get(grammar)
        if future is not None and not _spent(future):
            self._entries.move_to_end(grammar)
            self.stats.num_hits += 1
            return future
        if sum(not other.done() for other in self._entries.values()) >= _MAX_BACKLOG:
            raise Overloaded("Too many grammars wait to be compiled.", retry_after=_RETRY_SECONDS)
        future = self._thread.submit(self._compile, grammar)
        self._entries[grammar] = future
        self._entries.move_to_end(grammar)
        self._evict()
        return future

    def forget(self, grammar: Grammar) -> None:
        """Nobody waits for a grammar any more: it is not compiled if it is not yet begun."""
        future = self._entries.get(grammar)
        if future is not None and future.cancel():
            del self._entries[grammar]

    def close(self) -> None:
        """Ends the child and the thread; futures that are not done are cancelled."""
        self._trial.kill()
        self._thread.shutdown(cancel_futures=True)
        self._trial.reap()

    def _compile(self, grammar: Grammar) -> LibraryMatcher:
        vocabulary = self._vocabulary.result()
        started = time.perf_counter()
        try:
            compiled = compile_source(self._trial.source(grammar), vocabulary)
        except OSError as error:  # no process to be had
            raise Unavailable(f"The grammar cannot be compiled now: {error}.")
        except Exception:
            self.stats.num_failed += 1
            raise
        finally:
            self.stats.compile_time += time.perf_counter() - started
        self.stats.num_compiled += 1
        return compiled

    def _evict(self) -> None:
        for grammar, future in list(self._entries.items()):
            if len(self._entries) <= self._size:
                return
            if future.done():
                del self._entries[grammar]


def _spent(future: Future[LibraryMatcher]) -> bool:
    """Whether to compile again: its limits are used up, or it only could not be compiled then."""
    if not future.done():
        return False
    error = future.exception()
    return isinstance(error, Unavailable) if error is not None else future.result().exhausted
