"""The kernels as functions of torch tensors.

Every tensor is float32 (indices int32), contiguous unless strides are read here,
and on the CPU. Arguments are the engine's own, so they are checked by assert.
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch
from torch import Tensor

from services.worker.native.build import library

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
HEAD_DIMS = frozenset({8, 16, 32, 64, 80, 96, 128})


class Kernels:
    """The loaded library."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._attention = handle.shoal_paged_attention
        self._attention.argtypes = (
            [_POINTER] * 5 + [_LONG] + [_POINTER] * 2 + [_INT] * 5 + [_LONG] * 3 + [_FLOAT]
        )
        self._attention.restype = _INT
        self._rope = handle.shoal_rope_kv_write
        self._rope.argtypes = [_POINTER] * 8 + [_INT] * 4 + [_LONG] * 3
        self._rope.restype = None
        self._norm = handle.shoal_add_rms_norm
        self._norm.argtypes = [_POINTER] * 4 + [_INT] * 2 + [_FLOAT]
        self._norm.restype = None
        self._silu = handle.shoal_silu_mul
        self._silu.argtypes = [_POINTER] * 2 + [_INT] * 2
        self._silu.restype = None

    @classmethod
    def load(cls) -> Kernels | None:
        """The kernels, built if need be; None where there is no compiler."""
        path = library()
        if path is None:
            return None
        # Importing torch put its OpenMP runtime into the global scope, where the
        # library's undefined symbols are found.
        return cls(ctypes.CDLL(str(path)))

    def paged_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        page_tables: Tensor,
        starts: Tensor,
        query_lens: Tensor,
        scale: float,
    ) -> Tensor:
        """Causal attention of each row's tokens to the row's pages, read in place.

        Args:
            query: [tokens, heads, dim], rows one after the other.
            keys, values: [pages, page_size, kv_heads, dim], any strides but the last.
            page_tables: [rows, pages a row]; starts, query_lens: [rows], int32.
            scale: what a dot product is multiplied by.

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
        )
        assert not missing, f"no kernel for head size {dim}"
        return out

    def rope_kv_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        pages: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: int,
    ) -> Tensor:
        """Rotates q and k, writes k and v into the pool, and returns q.

        Args:
            qkv: [tokens, (heads + 2 kv_heads) * dim].
            cos_sin: [positions, dim]: cosines, then sines, of dim / 2 angles.
            positions, pages, slots: [tokens], int32: where each token is.
            keys, values: [pages, page_size, kv_heads, dim], written in place.

        Returns:
            [tokens, heads, dim].
        """
        tokens = len(qkv)
        _, _, kv_heads, dim = keys.shape
        assert qkv.is_contiguous()
        assert cos_sin.is_contiguous()
        assert keys.stride() == values.stride()
        assert positions.dtype == pages.dtype == slots.dtype == torch.int32
        query = torch.empty((tokens, heads, dim))
        self._rope(
            query.data_ptr(),
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            pages.data_ptr(),
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            tokens,
            heads,
            kv_heads,
            dim,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
        )
        return query

    def add_rms_norm(
        self, residual: Tensor, x: Tensor | None, weight: Tensor, epsilon: float
    ) -> Tensor:
        """Adds x to the residual in place, and returns the residual's RMS norm times weight.

        residual, x and the result: [rows, width]; weight: [width].
        """
        assert residual.is_contiguous()
        assert x is None or x.is_contiguous()
        out = torch.empty_like(residual)
        pointer = cast(int, x.data_ptr()) if x is not None else None
        rows, width = residual.shape
        self._norm(
            out.data_ptr(), residual.data_ptr(), pointer, weight.data_ptr(), rows, width, epsilon
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [rows, 2 * width], gate first; the result is [rows, width]."""
        assert gate_up.is_contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width))
        self._silu(out.data_ptr(), gate_up.data_ptr(), rows, width)
        return out
