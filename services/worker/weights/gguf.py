"""Weights from a GGUF file, dequantized by the `gguf` package to float32.

GGUF names are translated to Hugging Face's. llama.cpp's converter reorders the rows
of q and k of Llama models, so that RoPE turns neighbouring pairs; here the order is
put back.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, quants

from services.common.errors import StartupError
from services.common.gguf_header import GgufHeader
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
_PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


class GgufSource:
    """One GGUF file.

    Raises StartupError if it cannot be read.
    """

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        self._header = header
        self._path = header.path
        self._config = config
        self._stored = {
            hf_name(name): name for name in header.tensor_shapes if name != _ROPE_DIVISORS
        }
        self._cached: tuple[str, torch.Tensor] | None = None

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._header.tensor_shapes[self._stored[name]]))

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
            self._cached = name, torch.from_numpy(self._dequantized(name))
        return self._cached[1]

    def _dequantized(self, name: str) -> npt.NDArray[np.float32]:
        data = dequantize(self._header, self._stored[name])
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


def rope_divisors(header: GgufHeader) -> tuple[float, ...]:
    """The file's own frequency scaling (Llama 3.1 and later), empty if it has none."""
    if _ROPE_DIVISORS not in header.tensor_shapes:
        return ()
    return tuple(dequantize(header, _ROPE_DIVISORS).tolist())


def dequantize(header: GgufHeader, name: str) -> npt.NDArray[np.float32]:
    """A tensor by its GGUF name, outermost axis first.

    Raises StartupError if the file is too short or the `gguf` package lacks the type.
    """
    number, offset = header.tensor_places[name]
    shape = tuple(reversed(header.tensor_shapes[name]))
    try:
        kind = GGMLQuantizationType(number)
        stored_shape = quants.quant_shape_to_byte_shape(shape, kind)
        # As a plain array: the memmap class costs time on each of dequantize's many views.
        data: npt.NDArray[Any] = np.memmap(header.path, np.uint8, "r", offset, stored_shape).view(
            np.ndarray
        )
        if kind in _PLAIN:
            data = data.view(_PLAIN[kind])
        values: npt.NDArray[np.float32] = quants.dequantize(data, kind)
    except (NotImplementedError, ValueError, KeyError) as error:
        raise StartupError(f"{header.path}: cannot dequantize tensor {name}: {error}") from error
    return np.require(values, np.float32, ["W"]).reshape(shape)


def _restore_row_order(data: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Pairs (2i, 2i+1) of each head go back to (i, i + head_dim / 2)."""
    rows = data.reshape(heads, -1, 2, *data.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(data.shape))
