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
from services.common.model_files import ModelFiles, resolve
from services.common.model_metadata import read_metadata
from services.worker.config import WorkerConfig
from services.worker.core import EngineInfo
from services.worker.engine.building import RunnerBuilder
from services.worker.engine.cuda_memory import free_memory
from services.worker.engine.devices import choose_attention, choose_dtype
from services.worker.engine.rank_check import compare_ranks
from services.worker.engine.runner import ModelRunner
from services.worker.layers.parallel import Parallel
from services.worker.models import config as model_config
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.native.kernels import Kernels
from services.worker.sizing import choices
from services.worker.weights.gguf import GgufSource, rope_divisors
from services.worker.weights.loader import load_weights
from services.worker.weights.safetensors import SafetensorsSource
from services.worker.weights.source import WeightSource

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's model, ready to run, and what the engine turned out to be."""

    runner: ModelRunner
    info: EngineInfo


def load_model(
    config: WorkerConfig,
    parallel: Parallel,
    progress: Callable[[str, int, int], None],
    device: torch.device = CPU,
) -> LoadedModel:
    """Loads this rank's part of the model onto a device and makes its KV pool.

    Raises StartupError if the model cannot be served as configured.
    """
    files = resolve(config.model, progress=progress)
    shape = read_model_config(files)
    metadata = read_metadata(files)
    dtype = choose_dtype(config.dtype, device, shape.dtype)
    attention = choose_attention(config.attention_backend, device, dtype)
    free_before = free_memory(device) if device.type == "cuda" else 0
    with torch.device("meta"):
        model = Decoder(shape, dtype, device, parallel)
    kernels = _load_kernels(config, device, dtype)
    if kernels is not None:
        quick = config.deterministic or kernels.quick_linear
        model.compute_with(kernels, linear=quick, int8=config.quantization == "int8")
    if config.check_ranks:
        if device.type == "cuda" and not config.disable_cuda_graph:
            raise StartupError("--check-ranks needs --disable-cuda-graph on a GPU")
        compare_ranks(model, parallel)
    source = open_source(files, shape)
    with torch.inference_mode():
        load_weights(
            model, source, device, progress, ignored=("lm_head.weight",) if shape.tied else ()
        )
        if device.type == "cuda":
            model.stack_experts()
        if kernels is not None:
            model.fuse(kernels)
    context = choices.context(config, metadata, shape)
    max_prefill_tokens = choices.prefill_tokens(config, "cuda" if device.type == "cuda" else "cpu")
    builder = RunnerBuilder(
        config,
        model,
        shape,
        attention=attention,
        dtype=dtype,
        device=device,
        parallel=parallel,
        context=context,
        max_prefill_tokens=max_prefill_tokens,
    )
    pages = builder.num_pages(free_before)
    info = EngineInfo(
        model=config.served_model_name or files.name,
        fingerprint=_fingerprint(source.identity(), config, dtype, parallel.size),
        vocab_size=shape.vocab_size,
        max_model_len=min(context, pages * config.page_size),
        page_size=config.page_size,
        num_pages=pages,
        max_prefill_tokens=max_prefill_tokens,
        eos_token_ids=metadata.eos_token_ids,
    )
    return LoadedModel(builder.runner(pages, progress), info)


def _fingerprint(weights: bytes, config: WorkerConfig, dtype: torch.dtype, tp: int) -> str:
    """What workers that compute the same have in common."""
    mode = " deterministic" if config.deterministic else ""
    computed = f"{dtype} {config.quantization} tp={tp}{mode}"
    return hashlib.sha256(weights + computed.encode()).hexdigest()[:16]


def _load_kernels(config: WorkerConfig, device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The native kernels, where there are any for the device and the type.

    Raises StartupError if there are none, and eight-bit weights need them.
    """
    kernels = Kernels.load() if device.type == "cpu" and dtype == torch.float32 else None
    if config.quantization == "int8" and kernels is None:
        raise StartupError(
            "--quantization int8 needs the native kernels: a CPU, --dtype float32 and a C++"
            " compiler"
        )
    return kernels


def read_model_config(files: ModelFiles) -> ModelConfig:
    """The shape of a model. Raises StartupError on what Shoal cannot compute."""
    shape = model_config.read(files)
    if files.kind == "hf":
        return shape
    rope = dataclasses.replace(
        shape.rope, frequency_divisors=rope_divisors(read_header(files.path))
    )
    return dataclasses.replace(shape, rope=rope)


def open_source(files: ModelFiles, shape: ModelConfig) -> WeightSource:
    """The checkpoint's tensors. Raises StartupError if files are missing or broken."""
    if files.kind == "hf":
        return SafetensorsSource(files.path)
    return GgufSource(read_header(files.path), shape)
