"""The CUDA engine on a CUDA that is the CPU: it holds together, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import StartupError
from services.worker.attention import flashinfer_limits
from services.worker.config import WorkerConfig
from services.worker.core import Engine, SamplingParams
from services.worker.engine import torch_engine
from services.worker.engine.cuda_engine import CudaEngine
from tests.worker.engine import fake_cuda
from tests.worker.engine.driver import Driver, Request
from tests.worker.models.checkpoints import VOCAB_SIZE, save_tiny

SAMPLED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.8, seed=4, top_k=20),
    SamplingParams(temperature=0.8, seed=5, top_p=0.9, min_p=0.01, logprobs=3),
    SamplingParams(temperature=0, frequency_penalty=0.5, logit_bias={7: 3.0}, prompt_logprobs=2),
    SamplingParams(temperature=1.1, seed=6, repetition_penalty=1.2, min_tokens=4),
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(flashinfer_limits, "HEAD_DIMS", (16,))
    monkeypatch.setattr(flashinfer_limits, "DTYPES", ("float32",))


def load(model: Path, device: Any, **options: Any) -> Engine:
    config = {"page_size": 4, "max_running_requests": 9, "num_threads": 1, "num_pages": 120}
    if device == "cuda":
        options = {"attention_backend": "flashinfer", "dtype": "float32", **options}
    values: dict[str, Any] = {**config, **options}
    return torch_engine.load(WorkerConfig(model=str(model), device=device, **values), _silent)


def _silent(phase: str, done: int, total: int) -> None:
    """Shows nothing."""


def run(engine: Engine) -> list[Request]:
    rng = np.random.default_rng(6)
    requests = [
        Request(rng.integers(3, VOCAB_SIZE, 4 + 9 * i).tolist(), params, banned_ids=(2,))
        for i, params in enumerate(SAMPLED)
    ]
    Driver(engine).generate(requests, 8, chunk=10)
    engine.close()
    return requests


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}])
def test_it_equals_the_cpu_engine(tmp_path: Path, options: dict[str, Any]) -> None:
    save_tiny(tmp_path)
    expected = run(load(tmp_path, "cpu"))
    engine = load(tmp_path, "cuda", **options)
    assert isinstance(engine, CudaEngine)
    for ours, theirs in zip(run(engine), expected, strict=True):
        assert ours.outputs == theirs.outputs
        for mine, other in zip(ours.results, theirs.results, strict=True):
            assert mine.duration > 0
            assert mine.logprobs.keys() == other.logprobs.keys()
            for row, entry in mine.logprobs.items():
                assert entry.top_token_ids == other.logprobs[row].top_token_ids
                assert entry.logprob == pytest.approx(other.logprobs[row].logprob, abs=1e-4)
            for row, entries in mine.prompt_logprobs.items():
                wanted = [entry.logprob for entry in other.prompt_logprobs[row]]
                assert [entry.logprob for entry in entries] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.usefixtures("cuda")
def test_the_pool_is_what_the_memory_ratio_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest steps and graphs are made first; on the fake they take no memory."""
    save_tiny(tmp_path)
    free = 1 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, free))
    engine = load(tmp_path, "cuda", num_pages=0, memory_ratio=0.5, max_prefill_tokens=48)
    engine.close()
    page = 2 * 3 * 2 * 16 * 4 * 4  # K and V, layers, KV heads, head size, float32, tokens
    assert engine.info.num_pages == free // 2 // page


@pytest.mark.usefixtures("cuda")
def test_graphs_are_captured_with_progress_and_only_where_asked(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    seen: list[tuple[int, int]] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "capturing CUDA graphs":
            seen.append((done, total))

    config = WorkerConfig(
        model=str(tmp_path),
        device="cuda",
        attention_backend="flashinfer",
        dtype="float32",
        num_pages=40,
        max_running_requests=5,
        cuda_graph_max_batch=4,
    )
    torch_engine.load(config, progress).close()
    assert seen[-4:] == [(0, 3), (1, 3), (2, 3), (3, 3)]  # of sizes 1, 2 and 4


@pytest.mark.usefixtures("cuda")
def test_experts_outside_bfloat16_do_without_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    expected = run(load(tmp_path, "cpu"))
    with caplog.at_level("INFO"):
        got = run(load(tmp_path, "cuda"))
    assert "no CUDA graphs" in caplog.text
    assert [request.outputs for request in got] == [request.outputs for request in expected]


@pytest.mark.usefixtures("cuda")
def test_a_failing_step_is_raised_by_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path)
    engine = load(tmp_path, "cuda")
    broken = Request([5, 6, 7])
    driver = Driver(engine)
    monkeypatch.setattr(engine, "_launch", _fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        driver.step([(broken, 3)])
    engine.close()


def _fail(batch: object) -> None:
    raise RuntimeError("device-side assert")


def test_head_sizes_without_a_kernel_are_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(monkeypatch)
    save_tiny(tmp_path)
    with pytest.raises(StartupError, match="head size 16"):
        load(tmp_path, "cuda", dtype="bfloat16")
