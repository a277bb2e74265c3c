"""The kernels as functions of torch tensors.

Every tensor is float32 (indices int32), contiguous unless strides are read here,
and on the CPU. Arguments are the engine's own, so they are checked by assert.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.native import structures
from services.worker.native.build import instruction_set, library
from services.worker.native.packing import PackedWeight

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
HEAD_DIMS = frozenset({8, 16, 32, 64, 80, 96, 128})


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a batch, and the pools of all layers that they attend to.

    keys, values: [layers, pages, page_size, kv_heads, dim], any strides but the last.
    """

    keys: Tensor
    values: Tensor
    page_tables: Tensor  # [rows, pages a row], int32
    starts: Tensor  # [rows], int32
    query_lens: Tensor  # [rows], int32
    pages: Tensor  # [tokens], int32: where a token's K and V go
    slots: Tensor  # [tokens], int32
    scale: float  # what a dot product is multiplied by
    uniform: bool = False  # a token's sums run in one order whether it is decoded or prefilled

    def structure(self, heads: int, layer: int = 0) -> structures.Attention:
        """The same for C, with the pools of a layer; it points into the tensors."""
        keys, values = self.keys[layer], self.values[layer]
        _, page_size, kv_heads, dim = keys.shape
        assert keys.stride() == values.stride()
        assert keys.stride(3) == 1
        assert self.page_tables.stride(1) == 1
        for tensor in (self.page_tables, self.starts, self.query_lens, self.pages, self.slots):
            assert tensor.dtype == torch.int32
        return structures.Attention(
            keys.data_ptr(),
            values.data_ptr(),
            self.page_tables.data_ptr(),
            self.starts.data_ptr(),
            self.query_lens.data_ptr(),
            self.page_tables.stride(0),
            *keys.stride()[:3],
            len(self.starts),
            page_size,
            heads,
            kv_heads,
            dim,
            self.uniform,
            self.scale,
        )


