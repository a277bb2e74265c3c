"""The kernels as functions of torch tensors.

Every tensor is float32 (indices int32), contiguous unless strides are read here,
and on the CPU. Arguments are the engine's own, so they are checked by assert.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from services.worker.native.build import instruction_set, library

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
PANEL = 16  # outputs that a linear kernel computes together, as in kernels.cpp
HEAD_DIMS = frozenset({8, 16, 32, 64, 80, 96, 128})


class Kernels:
    """The loaded library."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._attention = handle.shoal_paged_attention
        self._attention.argtypes = (
            [_POINTER] * 5 + [_LONG] + [_POINTER] * 2 + [_INT] * 5 + [_LONG] * 3 + [_FLOAT, _INT]
        )
        self._attention.restype = _INT
        self._write = handle.shoal_kv_write
        self._write.argtypes = (
            [_POINTER] * 4 + [_LONG] * 2 + [_POINTER] * 2 + [_INT] * 3 + [_LONG] * 3
        )
        self._write.restype = None
        self._linear = handle.shoal_linear
        self._linear.argtypes = [_POINTER] * 4 + [_INT] * 3
        self._linear.restype = None
        self._rms_norm = handle.shoal_rms_norm
        self._rms_norm.argtypes = [_POINTER] * 3 + [_INT] * 2 + [_FLOAT]
        self._rms_norm.restype = None
        self._silu_mul = handle.shoal_silu_mul
        self._silu_mul.argtypes = [_POINTER] * 2 + [_INT] * 2
        self._silu_mul.restype = None

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

    def paged_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        page_tables: Tensor,
        starts: Tensor,
        query_lens: Tensor,
        scale: float,
        *,
        uniform: bool = False,
    ) -> Tensor:
        """Causal attention of each row's tokens to the row's pages, read in place.

        Args:
            query: [tokens, heads, dim], rows one after the other.
            keys, values: [pages, page_size, kv_heads, dim], any strides but the last.
            page_tables: [rows, pages a row]; starts, query_lens: [rows], int32.
            scale: what a dot product is multiplied by.
            uniform: a token's sums run in one order whether it is decoded or prefilled.

        Returns:
            [tokens, heads, dim].
        """
        tokens, heads, dim = query.shape
        _, page_size, kv_heads, _ = keys.shape
        assert query.is_contiguous()
        assert keys.stride() == values.stride()
        assert keys.stride(3) == 1
        assert page_tables.stride(1) == 1
        assert page_tables.dtype == starts.dtype == query_lens.dtype == torch.int32
        out = torch.empty((tokens, heads, dim))
        missing = self._attention(
            out.data_ptr(),
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            page_tables.data_ptr(),
            page_tables.stride(0),
            starts.data_ptr(),
            query_lens.data_ptr(),
            len(starts),
            heads,
            kv_heads,
            dim,
            page_size,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            scale,
            uniform,
        )
        assert not missing, f"no kernel for head size {dim}"
        return out

    def kv_write(
        self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, pages: Tensor, slots: Tensor
    ) -> None:
        """Stores each token's k and v in its KV slot.

        Args:
            keys, values: [pages, page_size, kv_heads, dim], written in place.
            k, v: [tokens, kv_heads, dim]; only the tokens' stride is free.
            pages, slots: [tokens], int32: where each token goes.
        """
        tokens, kv_heads, dim = k.shape
        assert keys.stride() == values.stride()
        assert k.stride()[1:] == v.stride()[1:] == (dim, 1)
        assert pages.dtype == slots.dtype == torch.int32
        self._write(
            keys.data_ptr(),
            values.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            v.stride(0),
            pages.data_ptr(),
            slots.data_ptr(),
            tokens,
            kv_heads,
            dim,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
        )

    def linear(self, x: Tensor, packed: Tensor, out_size: int, bias: Tensor | None) -> Tensor:
        """x W^T + bias; each output is one chain of multiply-adds over the inputs in order.

        Args:
            x: [rows, in].
            packed: W as `pack_linear` lays it out.
            out_size: how many outputs there are.
            bias: [out_size], or None.

        Returns:
            [rows, out_size].
        """
        x = x.contiguous()
        rows, in_size = x.shape
        assert packed.shape == (-(-out_size // PANEL), in_size, PANEL)
        out = torch.empty((rows, out_size))
        self._linear(
            out.data_ptr(),
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows,
            in_size,
            out_size,
        )
        return out

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


def pack_linear(weight: Tensor) -> Tensor:
    """A weight [out, in] as `Kernels.linear` reads it: [panels, in, PANEL], zeros at the end."""
    out_size, in_size = weight.shape
    panels = -(-out_size // PANEL)
    padded = weight.new_zeros(panels * PANEL, in_size)
    padded[:out_size] = weight
    return padded.view(panels, PANEL, in_size).transpose(1, 2).contiguous()
