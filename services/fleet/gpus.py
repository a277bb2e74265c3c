"""The GPUs of this machine, dealt out to the workers of a fleet.

Without torch: the driver's device files say how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The GPUs by CUDA's names: those of CUDA_VISIBLE_DEVICES, else all, by number."""
    if _VISIBLE in os.environ:
        return [name.strip() for name in os.environ[_VISIBLE].split(",") if name.strip()]
    numbers = sorted(
        int(path.name.removeprefix("nvidia"))
        for path in devices.glob("nvidia*")
        if path.name.removeprefix("nvidia").isdigit()
    )
    return [str(number) for number in numbers]


def deal(gpus: Sequence[str], workers: int, each: int) -> list[dict[str, str]]:
    """The environment by which each worker sees `each` GPUs of its own.

    Empty where a lone worker may see all, or where there are too few: then the workers say
    themselves what they lack.
    """
    if workers == 1 or len(gpus) < workers * each:
        return [{} for _ in range(workers)]
    return [
        {_VISIBLE: ",".join(gpus[index * each : (index + 1) * each])} for index in range(workers)
    ]
