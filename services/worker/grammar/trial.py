"""`python -m services.worker.grammar.trial MODEL SECONDS`: compiles grammars that may be hostile.

A grammar of a few kilobytes can keep the library busy for a minute, or overflow its stack.
So a worker first lets this process compile each grammar that is new to it, with bounds on
processor time, memory and stack: a grammar that ends this process is refused, and nothing
else has happened. Grammars come as lines of JSON on stdin; the answer to each is a line of
JSON on stdout: what the library is to be given, and the error's sentence or null.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Callable

from llguidance import LLTokenizer

from services.common.errors import InvalidRequest
from services.common.process import die_with_parent
from services.worker.core import Grammar
from services.worker.grammar.compiler import compile_source, library_source
from services.worker.grammar.vocabulary import load_vocabulary

_MAX_MEMORY = 2 << 30  # bytes
_STACK = 4 << 20  # bytes; half of what the threads of a rank have


def serve(vocabulary: LLTokenizer, seconds: float) -> None:
    """Answers until stdin ends, or until a grammar takes more than its time."""
    for line in sys.stdin:
        kind, value = json.loads(line)
        grammar = Grammar(kind, tuple(value) if kind == "choices" else value)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, in any code
        source, reason = "", None
        try:
            source = library_source(grammar)
            compile_source(source, vocabulary)
        except InvalidRequest as error:
            reason = error.message
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([source, reason]), flush=True)


def main() -> None:
    """Reads the arguments and serves, on a thread whose stack is smaller than a rank's."""
    die_with_parent()
    model, seconds = sys.argv[1], float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _run_with_stack(lambda: serve(load_vocabulary(model), seconds))


def _run_with_stack(function: Callable[[], None]) -> None:
    threading.stack_size(_STACK)
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
