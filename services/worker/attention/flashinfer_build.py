"""Builds ahead the FlashInfer modules that the backend asks for; else each is built at its
first use, which takes minutes and a CUDA compiler.

    python -m services.worker.attention.flashinfer_build [--install] [--arch 9.0a]

Needs nvcc and no GPU. With --install the modules go into the installed package, where it
finds them without a compiler and without a place to write: so images are made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from services.worker.attention.flashinfer_limits import DTYPES, HEAD_DIMS

_ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"


def modules(head_dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Any]:
    """The modules, as flashinfer's build specifications: KV append, prefill and decode.

    Decode on tensor cores runs the prefill module.
    """
    from flashinfer import aot
    from flashinfer.jit.page import gen_page_module

    yield gen_page_module()
    for dtype in dtypes:
        for head_dim in head_dims:
            yield from aot.gen_fa2(
                dtype_qo=dtype,
                dtype_kv=dtype,
                head_dim_qk=head_dim,
                head_dim_vo=head_dim,
                use_sliding_window=False,
                use_logits_soft_cap=False,
            )


def build(head_dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Path]:
    """Builds what is not built yet, and returns the libraries.

    Raises RuntimeError if nvcc fails, with what it said.
    """
    from flashinfer.jit.core import build_jit_specs

    specs = list(modules(head_dims, dtypes))
    build_jit_specs(specs, verbose=False)
    return [Path(spec.get_library_path()) for spec in specs]


def install(libraries: Sequence[Path]) -> list[Path]:
    """Copies libraries to where the package looks first; returns their new places."""
    from flashinfer.jit import env

    placed = []
    for library in libraries:
        target = Path(env.FLASHINFER_AOT_DIR) / library.stem / library.name
        if target != library:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)
        placed.append(target)
    return placed


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="flashinfer_build", description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=[64, 128])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--arch", default="", help="'9.0a', '8.0 9.0a'; default: the GPU's")
    parser.add_argument("--install", action="store_true", help="put them into the package")
    options = parser.parse_args(argv)
    if options.arch:
        os.environ[_ARCHITECTURES] = options.arch  # read when flashinfer is first imported
    libraries = build(options.head_dim, [getattr(torch, name) for name in options.dtype])
    for library in install(libraries) if options.install else libraries:
        print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
