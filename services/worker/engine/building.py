"""From a filled model to its runner: how many KV pages, which attention, which graphs."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from services.common.model_files import Progress
from services.worker.attention import flashinfer
from services.worker.attention.base import AttentionBackend
from services.worker.attention.pool import KvPool
from services.worker.attention.registry import create_backend
from services.worker.attention.torch_reference import TorchReferenceBackend
from services.worker.config import WorkerConfig
from services.worker.engine import cuda_memory
from services.worker.engine.graphs import CudaCapture, DecodeGraphs
from services.worker.engine.runner import ModelRunner
from services.worker.engine.sampler import Sampler
from services.worker.layers.parallel import Parallel
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.sizing.choices import graph_sizes
from services.worker.sizing.pool import (
    CudaMemory,
    check_balance,
    cuda_pages,
    memory_limit,
    num_pages,
    token_bytes,
)

log = logging.getLogger(__name__)


class RunnerBuilder:
    """Makes runners of one model over KV pools of any size, all on one device."""

    def __init__(
        self,
        config: WorkerConfig,
        model: Decoder,
        shape: ModelConfig,
        *,
        attention: str,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel,
        context: int,
        max_prefill_tokens: int,
    ) -> None:
        self._config = config
        self._model = model
        self._shape = shape
        self._attention = attention
        self._dtype = dtype
        self._device = device
        self._parallel = parallel
        self._context = context
        self._max_prefill_tokens = max_prefill_tokens
        self._heads = flashinfer.Heads(
            parallel.share(shape.num_heads, "attention heads"),
            parallel.kv_span(shape.num_kv_heads)[1],
            shape.head_dim,
        )
        self._workspace: flashinfer.Workspace | None = None
        if attention == "flashinfer":
            self._heads.check(dtype)
            self._library = flashinfer.load_library()
            self._workspace = flashinfer.Workspace(device)
        self._sizes = self._graph_sizes()

    def num_pages(self, free_before: int) -> int:
        """The size of the KV pool, the same on every rank.

        `free_before` is what was free on the GPU before the weights were loaded. Raises
        StartupError if nothing is left, or if the ranks' GPUs are too different.
        """
        per_token = token_bytes(self._shape, self._parallel, self._dtype.itemsize)
        if self._device.type == "cpu":
            return num_pages(self._config, self._context, per_token, memory_limit())
        least, most = self._parallel.extremes(free_before)
        check_balance(least, most)
        if self._config.num_pages:
            return self._config.num_pages
        memory = dataclasses.replace(self._measure(free_before), free_before=least)
        log.info("GPU memory: %s", memory)
        pages = cuda_pages(self._config, self._context, per_token, memory)
        return self._parallel.extremes(pages)[0]

    def runner(self, num_pages: int, progress: Progress) -> ModelRunner:
        """A runner over a new pool, its graphs captured."""
        backend = self._backend(num_pages)
        graphs = None
        if self._sizes:
            graphs = self._graphs(backend, self._sizes, dummy_page=num_pages)
            graphs.capture(CudaCapture(torch.cuda.current_stream(self._device)), progress)
        return self._runner(backend, graphs)

    def _runner(self, backend: AttentionBackend, graphs: DecodeGraphs | None) -> ModelRunner:
        slots = self._config.max_running_requests
        return ModelRunner(self._model, backend, slots, self._device, graphs)

    def _measure(self, free_before: int) -> CudaMemory:
        config = self._config
        backend = self._backend(num_pages=1)
        return cuda_memory.measure(
            free_before=free_before,
            runner=self._runner(backend, None),
            make_graphs=(lambda sizes: self._graphs(backend, sizes, dummy_page=0))
            if self._sizes
            else None,
            sizes=self._sizes,
            sampler=Sampler(
                config.max_running_requests, self._shape.vocab_size, device=self._device
            ),
            batches=cuda_memory.profile_batches(
                max_rows=config.max_running_requests,
                max_tokens=self._max_prefill_tokens,
                context=self._context,
                page_size=config.page_size,
                page=0,
            ),
            parallel=self._parallel,
            device=self._device,
        )

    def _graphs(
        self, backend: AttentionBackend, sizes: list[int], *, dummy_page: int
    ) -> DecodeGraphs:
        assert isinstance(backend, flashinfer.FlashInferBackend)
        return DecodeGraphs(
            self._model,
            backend,
            sizes,
            context=self._context,
            dummy_page=dummy_page,
            device=self._device,
        )

    def _graph_sizes(self) -> list[int]:
        if self._attention != "flashinfer" or self._config.disable_cuda_graph:
            return []
        if not self._model.capturable:
            log.info("no CUDA graphs: the experts of this model are not computed in bfloat16")
            return []
        config = self._config
        return graph_sizes(min(config.cuda_graph_max_batch, config.max_running_requests))

    def _backend(self, num_pages: int) -> AttentionBackend:
        shape: dict[str, Any] = {
            "num_layers": self._shape.num_layers,
            "num_pages": num_pages,
            "page_size": self._config.page_size,
            "num_kv_heads": self._heads.num_kv_heads,
            "head_dim": self._heads.head_dim,
        }
        if self._device.type == "cpu":
            return create_backend(
                self._attention,
                **shape,
                dtype=self._dtype,
                deterministic=self._config.deterministic,
            )
        pool = KvPool.allocate(**shape, dtype=self._dtype, device=self._device)
        if self._workspace is None:
            return TorchReferenceBackend(pool)
        return flashinfer.FlashInferBackend(self._library, pool, self._heads, self._workspace)
