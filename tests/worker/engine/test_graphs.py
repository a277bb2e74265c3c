"""Decode graphs without a GPU: sizes, padding, fixed buffers, and a whole engine of them.

The engine runs a tiny model over the emulation of FlashInfer; in place of a CUDA graph
stands a closure that computes again, from the same buffers into the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.model_files import resolve
from services.worker.attention import flashinfer as backend_module
from services.worker.attention.flashinfer import FlashInferBackend, Heads, Workspace
from services.worker.attention.pool import KvPool
from services.worker.config import WorkerConfig
from services.worker.core import Batch, EngineInfo, StepResult
from services.worker.engine import torch_engine
from services.worker.engine.graphs import (
    Captured,
    DecodeGraphs,
    dummy_batch,
    pad_batch,
)
from services.worker.engine.loading import open_source, read_model_config
from services.worker.engine.runner import ModelRunner
from services.worker.engine.sampler import Sampler
from services.worker.engine.steps import StepRunner
from services.worker.layers.parallel import Parallel
from services.worker.models.decoder import Decoder
from services.worker.sizing.choices import graph_sizes
from services.worker.weights.loader import load_weights
from tests.worker.attention import flashinfer_emulation
from tests.worker.engine.driver import Driver, Request
from tests.worker.models.checkpoints import VOCAB_SIZE, save_tiny

CPU = torch.device("cpu")
PAGES, PAGE_SIZE, CONTEXT, ROWS = 80, 4, 128, 12


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (0, []),
        (1, [1]),
        (6, [1, 2, 4, 6]),
        (16, [1, 2, 4, 8, 16]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
    ],
)
def test_sizes(largest: int, sizes: list[int]) -> None:
    assert graph_sizes(largest) == sizes


def test_padding_is_the_dummy_request_on_the_dummy_page() -> None:
    batch = dummy_batch(2, 7)
    padded = pad_batch(batch, 5, 9)
    assert padded.num_rows == padded.num_tokens == 5
    assert padded.page_tables[:, 0].tolist() == [7, 7, 9, 9, 9]
    assert padded.query_lens.tolist() == [1] * 5
    assert (padded.start + padded.query_lens).tolist() == [1] * 5
    assert not padded.sample.any()
    assert pad_batch(batch, 2, 9) is batch


class EmulatedEngine:
    """`core.Engine` on a CPU with the parts that the CUDA engine is made of."""

    def __init__(self, model: Path, sizes: list[int]) -> None:
        files = resolve(str(model))
        shape = read_model_config(files)
        with torch.device("meta"):
            decoder = Decoder(shape, torch.float32, CPU, Parallel())
        load_weights(decoder, open_source(files, shape), CPU, lambda *_: None)
        pool = KvPool.allocate(
            num_layers=shape.num_layers,
            num_pages=PAGES,
            page_size=PAGE_SIZE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.float32,
        )
        heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        backend = FlashInferBackend(flashinfer_emulation, pool, heads, Workspace(CPU))
        self.replays: list[int] = []
        self.captured: list[int] = []
        self.info = EngineInfo(
            "tiny", "", VOCAB_SIZE, CONTEXT, PAGE_SIZE, PAGES, 64, frozenset({2})
        )
        graphs = None
        if sizes:
            graphs = DecodeGraphs(
                decoder, backend, sizes, context=CONTEXT, dummy_page=PAGES, device=CPU
            )
            graphs.capture(self._capture, lambda *_: None)
        runner = ModelRunner(decoder, backend, ROWS, CPU, graphs)
        self._steps = StepRunner(runner, Sampler(ROWS, VOCAB_SIZE), Parallel())
        self.pool = pool

    def launch(self, batch: Batch) -> _Done:
        return _Done(self._steps.step(batch))

    def check(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def _capture(self, body: Callable[[], torch.Tensor | None]) -> Captured:
        output = body()
        assert output is not None
        self.captured.append(len(output))

        def replay() -> None:
            self.replays.append(len(output))
            again = body()
            assert again is not None
            output.copy_(again)

        return Captured(replay, output)


class _Done:
    def __init__(self, value: StepResult) -> None:
        self._value = value

    def result(self) -> StepResult:
        return self._value


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "FLOAT_WORKSPACE", 64)
    monkeypatch.setattr(backend_module, "INT_WORKSPACE", 64)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_graphs_on_and_off_equal_the_cpu_engine(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, VOCAB_SIZE, int(n)).tolist() for n in (1, 5, 4, 17, 30, 3)]
    config = WorkerConfig(
        model=str(tmp_path),
        device="cpu",
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        max_running_requests=ROWS,
        num_threads=1,
    )
    reference = torch_engine.load(config, lambda *_: None)
    expected = Driver(reference).generate([Request(p) for p in prompts], 9, chunk=7)
    reference.close()
    plain, graphed = EmulatedEngine(tmp_path, []), EmulatedEngine(tmp_path, [1, 2, 4, 8])
    assert graphed.captured == [8, 4, 2, 1]  # the largest first
    for engine in (plain, graphed):
        requests = [Request(p) for p in prompts]
        assert Driver(engine).generate(requests, 9, chunk=7) == expected
    assert not plain.replays
    assert set(graphed.replays) == {8, 1}  # six rows in the graph of eight; chunks of one token


def test_rows_in_mixed_batches_and_graphs_of_every_size_are_independent(tmp_path: Path) -> None:
    """Requests of different lengths leave one by one, so that every size is replayed."""
    save_tiny(tmp_path)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCAB_SIZE, int(n)).tolist() for n in (3, 9, 2, 14, 6)]
    counts = [3, 12, 7, 5, 10]
    alone = []
    for prompt, count in zip(prompts, counts, strict=True):
        engine = EmulatedEngine(tmp_path, [])
        alone += Driver(engine).generate([Request(prompt)], count)
    engine = EmulatedEngine(tmp_path, [1, 2, 4])
    driver, requests = Driver(engine), [Request(prompt) for prompt in prompts]
    while True:
        rows = []
        for request, count in zip(requests, counts, strict=True):
            left = len(request.prompt) + len(request.outputs) - request.computed
            if len(request.outputs) < count:
                rows.append((request, min(left, 5)))
        if not rows:
            break
        driver.step(rows, pooled=True)
    assert [request.outputs for request in requests] == alone
    assert {1, 2, 4} <= set(engine.replays)
