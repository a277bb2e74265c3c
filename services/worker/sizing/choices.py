"""What the flags that say "work it out" come to, where a model's files and the device tell."""

from __future__ import annotations

import logging
from typing import Literal

from services.common.model_metadata import ModelMetadata
from services.worker.config import WorkerConfig
from services.worker.models.config import ModelConfig

log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_PREFILL_TOKENS: dict[Device, int] = {"cpu": 512, "cuda": 8192}


def dtype(name: str, device: Device, stored: str) -> Dtype:
    """The type of `--dtype`. auto is float32 on a CPU; on CUDA the checkpoint's own type where
    it has 16 bits, else bfloat16."""
    for known in BYTES:
        if name == known:
            return known
    if device == "cpu":
        return "float32"
    return "float16" if stored.removeprefix("torch.") == "float16" else "bfloat16"


def prefill_tokens(config: WorkerConfig, device: Device) -> int:
    """The most prompt tokens in one batch."""
    return config.max_prefill_tokens or _PREFILL_TOKENS[device]


def context(config: WorkerConfig, metadata: ModelMetadata, shape: ModelConfig) -> int:
    """The most tokens of a request, as the model and `--max-model-len` have it."""
    longest = metadata.context_length
    if shape.sliding_window is not None and shape.sliding_window < longest:
        log.info("context capped at the sliding window: %d of %d", shape.sliding_window, longest)
        longest = shape.sliding_window
    if config.max_model_len > longest:
        log.info("--max-model-len %d is above the model's context", config.max_model_len)
    return min(longest, config.max_model_len or longest)


def graph_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, then every 16, and the largest itself; none if that is 0."""
    sizes = {1, 2, 4, 8, *range(16, largest + 1, 16), largest}
    return sorted(size for size in sizes if 0 < size <= largest)
