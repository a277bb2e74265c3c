"""From a configuration to a filled model on one rank, and the fingerprint of its weights."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.common.errors import StartupError
from services.common.gguf_header import read_header
from services.common.model_files import ModelFiles, ModelMetadata, read_json, read_metadata, resolve
from services.worker.attention.base import AttentionBackend
from services.worker.attention.registry import create_backend
from services.worker.config import WorkerConfig
from services.worker.core import EngineInfo
from services.worker.engine.capacity import memory_limit, num_pages
from services.worker.engine.runner import ModelRunner
from services.worker.layers.parallel import Parallel
from services.worker.models import config as model_config
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.weights.gguf import GgufSource, rope_divisors
from services.worker.weights.loader import load_weights
from services.worker.weights.safetensors import SafetensorsSource
from services.worker.weights.source import WeightSource

log = logging.getLogger(__name__)

_CPU_PREFILL_TOKENS = 512
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's model, ready to run, and what the engine turned out to be."""

    runner: ModelRunner
    info: EngineInfo


def load_model(
    config: WorkerConfig, parallel: Parallel, progress: Callable[[str, int, int], None]
) -> LoadedModel:
    """Loads this rank's part of the model and makes its KV pool.

    Raises StartupError if the model cannot be served as configured.
    """
    files = resolve(config.model, progress=progress)
    if files.kind == "byte":
        raise StartupError("the model 'byte' has no weights; run it with --engine fake")
    metadata = read_metadata(files)
    shape = read_model_config(files)
    dtype = _DTYPES["float32" if config.dtype == "auto" else config.dtype]
    device = torch.device("cpu")
    with torch.device("meta"):
        model = Decoder(shape, dtype, device, parallel)
    source = open_source(files, shape)
    with torch.inference_mode():
        load_weights(
            model, source, device, progress, ignored=("lm_head.weight",) if shape.tied else ()
        )
    info = _resolve_info(config, files, metadata, shape, dtype, parallel, source)
    backend = _create_attention(config, info, shape, dtype, parallel)
    return LoadedModel(ModelRunner(model, backend, config.max_running_requests, device), info)


def read_model_config(files: ModelFiles) -> ModelConfig:
    """The shape of a model. Raises StartupError on what Shoal cannot compute."""
    if files.kind == "hf":
        return model_config.from_hf(read_json(files.path / "config.json"))
    header = read_header(files.path)
    shape = model_config.from_gguf(header)
    rope = dataclasses.replace(shape.rope, frequency_divisors=rope_divisors(header))
    return dataclasses.replace(shape, rope=rope)


def open_source(files: ModelFiles, shape: ModelConfig) -> WeightSource:
    """The checkpoint's tensors. Raises StartupError if files are missing or broken."""
    if files.kind == "hf":
        return SafetensorsSource(files.path)
    return GgufSource(read_header(files.path), shape)


def _resolve_info(
    config: WorkerConfig,
    files: ModelFiles,
    metadata: ModelMetadata,
    shape: ModelConfig,
    dtype: torch.dtype,
    parallel: Parallel,
    source: WeightSource,
) -> EngineInfo:
    context = metadata.context_length
    if shape.sliding_window is not None and shape.sliding_window < context:
        log.info("context capped at the sliding window: %d of %d", shape.sliding_window, context)
        context = shape.sliding_window
    if config.max_model_len > context:
        log.info("--max-model-len %d is above the model's context", config.max_model_len)
    context = min(context, config.max_model_len or context)
    kv_heads = parallel.kv_span(shape.num_kv_heads)[1]
    token_bytes = 2 * shape.num_layers * kv_heads * shape.head_dim * dtype.itemsize
    pages = num_pages(config, context, token_bytes, memory_limit())
    identity = source.identity() + f"{dtype} none tp={parallel.size}".encode()
    return EngineInfo(
        model=config.served_model_name or files.name,
        fingerprint=hashlib.sha256(identity).hexdigest()[:16],
        vocab_size=shape.vocab_size,
        max_model_len=min(context, pages * config.page_size),
        page_size=config.page_size,
        num_pages=pages,
        max_prefill_tokens=config.max_prefill_tokens or _CPU_PREFILL_TOKENS,
        eos_token_ids=metadata.eos_token_ids,
    )


def _create_attention(
    config: WorkerConfig,
    info: EngineInfo,
    shape: ModelConfig,
    dtype: torch.dtype,
    parallel: Parallel,
) -> AttentionBackend:
    return create_backend(
        config.attention_backend,
        num_layers=shape.num_layers,
        num_pages=info.num_pages,
        page_size=info.page_size,
        num_kv_heads=parallel.kv_span(shape.num_kv_heads)[1],
        head_dim=shape.head_dim,
        dtype=dtype,
    )
