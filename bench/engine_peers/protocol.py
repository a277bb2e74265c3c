"""What a peer process is asked, and answers: lines of JSON on stdin and stdout.

It imports nothing but the standard library, for a peer runs in an environment of its own:
`{"prompts": [[ids], ...], "max_new": n}` in, `{"seconds": s, "cpu": s, "first": [ids]}` out:
elapsed time, that of the process's threads, and the new tokens of the first prompt. Every prompt
gets exactly n greedy tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

Generate = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]


def answer(generate: Generate) -> None:
    """Says that the peer is ready, then answers until stdin ends."""
    # What libraries print goes to stderr.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate([[1, 2, 3]], 2)  # warm
    replies.write("{}\n")
    for line in sys.stdin:
        question = json.loads(line)
        prompts, max_new = question["prompts"], question["max_new"]
        started, before = time.perf_counter(), time.process_time()
        outputs = generate(prompts, max_new)
        cpu, seconds = time.process_time() - before, time.perf_counter() - started
        assert all(len(output) == max_new for output in outputs), "a peer stopped early"
        reply = {"seconds": seconds, "cpu": cpu, "first": list(outputs[0])}
        replies.write(json.dumps(reply) + "\n")
