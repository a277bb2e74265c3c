"""The kernels as functions of torch tensors.

Every tensor is float32 (indices int32), contiguous unless strides are read here,
and on the CPU. Arguments are the engine's own, so they are checked by assert.
"""

from __future__ import annotations

import ctypes

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
        self._write = handle.shoal_kv_write
        self._write.argtypes = (
            [_POINTER] * 4 + [_LONG] * 2 + [_POINTER] * 2 + [_INT] * 3 + [_LONG] * 3
        )
        self._write.restype = None

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
