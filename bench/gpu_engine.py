"""Engines of random weights on a GPU, and the batches that the benchmark gives them."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.common.model_files import Progress
from services.worker.config import WorkerConfig
from services.worker.core import Admission, Batch, Engine, EngineInfo, SamplingParams, StepResult
from services.worker.engine.building import RunnerBuilder
from services.worker.engine.cuda_engine import CudaEngine
from services.worker.engine.cuda_memory import free_memory
from services.worker.engine.devices import (
    choose_attention,
    choose_device,
    choose_dtype,
    on_stream,
)
from services.worker.engine.group import Leader
from services.worker.engine.sampler import Sampler
from services.worker.engine.steps import StepRunner
from services.worker.engine.thread import EngineThread
from services.worker.layers.loadable import Loadable
from services.worker.layers.norm import RmsNorm
from services.worker.layers.parallel import Parallel
from services.worker.layers.rope_config import RopeConfig
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder

GREEDY = SamplingParams(temperature=0.0)

SMALL = ModelConfig(
    family="llama",
    hidden_size=1024,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=4096,
    vocab_size=32000,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tied=True,
    dtype="bfloat16",
)
LLAMA_8B = ModelConfig(
    family="llama",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope=RopeConfig("llama3", theta=500000.0, factor=8.0, original_context=8192),
    tied=False,
    dtype="bfloat16",
)


@contextmanager
def random_engine(
    shape: ModelConfig, progress: Progress, *, context: int = 8192, **options: Any
) -> Iterator[Engine]:
    """An engine of a shape with random weights, built by the parts that serve real ones."""
    config = WorkerConfig(device="cuda", **options)
    thread = EngineThread("bench-gpu")
    try:
        engine = thread.call(lambda: _build(shape, config, context, thread, progress))
    except BaseException:
        thread.close()
        raise
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def _build(
    shape: ModelConfig,
    config: WorkerConfig,
    context: int,
    thread: EngineThread,
    progress: Progress,
) -> CudaEngine:
    device, parallel = choose_device(config), Parallel()
    dtype = choose_dtype(config.dtype, device, shape.dtype)
    tokens = config.max_prefill_tokens or 8192
    with on_stream(device) as stream:
        assert stream is not None
        free_before = free_memory(device)
        with torch.device("meta"):
            model = Decoder(shape, dtype, device, parallel)
        _fill(model, device)
        builder = RunnerBuilder(
            config,
            model,
            shape,
            attention=choose_attention(config.attention_backend, device, dtype),
            dtype=dtype,
            device=device,
            parallel=parallel,
            context=context,
            max_prefill_tokens=tokens,
        )
        pages = builder.num_pages(free_before)
        info = EngineInfo(
            "random",
            "",
            shape.vocab_size,
            min(context, pages * config.page_size),
            config.page_size,
            pages,
            tokens,
            frozenset(),
        )
        sampler = Sampler(config.max_running_requests, shape.vocab_size, device=device)
        steps = StepRunner(builder.runner(pages, progress), sampler, parallel)
        return CudaEngine(info, steps.launch, thread, stream, Leader([]), ExitStack())


@torch.inference_mode()
def _fill(model: Decoder, device: torch.device) -> None:
    """Fills a model on the device, the same at each call; wide, so that choices are far apart."""
    torch.manual_seed(7)  # of every device
    for layer in model.modules():
        if not isinstance(layer, Loadable):
            continue
        layer.to_empty(device=device, recurse=False)
        for parameter in layer.parameters(recurse=False):
            if isinstance(layer, RmsNorm):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 2 * parameter.shape[-1] ** -0.5)
        layer.prepare()


def weight_bytes(shape: ModelConfig) -> int:
    """What a decode step reads of the weights: all but the embedding's table, in 16 bits."""
    return 2 * (_matrix_elements(shape) + shape.vocab_size * shape.hidden_size)


def kv_bytes(shape: ModelConfig) -> int:
    """K and V of one token in all layers, in 16 bits."""
    return 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim


def prefill_flops(shape: ModelConfig, lengths: list[int]) -> float:
    """Products of a prefill: of the layers' weights, and of causal attention."""
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    return 2.0 * _matrix_elements(shape) * sum(lengths) + attention * sum(
        length * length / 2 for length in lengths
    )


def _matrix_elements(shape: ModelConfig) -> int:
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    layer = hidden * (2 * heads + 2 * kv) + 3 * hidden * shape.intermediate_size
    return shape.num_layers * layer


def make_batch(
    info: EngineInfo,
    step: int,
    starts: list[int],
    lengths: list[int],
    pages_each: int,
    *,
    admit: bool,
) -> Batch:
    """Rows of tokens, each row on pages of its own as far as the pool has them."""
    rows = len(starts)
    tables = np.arange(rows * pages_each, dtype=np.int32).reshape(rows, pages_each)
    nothing = np.zeros(0, np.int32)
    decode = max(lengths) == 1 and not admit
    return Batch(
        step=step,
        slots=np.arange(rows, dtype=np.int32),
        start=np.array(starts, np.int32),
        query_lens=np.array(lengths, np.int32),
        input_ids=np.full(sum(lengths), -1 if decode else 5, np.int32),
        page_tables=tables % info.num_pages,
        sample=np.ones(rows, np.bool_),
        output_positions=np.full(rows, step, np.int32),
        admissions=tuple(
            Admission(slot, nothing, nothing, GREEDY) for slot in range(rows) if admit
        ),
    )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of the steps after the warm-up: their results, and the seconds from first to last."""

    results: list[StepResult]
    seconds: float

    @property
    def step(self) -> float:
        return self.seconds / len(self.results)

    @property
    def bubble(self) -> float:
        """The share of the time in which the device had nothing to run between steps."""
        return sum(result.idle for result in self.results) / self.seconds


def run_steps(engine: Engine, batches: list[Batch], warm_up: int) -> StepTimes:
    """Runs batches one ahead of their results, as the overlap loop does."""
    pending: deque[Any] = deque()
    results: list[StepResult] = []
    for batch in batches:
        pending.append(engine.launch(batch))
        if len(pending) > 1:
            results.append(pending.popleft().result())
    results += [step.result() for step in pending]
    timed = results[warm_up:]
    return StepTimes(timed, sum(result.duration + result.idle for result in timed))
