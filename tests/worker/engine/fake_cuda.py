"""A CUDA that is the CPU, for running the code of the CUDA engine where there is no GPU.

Tensors asked for on `cuda` are made on the CPU, streams and events do nothing (what is
queued is done), and a captured graph is the computation itself, run again into the same
output. So this shows that the code holds together and computes what the CPU engine does.
It shows nothing about races between streams, nor about real kernels.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from services.worker.attention import flashinfer as backend_module
from services.worker.engine import graphs
from services.worker.engine.graphs import Captured
from services.worker.engine.thread import EngineThread
from tests.worker.attention import flashinfer_emulation

GIB = 1 << 30


class CudaIsCpu(TorchFunctionMode):
    """Makes tensors of the device `cuda` on the CPU, in the thread that enters it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") == "pin_memory":
            return args[0].clone()
        options = {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        options.pop("pin_memory", None)
        return function(*(_on_cpu(value) for value in args), **options)


def _on_cpu(value: Any) -> Any:
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_cuda else value


class Event:
    """A point in time."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def wait(self) -> None:
        assert self.time, "an event that was never recorded is waited for"

    def synchronize(self) -> None:
        """Nothing is ever left to do."""

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) * 1000


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Nothing is ever left to do."""


def capture(body: Callable[[], torch.Tensor | None]) -> Captured:
    """In the place of `CudaCapture`: computes again at each replay."""
    output = body()

    def replay() -> None:
        again = body()
        if output is not None and again is not None:
            output.copy_(again)

    return Captured(replay, output)


def install(monkeypatch: pytest.MonkeyPatch, *, free: int = 4 * GIB) -> None:
    """Puts the fake, and the emulation of FlashInfer, in the places of the real ones."""
    stream = Stream(torch.device("cuda", 0))
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_name": lambda device: "a CPU that says it is a GPU",
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (free, 2 * free),
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_emulation)
    monkeypatch.setattr(backend_module, "FLOAT_WORKSPACE", 64)
    monkeypatch.setattr(backend_module, "INT_WORKSPACE", 64)
    for module in (graphs, sys.modules["services.worker.engine.building"]):
        monkeypatch.setattr(module, "CudaCapture", lambda stream: capture)
    monkeypatch.setattr(
        sys.modules["services.worker.engine.cuda_memory"], "CudaCapture", lambda stream: capture
    )
    run = EngineThread._run

    def run_with_cuda(self: EngineThread) -> None:
        with CudaIsCpu():
            run(self)

    monkeypatch.setattr(EngineThread, "_run", run_with_cuda)
