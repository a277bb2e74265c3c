"""Compiles the kernels, once per source and instruction set.

`python -m services.worker.native.build` builds ahead of time, for images that
have no compiler when they run; otherwise the first engine that starts builds.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from services.common.errors import StartupError

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")  # includes the headers beside it

# -ffast-math is not among them: it would let sums be reordered.
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"),
)


def instruction_set() -> str:
    """The -march of the best kernels this machine can run; empty for the compiler's default."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].split("\n")[0].split())
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma"} <= flags:
            return "cascadelake" if "avx512_vnni" in flags else "x86-64-v4"
        if {"avx2", "fma", "bmi2", "f16c"} <= flags:
            return "x86-64-v3"
    return ""


def library() -> Path | None:
    """The compiled kernels for this machine, built now if need be; None without a compiler.

    Looks beside the source first (where an image puts them), then in the user's cache.
    """
    march = instruction_set()
    name = _file_name(march)
    for folder in (SOURCE.parent, _cache_dir()):
        if (folder / name).exists():
            return folder / name
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    try:
        return _compile(compiler, march, _cache_dir() / name)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        log.warning("could not build the CPU kernels: %s", detail.strip()[-500:])
        return None


def is_built() -> bool:
    """Whether the kernels for this machine are there already."""
    name = _file_name(instruction_set())
    return any((folder / name).exists() for folder in (SOURCE.parent, _cache_dir()))


def _file_name(march: str) -> str:
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return f"kernels-{march or platform.machine()}-{digest.hexdigest()[:16]}.so"


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "shoal"


def _compile(compiler: str, march: str, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = [*_FLAGS, *([f"-march={march}"] if march else [])]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # -fopenmp when compiling and not when linking: the runtime's symbols come
        # from the libgomp that torch has loaded, so that there is one pool of threads.
        object_file, shared = f"{folder}/kernels.o", f"{folder}/kernels.so"
        for command in (
            [compiler, *flags, "-fopenmp", "-c", str(SOURCE), "-o", object_file],
            [compiler, "-shared", object_file, "-o", shared],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(shared, target)  # whole or not at all, also with two builders
    return target


def main() -> None:
    """Builds beside the source for the instruction sets named, or for this machine's."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise StartupError("no C++ compiler: apt-get install g++, or set CXX")
    for march in sys.argv[1:] or [instruction_set()]:
        print(_compile(compiler, march, SOURCE.parent / _file_name(march)))


if __name__ == "__main__":
    try:
        main()
    except StartupError as error:
        sys.exit(f"shoal: {error}")
