"""`python -m tests.worker.attention.flashinfer_signatures`, where FlashInfer is installed.

Binds the calls that the backend makes to the signatures of the library, without a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raises TypeError if the function does not take the arguments."""
    inspect.signature(function).bind(*args, **kwargs)


def main() -> None:
    """Binds every call of `services.worker.attention.flashinfer`."""
    import flashinfer

    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    planned = {
        "pos_encoding_mode": "NONE",
        "window_left": -1,
        "sm_scale": 1.0,
        "q_data_type": None,
        "kv_data_type": None,
        "non_blocking": True,
        "seq_lens": None,
    }
    fixed = {
        "paged_kv_indptr_buffer": None,
        "paged_kv_indices_buffer": None,
        "paged_kv_last_page_len_buffer": None,
    }
    bind(decode, 0, "NHD", use_cuda_graph=True, use_tensor_cores=True, backend="fa2", **fixed)
    bind(decode._plan_impl, 0, 1, 2, 3, 4, 5, 6, 7, **planned)  # what `plan` passes on to
    bind(decode.run, 0, 1, 2, out=3)
    bind(decode.reset_workspace_buffer, 0, 1, 2)
    bind(prefill, 0, "NHD", backend="fa2")
    bind(prefill.plan, 0, 1, 2, 3, 4, 5, 6, 7, 8, causal=True, **planned)
    bind(prefill.run, 0, 1, 2, out=3)
    bind(prefill.reset_workspace_buffer, 0, 1, 2)
    bind(flashinfer.append_paged_kv_cache, *range(8), kv_layout="NHD")


if __name__ == "__main__":
    main()
