"""What a peer process is asked, and answers: lines of JSON on stdin and stdout.

It imports nothing but the standard library, for a peer runs in an environment of its own:
`{"prompts": [[ids], ...], "max_new": n}` in, `{"seconds": s, "cpu": s}` out: elapsed time, and that
of the process's threads. Every prompt gets exactly n greedy tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence, Sized

Generate = Callable[[Sequence[Sequence[int]], int], Sequence[Sized]]


def answer(generate: Generate, cpu: Callable[[], float] = time.process_time) -> None:
    """Says that the peer is ready, then answers until stdin ends. `cpu` is for a peer of several
    processes: the CPU seconds of them all."""
    # What libraries print goes to stderr.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate([[1, 2, 3]], 2)  # warm
    replies.write("{}\n")
    for line in sys.stdin:
        question = json.loads(line)
        prompts, max_new = question["prompts"], question["max_new"]
        started, before = time.perf_counter(), cpu()
        outputs = generate(prompts, max_new)
        seconds, spent = time.perf_counter() - started, cpu() - before
        assert all(len(output) == max_new for output in outputs), "a peer stopped early"
        reply = {"seconds": seconds, "cpu": spent}
        replies.write(json.dumps(reply) + "\n")
