"""Decode batches as CUDA graphs: one for each of a few sizes, replayed in place of launches.

A batch is padded to the next size with rows of the dummy request: one token on the dummy
page. A graph holds the addresses of its inputs, so those are fixed buffers that a step
writes before the replay. Sampling stays outside.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.common.model_files import Progress
from services.worker.attention.base import AttentionMetadata, GraphBackend
from services.worker.core import Batch
from services.worker.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured computation: `replay` does it again, into the same `output`."""

    replay: Callable[[], None]
    output: torch.Tensor | None


Capture = Callable[[Callable[[], torch.Tensor | None]], Captured]


def pad_batch(batch: Batch, num_rows: int, dummy_page: int) -> Batch:
    """The batch with rows of the dummy request at its end, `num_rows` in all."""
    more = num_rows - batch.num_rows
    if not more:
        return batch
    zeros, ones = np.zeros(more, np.int32), np.ones(more, np.int32)
    pages = np.full((more, batch.page_tables.shape[1]), dummy_page, np.int32)
    return dataclasses.replace(
        batch,
        slots=np.concatenate((batch.slots, zeros)),
        start=np.concatenate((batch.start, zeros)),
        query_lens=np.concatenate((batch.query_lens, ones)),
        input_ids=np.concatenate((batch.input_ids, zeros)),
        page_tables=np.concatenate((batch.page_tables, pages)),
        sample=np.concatenate((batch.sample, np.zeros(more, np.bool_))),
        output_positions=np.concatenate((batch.output_positions, zeros)),
    )


def dummy_batch(num_rows: int, dummy_page: int) -> Batch:
    """Decode rows of the dummy request alone; nothing is sampled."""
    empty = np.zeros(0, np.int32)
    nothing = Batch(
        step=0,
        slots=empty,
        start=empty,
        query_lens=empty,
        input_ids=empty,
        page_tables=np.zeros((0, 1), np.int32),
        sample=np.zeros(0, np.bool_),
        output_positions=empty,
    )
    return pad_batch(nothing, num_rows, dummy_page)


class DecodeGraphs:
    """The graphs of one rank's model, and their input buffers."""

    def __init__(
        self,
        model: Decoder,
        backend: GraphBackend,
        sizes: list[int],
        *,
        context: int,
        dummy_page: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._sizes = sorted(sizes)
        self._dummy_page = dummy_page
        self._plans = backend.graph_plans(self._sizes, context)
        self._ids = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        self._graphs: dict[int, Captured] = {}

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Progress) -> None:
        """Captures every size, the largest first: the smaller ones fit into its memory."""
        for done, size in enumerate(reversed(self._sizes)):
            progress("capturing CUDA graphs", done, len(self._sizes))
            self._capture_one(size, capture)
        progress("capturing CUDA graphs", len(self._sizes), len(self._sizes))

    def fits(self, batch: Batch) -> bool:
        """Whether `run` can compute a batch: decode rows only, and not too many."""
        return batch.num_tokens == batch.num_rows <= self._sizes[-1]

    def run(self, batch: Batch, ids: torch.Tensor) -> torch.Tensor | None:
        """The logits of every row, [rows, vocab] on rank 0, None on the others.

        They are overwritten by the next run. ids: [rows], the tokens to compute
        """
        size = self._sizes[bisect_left(self._sizes, batch.num_rows)]
        padded = pad_batch(batch, size, self._dummy_page)
        self._plans[size].update(AttentionMetadata.of(padded))
        self._ids[: batch.num_rows].copy_(ids)
        graph = self._graphs[size]
        graph.replay()
        return None if graph.output is None else graph.output[: batch.num_rows]

    def _capture_one(self, size: int, capture: Capture) -> None:
        plan, ids = self._plans[size], self._ids[:size]
        plan.update(AttentionMetadata.of(dummy_batch(size, self._dummy_page)))

        def forward() -> torch.Tensor | None:
            return self._model.logits(self._model(ids, plan.positions, plan))

        self._graphs[size] = capture(forward)


class CudaCapture:
    """Captures on a stream, all graphs into one memory pool."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool: object | None = None

    def __call__(self, body: Callable[[], torch.Tensor | None]) -> Captured:
        # Once outside, since libraries set themselves up at the first use.
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may use CUDA meanwhile.
        with torch.cuda.graph(
            graph,
            pool=self._pool,  # type: ignore[arg-type]
            stream=self._stream,
            capture_error_mode="thread_local",
        ):
            output = body()
        if self._pool is None:
            self._pool = graph.pool()
        return Captured(graph.replay, output)
