"""`shoal download`: puts a model into the local hub cache, for services that start without network.

Knows nothing of who reads it: HF_HOME says where the cache is, HF_TOKEN who asks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from services.common.config import option, parse
from services.common.errors import StartupError
from services.common.model_files import resolve

_GROUP = "download"
_STEPS = 20  # lines of progress in all


@dataclass(frozen=True)
class DownloadConfig:
    """What to fetch."""

    model: str = option("", "the model's id on the hub; needed", group=_GROUP)
    mark: str = option(
        "", "an empty file to make once all of it is there", group=_GROUP, metavar="FILE"
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("--model must name a model of the hub")


class Progress:
    """Prints a line for every twentieth that has come."""

    def __init__(self) -> None:
        self._shown = 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        step = _STEPS * done // total if total else 0
        if step > self._shown:
            self._shown = step
            print(f"{phase}: {done / 2**20:.0f} of {total / 2**20:.0f} MiB", flush=True)


def main(argv: Sequence[str]) -> NoReturn:
    """Downloads configuration, tokenizer and weights; exits 1 after one sentence if it cannot."""
    config = parse(
        DownloadConfig,
        argv,
        prog="shoal download",
        description="Downloads a model into the local hub cache.",
    )
    try:
        files = resolve(config.model, progress=Progress())
        if config.mark:
            Path(config.mark).touch()
    except (StartupError, OSError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"{config.model} is at {files.path}")
    sys.exit(0)
