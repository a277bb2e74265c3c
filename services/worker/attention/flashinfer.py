"""Attention on CUDA by FlashInfer's paged kernels, planned once a step and run once a layer.

Planning happens on the host and ends in copies that are queued on the current stream, so a
step can be planned while the one before it runs. FlashInfer writes a plan into a pinned
buffer of its own and queues a copy from there: before the next plan may overwrite it, that
copy must be done, which `_planned` marks. It is done when the step before the last has
ended, so in the overlap loop nobody waits.

The library is handed in: tests pass an emulation of its documented semantics.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.common.errors import StartupError
from services.worker.attention.base import AttentionMetadata
from services.worker.attention.flashinfer_limits import (
    FLOAT_WORKSPACE,
    INT_WORKSPACE,
    check_kernels,
)
from services.worker.attention.flashinfer_plan import PagedRows, StepPlan, use_tensor_cores
from services.worker.attention.graph_buffers import GraphBuffers
from services.worker.attention.pool import KvPool
from services.worker.layers.transfer import Fence, pack

# FlashInfer's choice `auto` differs between its releases; these kernels run on sm_80 and later.
_KERNELS = "fa2"


def load_library() -> Any:
    """The flashinfer package. Raises StartupError if it is not installed."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise StartupError(
            f"attention on CUDA needs the package flashinfer-python ({error}); install it with:"
            " pip install 'shoal[cuda]', or say --attention-backend torch_reference"
        ) from error


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def check(self, dtype: torch.dtype) -> None:
        """Raises StartupError if FlashInfer has no kernel for these."""
        check_kernels(str(dtype).removeprefix("torch."), self.head_dim)


class Workspace:
    """Scratch memory of the kernels, shared by all that run one after another on a stream."""

    def __init__(self, device: torch.device) -> None:
        # Zeros, as FlashInfer asks of the first use.
        self.floats = torch.zeros(FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        self.decode = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=device)
        self.prefill = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=device)


