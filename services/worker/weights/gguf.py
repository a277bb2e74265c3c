"""Weights from a GGUF file, dequantized by the `gguf` package to float32.

GGUF names are translated to Hugging Face's. llama.cpp's converter reorders the rows
of q and k of Llama models, so that RoPE turns neighbouring pairs; here the order is
put back.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.common.errors import StartupError
from services.worker.models.config import ModelConfig

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufSource:
    """One GGUF file.

    Raises StartupError if it cannot be read.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        from gguf import GGUFReader

        self._path = path
        self._config = config
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot read {path}: {error}") from error
        self._tensors = {
            hf_name(tensor.name): tensor
            for tensor in reader.tensors
            if tensor.name != _ROPE_DIVISORS
        }
        self._cached: tuple[str, torch.Tensor] | None = None

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, axis: int, start: int, length: int) -> torch.Tensor:
        return self._whole(name).narrow(axis, start, length)

    def identity(self) -> bytes:
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            header = file.read(1 << 16)
            file.seek(size // 2)
            return hashlib.sha256(b"%d " % size + header + file.read(1 << 12)).digest()

    def _whole(self, name: str) -> torch.Tensor:
        """The tensor dequantized; the last one is kept, as tied weights ask twice."""
        if self._cached is None or self._cached[0] != name:
            self._cached = name, torch.from_numpy(self._dequantize(name, self._tensors[name]))
        return self._cached[1]

    def _dequantize(self, name: str, tensor: Any) -> npt.NDArray[np.float32]:
        from gguf import quants

        try:
            data: npt.NDArray[np.float32]
            data = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            raise StartupError(
                f"{self._path}: tensor {name} has type {tensor.tensor_type.name}, which the gguf"
                " package cannot dequantize"
            ) from error
        data = data.reshape(self.shape(name))
        if self._config.family == "llama":
            if ".q_proj." in name:
                return _restore_row_order(data, self._config.num_heads)
            if ".k_proj." in name:
                return _restore_row_order(data, self._config.num_kv_heads)
        return data


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if block == "blk" and part in _LAYER:
        return f"model.layers.{number}.{_LAYER[part]}.{kind}"
    return name


def rope_divisors(path: Path) -> tuple[float, ...]:
    """The file's own frequency scaling (Llama 3.1 and later), empty if it has none."""
    from gguf import GGUFReader

    for tensor in GGUFReader(path).tensors:
        if tensor.name == _ROPE_DIVISORS:
            return tuple(float(value) for value in tensor.data)
    return ()


def _restore_row_order(data: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Pairs (2i, 2i+1) of each head go back to (i, i + head_dim / 2)."""
    rows = data.reshape(heads, -1, 2, *data.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(data.shape))
