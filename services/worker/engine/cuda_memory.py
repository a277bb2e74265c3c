"""What a model needs of a GPU beside its KV, measured before the KV pool is sized.

The largest steps are made on a pool of one page, where what they compute means nothing,
and the two largest graphs are captured there and let go. All ranks do it together, as the
steps hold collectives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from services.worker.core import Admission, Batch, SamplingParams
from services.worker.engine.graphs import CudaCapture, DecodeGraphs
from services.worker.engine.runner import ModelRunner, last_tokens
from services.worker.engine.sampler import Sampler
from services.worker.engine.steps import StepRunner, follow
from services.worker.layers.parallel import Parallel
from services.worker.sizing.pool import CudaMemory, graph_bytes

_NUCLEUS = SamplingParams(temperature=1.0, top_p=0.9)  # the draw that takes most memory


def free_memory(device: torch.device) -> int:
    """Bytes free on the GPU, by the driver's count, after the cache of torch was emptied."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def measure(
    *,
    free_before: int,
    runner: ModelRunner,
    make_graphs: Callable[[list[int]], DecodeGraphs] | None,
    sizes: list[int],
    sampler: Sampler,
    batches: list[Batch],
    parallel: Parallel,
    device: torch.device,
) -> CudaMemory:
    """Measures with the weights loaded and a scratch pool made.

    `batches` are the largest steps; `sizes` are those of the graphs, `make_graphs` None if
    there shall be none.
    """
    loaded = free_memory(device)
    steps = StepRunner(runner, sampler, parallel)
    for batch in batches:
        if parallel.rank == 0:
            steps.launch(batch)
        else:
            follow(runner, parallel, batch, last_tokens(batch))
    torch.cuda.synchronize(device)
    # The cache keeps what the steps took at their peak.
    activations = max(loaded - torch.cuda.mem_get_info(device)[0], 0)
    graphs = _measure_graphs(make_graphs, sizes, device) if make_graphs is not None else 0
    return CudaMemory(free_before, free_before - loaded, activations, graphs)


def profile_batches(
    *, max_rows: int, max_tokens: int, context: int, page_size: int, page: int
) -> list[Batch]:
    """The largest decode step and the largest prefill step, all on one page."""
    decode = _batch([1] * max_rows, page_size, page, admit=True)
    lengths = [min(context, max_tokens - done) for done in range(0, max_tokens, context)]
    return [decode, _batch(lengths[:max_rows], page_size, page, admit=False)]


def _batch(lengths: list[int], page_size: int, page: int, *, admit: bool) -> Batch:
    rows = len(lengths)
    zeros = np.zeros(rows, np.int32)
    nothing = np.zeros(0, np.int32)
    return Batch(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        start=zeros,
        query_lens=np.array(lengths, np.int32),
        input_ids=np.zeros(sum(lengths), np.int32),
        page_tables=np.full((rows, -(-max(lengths) // page_size)), page, np.int32),
        sample=np.ones(rows, np.bool_),
        output_positions=zeros,
        admissions=tuple(
            Admission(slot, nothing, nothing, _NUCLEUS) for slot in range(rows) if admit
        ),
    )


def _measure_graphs(
    make_graphs: Callable[[list[int]], DecodeGraphs], sizes: list[int], device: torch.device
) -> int:
    largest = sorted(sizes)[-2:]
    before = free_memory(device)
    graphs: DecodeGraphs | None = make_graphs(largest)  # their buffers count too
    left: list[int] = []

    def note(phase: str, done: int, total: int) -> None:
        left.append(free_memory(device))

    assert graphs is not None
    graphs.capture(CudaCapture(torch.cuda.current_stream(device)), note)
    # Called before each capture and after the last.
    first = before - left[1]
    second = left[1] - left[2] if len(left) > 2 else 0
    graphs = None
    return graph_bytes(first, second, len(sizes))
