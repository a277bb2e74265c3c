"""The plan itself: from a model's files and a machine to pages, tokens and requests.

Every size comes from `services.worker.sizing`, by which the engine sizes its pool; only how much
memory there is, and what a GPU's steps take, is estimated here, where the engine measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import StartupError
from services.common.model_files import ModelFiles, find_cached, find_local
from services.common.model_metadata import read_metadata
from services.common.safetensors_header import read_header, weight_files
from services.fleet.planner.config import PlanConfig
from services.fleet.planner.gpus import CPU, free_bytes
from services.worker.attention.flashinfer_limits import check_kernels
from services.worker.layers.shares import Shares
from services.worker.models import config as model_config
from services.worker.sizing import choices, pool, reserve
from services.worker.sizing.weights import host_weights, rank_weights


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a worker would hold. Sizes are bytes of one rank, unless they say otherwise."""

    model: str
    hub_id: str  # empty for a model that is not of the hub
    device: str
    dtype: str
    tp: int
    stored_bytes: int  # of the weight files; 0 if they are not here
    total: int  # free on the GPU before loading; on a CPU what a process may use, for all ranks
    weights: int
    activations: int  # a GPU's: with the kernels' workspaces, estimated
    graphs: int  # a GPU's, assumed
    token_bytes: int  # of KV
    pages: int
    page_size: int
    context: int  # of the model, as the flags have it
    max_model_len: int  # what a worker would publish
    max_running_requests: int

    @property
    def kv(self) -> int:
        """Bytes of the KV pool."""
        return self.kv_tokens * self.token_bytes

    @property
    def kv_tokens(self) -> int:
        return self.pages * self.page_size

    @property
    def most_pages(self) -> int:
        """What all requests that may run at once can use."""
        return self.max_running_requests * -(-self.max_model_len // self.page_size)

    def requests(self, length: int) -> int:
        """How many requests of `length` tokens run at once without one being preempted."""
        return min(self.pages // -(-length // self.page_size), self.max_running_requests)


def plan(config: PlanConfig) -> MemoryPlan:
    """Plans without loading a weight.

    Raises StartupError, as the worker would, if it cannot be served as configured.
    """
    files = find_cached(config.model)
    shape, metadata = model_config.read(files), read_metadata(files)
    worker, shares = config.worker(), Shares(0, config.tp)
    device: choices.Device = "cpu" if config.gpu == CPU else "cuda"
    dtype = choices.dtype(config.dtype, device, shape.dtype)
    weights = rank_weights(shape, shares, choices.BYTES[dtype])
    per_token = pool.token_bytes(shape, shares, choices.BYTES[dtype])
    context = choices.context(worker, metadata, shape)
    if config.context > context:
        raise StartupError(
            f"--context {config.context:,} is more than {files.name} allows a request:"
            f" {context:,} tokens"
        )
    total = int(config.memory_gib * (1 << 30))
    activations = graphs = 0
    if device == "cpu":
        total = total or pool.memory_limit()
        weights = host_weights(shape, shares, dtype, config.quantization, config.tp, total)
        weights //= config.tp
        pages = pool.num_pages(worker, context, per_token, total)
    else:
        check_kernels(dtype, shape.head_dim)
        total = total or free_bytes(config.gpu)
        memory = reserve.cuda_memory(worker, shape, shares, dtype, total)
        activations, graphs = memory.weights - weights + memory.activations, memory.graphs
        pages = pool.cuda_pages(worker, context, per_token, memory)
    return MemoryPlan(
        model=files.name,
        hub_id="" if find_local(config.model) else config.model,
        device=config.gpu,
        dtype=dtype,
        tp=config.tp,
        stored_bytes=_stored_bytes(files),
        total=total,
        weights=weights,
        activations=activations,
        graphs=graphs,
        token_bytes=per_token,
        pages=pages,
        page_size=worker.page_size,
        context=context,
        max_model_len=min(context, pages * worker.page_size),
        max_running_requests=worker.max_running_requests,
    )


def _stored_bytes(files: ModelFiles) -> int:
    """Bytes of the weights as they are stored; 0 if they are not here.

    Raises StartupError if a file is cut short.
    """
    if files.kind == "gguf":
        return files.path.stat().st_size
    paths = weight_files(files.path)
    if not paths or not all(path.exists() for path in paths):
        return 0
    headers = [read_header(path) for path in paths]
    return sum(tensor.num_bytes for header in headers for tensor in header.values())