class FlashInferBackend:
    """Paged attention in bfloat16 or float16 over a pool on CUDA."""

    def __init__(self, library: Any, pool: KvPool, heads: Heads, workspace: Workspace) -> None:
        self._library = library
        self._pool = pool
        self._heads = heads
        self._workspace = workspace
        self._device = pool.k.device
        self._planned = Fence(self._device)
        self._decode = self.decode_wrapper()
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(
            workspace.floats, self._layout, backend=_KERNELS
        )
        self._prefill.reset_workspace_buffer(workspace.floats, workspace.prefill)

    def plan(self, metadata: AttentionMetadata) -> FlashInferPlan:
        step = StepPlan.of(metadata, self._pool.page_size)
        self._planned.wait()
        host, device = pack(
            [
                *_arrays(step.whole),
                step.token_rows,
                step.positions,
                *_arrays(step.decode),
                *_arrays(step.prefill),
            ],
            self._device,
        )
        if step.decode.num_rows:
            self._plan_decode(self._decode, host[7:12], device[7:12])
        if step.prefill.num_rows:
            self._plan_prefill(host[12:17], device[12:17])
        self._planned.mark()
        return FlashInferPlan(self, device[:7], step.decode.num_rows)

    def graph_plans(self, sizes: Sequence[int], context: int) -> dict[int, FlashInferGraphPlan]:
        """Plans for decode batches of each size, over one set of fixed buffers."""
        pages = -(-context // self._pool.page_size)
        buffers = GraphBuffers.allocate(max(sizes), max(sizes) * pages, self._device)
        return {size: FlashInferGraphPlan(self, buffers, size) for size in sizes}

    # --- for the plans ---

    def plan_graph(
        self, wrapper: Any, metadata: AttentionMetadata, positions: torch.Tensor
    ) -> None:
        """Brings a step's metadata into a graph's fixed buffers."""
        rows = PagedRows.of(metadata, slice(None), self._pool.page_size)
        self._planned.wait()
        host, device = pack([*_arrays(rows), metadata.positions], self._device)
        positions.copy_(device[5])
        self._plan_decode(wrapper, host[:5], device[:5])
        self._planned.mark()

    def _plan_decode(
        self, wrapper: Any, host: list[torch.Tensor], device: list[torch.Tensor]
    ) -> None:
        """Plans from host arrays; only the indices, which no plan reads, are on the device.

        The copies that FlashInfer makes of pinned arrays do not wait for the stream.
        """
        _, kv_indptr, _, last_page_len, kv_lens = host
        wrapper.plan(
            kv_indptr,
            device[2],
            last_page_len,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            self._pool.page_size,
            seq_lens=kv_lens,
            **self._plan_options(),
        )

    def _plan_prefill(self, host: list[torch.Tensor], device: list[torch.Tensor]) -> None:
        qo_indptr, kv_indptr, _, last_page_len, kv_lens = host
        self._prefill.plan(
            qo_indptr,
            kv_indptr,
            device[2],
            last_page_len,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            self._pool.page_size,
            causal=True,
            seq_lens=kv_lens,
            **self._plan_options(),
        )

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, places: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes K and V [tokens, kv_heads, head_dim] into a layer's pages, which it returns.

        `places`: token rows, positions, kv_indices, kv_indptr, last_page_len.
        """
        pages = self._pool.layer(layer)
        token_rows, positions, kv_indices, kv_indptr, last_page_len = places
        self._library.append_paged_kv_cache(
            k,
            v,
            token_rows,
            positions,
            pages,
            kv_indices,
            kv_indptr,
            last_page_len,
            kv_layout=self._layout,
        )
        return pages

    def attend(
        self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], num_decode: int
    ) -> torch.Tensor:
        """q: [tokens, heads, head_dim] -> the same; the first `num_decode` are decode rows"""
        if num_decode == len(q):
            return _run(self._decode, q, pages)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if num_decode:
            self._decode.run(q[:num_decode], pages, out=out[:num_decode])
        self._prefill.run(q[num_decode:], pages, out=out[num_decode:])
        return out

    @property
    def _layout(self) -> str:
        return "HND" if self._pool.head_major else "NHD"

    def _plan_options(self) -> dict[str, Any]:
        return {
            "pos_encoding_mode": "NONE",  # the model has turned q and k already
            "window_left": -1,  # the context is capped at a sliding window
            "sm_scale": 1 / math.sqrt(self._heads.head_dim),
            "q_data_type": self._pool.k.dtype,
            "kv_data_type": self._pool.k.dtype,
            "non_blocking": True,
        }

    def decode_wrapper(self, **buffers: Any) -> Any:
        """A wrapper for decode; with fixed `buffers`, in CUDA-graph mode."""
        heads, workspace = self._heads, self._workspace
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            workspace.floats,
            self._layout,
            use_cuda_graph=bool(buffers),
            use_tensor_cores=use_tensor_cores(heads.num_heads, heads.num_kv_heads),
            backend=_KERNELS,
            **buffers,
        )
        wrapper.reset_workspace_buffer(workspace.floats, workspace.decode)
        return wrapper


class FlashInferPlan:
    """One step of `FlashInferBackend`."""

    def __init__(
        self, backend: FlashInferBackend, whole: list[torch.Tensor], num_decode: int
    ) -> None:
        _, kv_indptr, kv_indices, last_page_len, _, token_rows, positions = whole
        self._backend = backend
        self._places = [token_rows, positions, kv_indices, kv_indptr, last_page_len]
        self._num_decode = num_decode

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        pages = self._backend.append(layer, k, v, self._places)
        return self._backend.attend(q, pages, self._num_decode)


class FlashInferGraphPlan:
    """A plan that is captured once and updated before each replay."""

    def __init__(self, backend: FlashInferBackend, buffers: GraphBuffers, num_rows: int) -> None:
        self._backend = backend
        self._positions = buffers.positions[:num_rows]
        kv_indptr = buffers.kv_indptr[: num_rows + 1]
        last_page_len = buffers.last_page_len[:num_rows]
        self._places = [
            buffers.token_rows[:num_rows],
            self._positions,
            buffers.kv_indices,
            kv_indptr,
            last_page_len,
        ]
        self._wrapper = backend.decode_wrapper(
            paged_kv_indptr_buffer=kv_indptr,
            paged_kv_indices_buffer=buffers.kv_indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )

    @property
    def positions(self) -> torch.Tensor:
        """The rows' positions, [rows], int32; the model reads them too."""
        return self._positions

    def update(self, metadata: AttentionMetadata) -> None:
        """Brings the metadata of a batch of this plan's size into the fixed buffers."""
        self._backend.plan_graph(self._wrapper, metadata, self._positions)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        pages = self._backend.append(layer, k, v, self._places)
        return _run(self._wrapper, q, pages)


def _arrays(rows: PagedRows) -> list[Any]:
    return [rows.qo_indptr, rows.kv_indptr, rows.kv_indices, rows.last_page_len, rows.kv_lens]


def _run(wrapper: Any, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = wrapper.run(q, pages)
    return out
