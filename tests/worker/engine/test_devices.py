"""Which device, number format and kernels a configuration comes to; torch's CUDA is faked."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from services.common.errors import StartupError
from services.worker.config import WorkerConfig
from services.worker.engine import devices
from services.worker.engine.devices import choose_attention, choose_device, choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs and FlashInfer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "_has_flashinfer", lambda: True)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(WorkerConfig()) == CPU
    with pytest.raises(StartupError, match=r"torch .* sees no GPU"):
        choose_device(WorkerConfig(device="cuda"))


@pytest.mark.usefixtures("gpus")
def test_each_rank_gets_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(WorkerConfig()) == CUDA
    assert choose_device(WorkerConfig(device="cpu")) == CPU
    assert choose_device(WorkerConfig(deterministic=True)) == CPU
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device(WorkerConfig(tp=2)) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(StartupError, match=r"rank 2 .* torch sees 2"):
        choose_device(WorkerConfig(tp=3))


def test_a_gpu_without_flashinfer_is_not_taken_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_device(WorkerConfig()) == CPU
    assert "pip install 'shoal[cuda]'" in caplog.text


@pytest.mark.parametrize(
    ("name", "device", "stored", "expected"),
    [
        ("auto", CPU, "bfloat16", torch.float32),
        ("auto", CUDA, "bfloat16", torch.bfloat16),
        ("auto", CUDA, "torch.float16", torch.float16),
        ("auto", CUDA, "float32", torch.bfloat16),
        ("float32", CUDA, "bfloat16", torch.float32),
        ("float16", CPU, "bfloat16", torch.float16),
    ],
)
def test_dtype(name: str, device: torch.device, stored: str, expected: torch.dtype) -> None:
    assert choose_dtype(name, device, stored) == expected


def test_attention() -> None:
    assert choose_attention("auto", CPU, torch.float32) == "cpu"
    assert choose_attention("auto", CUDA, torch.float16) == "flashinfer"
    assert choose_attention("auto", CUDA, torch.float32) == "torch_reference"
    assert choose_attention("torch_reference", CUDA, torch.bfloat16) == "torch_reference"
    with pytest.raises(StartupError, match="flashinfer needs --device cuda"):
        choose_attention("flashinfer", CPU, torch.bfloat16)
    with pytest.raises(StartupError, match="cpu does not run"):
        choose_attention("cpu", CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_ratio": 0.0}, "--memory-ratio"),
        ({"memory_ratio": 1.5}, "--memory-ratio"),
        ({"device": "cuda", "deterministic": True}, "--deterministic"),
        ({"cuda_graph_max_batch": -1}, "--cuda-graph-max-batch"),
    ],
)
def test_flags_that_make_no_sense_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WorkerConfig(**options)  # type: ignore[arg-type]