class Kernels:
    """The loaded library."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._attention = handle.shoal_paged_attention
        self._attention.argtypes = [_POINTER] * 3
        self._attention.restype = _INT
        self._write = handle.shoal_kv_write
        self._write.argtypes = (
            [_POINTER] * 4 + [_LONG] * 2 + [_POINTER] * 2 + [_INT] * 3 + [_LONG] * 3
        )
        self._write.restype = None
        self._linear = handle.shoal_linear
        self._linear.argtypes = [_POINTER, _POINTER, _INT, _POINTER]
        self._linear.restype = None
        self._rms_norm = handle.shoal_rms_norm
        self._rms_norm.argtypes = [_POINTER] * 3 + [_INT] * 2 + [_FLOAT]
        self._rms_norm.restype = None
        self._silu_mul = handle.shoal_silu_mul
        self._silu_mul.argtypes = [_POINTER] * 2 + [_INT] * 2
        self._silu_mul.restype = None
        self._layers = handle.shoal_layers
        self._layers.argtypes = [_POINTER, _POINTER, _INT, _POINTER, _POINTER]
        self._layers.restype = _INT
        self._choose = handle.shoal_choose
        self._choose.argtypes = [_POINTER, _POINTER, _LONG, _POINTER, _INT, _INT]
        self._choose.restype = None
        self._penalize = handle.shoal_penalize
        self._penalize.argtypes = [_POINTER, _LONG, *[_POINTER] * 3, _INT, _INT]
        self._penalize.restype = None

    @classmethod
    def load(cls) -> Kernels | None:
        """The kernels, built if need be; None where there is no compiler."""
        path = library()
        if path is None:
            return None
        # Importing torch put its OpenMP runtime into the global scope, where the
        # library's undefined symbols are found.
        return cls(ctypes.CDLL(str(path)))

    @property
    def quick_linear(self) -> bool:
        """Whether `linear` is measured to beat oneDNN's product here: with AVX2 it takes 0.45 to
        1.0 of the time. With AVX-512, where oneDNN's vectors are twice as wide, nobody looked."""
        return instruction_set() == "x86-64-v3"

    def paged_attention(self, query: Tensor, rows: PagedRows, layer: int) -> Tensor:
        """Causal attention of each row's tokens to the row's pages of a layer, read in place.

        query: [tokens, heads, dim], rows one after the other -> the same
        """
        assert query.is_contiguous()
        out = torch.empty_like(query)
        attention = rows.structure(query.shape[1], layer)
        missing = self._attention(out.data_ptr(), query.data_ptr(), ctypes.byref(attention))
        assert not missing, f"no kernel for head size {query.shape[2]}"
        return out

    def kv_write(self, k: Tensor, v: Tensor, rows: PagedRows, layer: int) -> None:
        """Stores each token's k and v in its KV slot.

        k, v: [tokens, kv_heads, dim]; only the tokens' stride is free.
        """
        tokens, kv_heads, dim = k.shape
        keys, values = rows.keys[layer], rows.values[layer]
        assert keys.stride() == values.stride()
        assert k.stride()[1:] == v.stride()[1:] == (dim, 1)
        self._write(
            keys.data_ptr(),
            values.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            v.stride(0),
            rows.pages.data_ptr(),
            rows.slots.data_ptr(),
            tokens,
            kv_heads,
            dim,
            *keys.stride()[:3],
        )

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x W^T + bias. In float32 each output is one chain of multiply-adds over the inputs in
        order; in eight bits, of the sums of the groups in order.

        x: [rows, in] -> [rows, out]
        """
        x = x.contiguous()
        rows, in_size = x.shape
        assert in_size == weight.in_size
        out = torch.empty((rows, weight.out_size))
        self._linear(out.data_ptr(), x.data_ptr(), rows, ctypes.byref(weight.structure()))
        return out

    def layers(
        self,
        x: Tensor,
        layers: ctypes.Array[structures.Layer],
        angles: tuple[Tensor, Tensor],
        rows: PagedRows,
        heads: int,
        eps: float,
    ) -> None:
        """Runs all layers of a dense decoder on hidden states, in place.

        x: [tokens, hidden]; angles: cosines and sines, [tokens, 1, dim / 2] each, of which only
        the tokens' stride is free.
        """
        cos, sin = angles
        assert x.is_contiguous()
        assert cos.stride() == sin.stride()
        assert cos.stride(2) == 1
        tokens = structures.Tokens(
            cos.data_ptr(),
            sin.data_ptr(),
            rows.pages.data_ptr(),
            rows.slots.data_ptr(),
            cos.stride(0),
            rows.keys.stride(0),
            len(x),
            eps,
        )
        attention = rows.structure(heads)
        missing = self._layers(
            x.data_ptr(), layers, len(layers), ctypes.byref(tokens), ctypes.byref(attention)
        )
        assert not missing, f"no kernel for head size {attention.dim}"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis. x: [..., size]; weight: [size] -> as x"""
        x = x.contiguous()
        size = x.shape[-1]
        out = torch.empty_like(x)
        rows = x.numel() // size
        self._rms_norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, size, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. gate_up: [rows, 2 * size], gate first -> [rows, size]"""
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        out = torch.empty((rows, both // 2))
        self._silu_mul(out.data_ptr(), gate_up.data_ptr(), rows, both // 2)
        return out

    def choose(self, logits: Tensor, draws: npt.NDArray[np.void]) -> Tensor:
        """A token for each row: the likeliest where the temperature is 0, else drawn as
        `services.worker.engine.filters` draws.

        logits: [rows, vocab]; draws: [rows] of `structures.DRAW` -> ids [rows], int64
        """
        rows, vocab = logits.shape
        assert logits.stride(1) == 1
        assert draws.dtype == structures.DRAW
        ids = torch.empty(rows, dtype=torch.int64)
        self._choose(
            ids.data_ptr(), logits.data_ptr(), logits.stride(0), draws.ctypes.data, rows, vocab
        )
        return ids

    def penalize(
        self,
        logits: Tensor,
        outputs: Tensor,
        in_prompt: Tensor,
        penalties: npt.NDArray[np.void],
    ) -> None:
        """Applies presence, frequency and repetition penalties to some rows, in place.

        Args:
            logits: [rows, vocab].
            outputs: how often an id was chosen, int32, [counts rows, vocab].
            in_prompt: whether it is in the prompt, bool, the same.
            penalties: [penalised rows] of `structures.PENALTY`.
        """
        assert logits.stride(1) == 1
        assert outputs.is_contiguous()
        assert outputs.dtype == torch.int32
        assert in_prompt.is_contiguous()
        assert penalties.dtype == structures.PENALTY
        self._penalize(
            logits.data_ptr(),
            logits.stride(0),
            outputs.data_ptr(),
            in_prompt.data_ptr(),
            penalties.ctypes.data,
            len(penalties),
            logits.shape[1],
        )
