"""Runs torchrun in this process, so that its ranks die when the agent does.

The kernel sends a parent-death signal to children only. The chain is agent ->
this process -> ranks: this process asks for the signal for itself and names itself
as the parent that the ranks check, so a killed agent takes the whole tree with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from services.common import logs, process
from services.worker.config import WorkerConfig
from services.worker.framing import CONFIG_ENV


def main(argv: Sequence[str]) -> int:
    """Runs torchrun with `argv` and returns the status for the agent."""
    process.die_with_parent()
    os.environ[process.PARENT_ENV] = str(os.getpid())
    # Imported late: loading torch takes seconds in which the agent may die.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    config = WorkerConfig(**json.loads(os.environ[CONFIG_ENV]))
    logs.setup("torchrun", level=config.log_level, format=config.log_format)
    logs.adopt("torch")
    try:
        run(parse_args(list(argv)))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} ended with status {failure.exitcode}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
