"""What torchrun starts in the tensor-parallel tests: `python -m tests.worker.engine.tp_rank`.

Rank 0 generates and writes what it made to a file; the others follow.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.core import SamplingParams
from services.worker.engine import follower, torch_engine
from tests.worker.engine.driver import Driver, Request


def generate(config: WorkerConfig) -> dict[str, list[list[int]] | list[float]]:
    """Greedy, sampled and prompt-logprob rows in one batch; then the sampled one alone.

    The answer's floats are the sampled row's log-probabilities, in company and alone.
    """
    engine = torch_engine.load(config, lambda *_: None)
    sampled = SamplingParams(temperature=0.8, seed=4, top_p=0.9, logprobs=2)
    prompt_report = SamplingParams(temperature=0, prompt_logprobs=1)
    requests = [
        Request([5, 9, 30, 77]),
        Request(list(range(3, 60)), sampled),
        Request([8, 8, 8], prompt_report),
    ]
    outputs = Driver(engine).generate(requests, 10, chunk=16)
    alone = Request(list(range(3, 60)), sampled)
    Driver(engine).generate([alone], 10, chunk=57)
    engine.close()
    return {"tokens": outputs, "in company": logprobs(requests[1]), "alone": logprobs(alone)}


def logprobs(request: Request) -> list[float]:
    """Those of a request's sampled tokens, in order; its row is the last that reports any."""
    rows = [row for result in request.results for row in result.logprobs.values()]
    return [value for row in rows for value in (row.logprob, *row.top_logprobs)]


def main() -> int:
    model, tp, output, deterministic = sys.argv[1:]
    config = WorkerConfig(
        model=model,
        tp=int(tp),
        num_pages=32,
        max_running_requests=4,
        num_threads=1,
        check_ranks=True,
        deterministic=deterministic == "deterministic",
    )
    try:
        if int(os.environ["RANK"]) > 0:
            follower.run(config)
        else:
            Path(output).write_text(json.dumps(generate(config)))
    except StartupError as error:
        Path(f"{output}.error{os.environ['RANK']}").write_text(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
