"""The GPU benchmark: what it says without a GPU, and all of it on a CUDA that is the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_checks, gpu_engine
from bench.gpu_checks import Generated, compare
from services.worker.attention import flashinfer_build, flashinfer_limits
from services.worker.attention.flashinfer import Heads
from services.worker.core import Engine
from tests.worker.engine import fake_cuda

TINY = dataclasses.replace(
    gpu_engine.SMALL,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=32,
)


def test_without_a_gpu_it_says_so_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().err
    assert gpu.main(["--shapes", "tiny"]) == 2
    assert "unknown shapes tiny" in capsys.readouterr().err


def test_runs_that_part_are_fine_only_where_two_tokens_were_close() -> None:
    def made(tokens: list[int]) -> Generated:
        return Generated([tokens], [[2.0, 0.1, 3.0]], 0.0, 3)

    assert compare(made([1, 2, 3]), made([1, 2, 3])).fine
    assert compare(made([1, 2, 3]), made([1, 9, 9])).fine  # they part at a margin of 0.1
    assert not compare(made([1, 2, 3]), made([8, 2, 3])).fine


@pytest.fixture
def small_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake CUDA, one tiny shape, short prompts and few steps."""
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(flashinfer_limits, "HEAD_DIMS", (8, 64, 128))
    monkeypatch.setattr(gpu_engine, "SMALL", TINY)
    monkeypatch.setattr(gpu, "SHAPES", {"small": TINY})
    monkeypatch.setattr(flashinfer_build, "build", lambda *sizes: [])
    monkeypatch.setattr(gpu_checks, "PAGES", 32)
    for name, value in {
        "_HEADS": (Heads(4, 2, 64),),
        "_COPIED": 1000,
        "_SIDE": 16,
        "_BATCHES": (1, 4),
        "_PREFILL": [32] * 2,
        "_CONTEXT": 32,
        "_DECODE_STEPS": 3,
        "_WARM_UP": 1,
    }.items():
        monkeypatch.setattr(gpu, name, value)
    generate, random_engine = gpu_checks.generate, gpu_engine.random_engine

    def short(
        engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any
    ) -> Generated:
        return generate(engine, [prompt[:9] for prompt in prompts[:4]], 4, **options)

    def small(shape: Any, progress: Any, **options: Any) -> Any:
        sizes = {"num_pages": 60, "max_running_requests": 4, "max_prefill_tokens": 64}
        return random_engine(shape, progress, **{**options, **sizes, "context": 128})

    monkeypatch.setattr(gpu_checks, "generate", short)
    monkeypatch.setattr(gpu_engine, "random_engine", small)


@pytest.mark.usefixtures("small_everything")
def test_every_part_runs_and_the_end_is_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_cuda.CudaIsCpu():
        status = gpu.main(["--shapes", "small", "--json", str(tmp_path / "figures.json")])
    said = capsys.readouterr().out
    assert status == 0, said
    report = json.loads(said.splitlines()[-1])
    assert report == json.loads((tmp_path / "figures.json").read_text())
    assert len(report["checks"]) == 6
    assert not report["failed"]
    assert not report["skipped"]
    assert [row["what"] for row in report["rows"]] == [
        "decode, batch 1",
        "decode, batch 4",
        "prefill, 4 x 2048",
        "64 requests, overlap on",
        "64 requests, overlap off",
    ]
    assert "checks: 6 of 6 passed" in said


@pytest.mark.usefixtures("small_everything")
def test_past_its_budget_it_begins_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_cuda.CudaIsCpu():
        assert gpu.main(["--budget", "0", "--shapes", "small"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["skipped"] == ["build", "ceilings", "attention", "greedy", "timings of small"]
