"""What a rank computes on, in which number format and with which attention kernels."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.sizing import choices

log = logging.getLogger(__name__)

_DTYPES: dict[choices.Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HALF = (torch.bfloat16, torch.float16)


def choose_device(config: WorkerConfig) -> torch.device:
    """The device of `--device`: on CUDA, the GPU with this rank's number on its host.

    auto is CUDA where torch sees a GPU and FlashInfer is installed. Raises StartupError if
    there is no such device.
    """
    name = "cpu" if config.deterministic else config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and _has_flashinfer() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
        raise StartupError(
            f"--device cuda was given, but torch {torch.__version__}, which {build}, sees no GPU"
        )
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count:
        raise StartupError(
            f"rank {rank} of this host needs a GPU of its own, but torch sees {count}"
        )
    return torch.device("cuda", rank)


def choose_dtype(name: str, device: torch.device, stored: str) -> torch.dtype:
    """torch's type for `services.worker.sizing.choices.dtype`."""
    kind: choices.Device = "cpu" if device.type == "cpu" else "cuda"
    return _DTYPES[choices.dtype(name, kind, stored)]


def choose_attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernels of `--attention-backend`: cpu, torch_reference or flashinfer.

    Raises StartupError if they do not run on the device.
    """
    if device.type == "cpu":
        if name == "flashinfer":
            raise StartupError("--attention-backend flashinfer needs --device cuda")
        return "cpu" if name == "auto" else name
    if name == "cpu":
        raise StartupError("--attention-backend cpu does not run on --device cuda")
    if name == "auto" and dtype not in _HALF:
        log.warning("no quick attention kernels on CUDA for %s: using torch_reference", dtype)
        return "torch_reference"
    return "flashinfer" if name == "auto" else name


@contextmanager
def on_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """On CUDA, makes the device this thread's and a new stream the current one."""
    if device.type == "cpu":
        yield None
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield stream


def _has_flashinfer() -> bool:
    if importlib.util.find_spec("flashinfer") is not None:
        return True
    log.warning("there is a GPU, but no FlashInfer: using the CPU; pip install 'shoal[cuda]'")
    return False
