"""What this machine has: Python, packages, torch, a compiler, cores, memory, files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from services.client.doctor.finding import Finding, ok, problem, warning
from services.common.cores import available_cores
from services.fleet.gpus import visible_gpus
from services.worker.sizing.pool import gib, memory_limit

_EXTRAS = ("gateway", "tokenizer", "worker")
_OLDEST = (3, 11)
_GIB = 1 << 30
_FEW_FILES = 4096
_LITTLE_SHM = 256 << 20
_LITTLE_DISK = 2 * _GIB
_TORCH_SECONDS = 180
_ASK_TORCH = """
import json, importlib.util, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "gpus": [
        [torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)] for i in range(count)
    ], "flashinfer": importlib.util.find_spec("flashinfer") is not None,
}))
"""


def check_python() -> Finding:
    """Whether the interpreter is new enough."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _OLDEST:
        return problem("python", f"Python {version} is too old: install 3.11 or newer")
    return ok("python", f"Python {version}")


def check_packages() -> Iterator[Finding]:
    """Installed versions against what Shoal asks for, extra by extra."""
    try:
        wanted = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        yield warning("packages", "Shoal is not installed as a package: its needs are not known")
        return
    requirements = [Requirement(text) for text in wanted]
    for extra in ("", *_EXTRAS):
        named = [one for one in requirements if _belongs(one, extra)]
        wrong = [text for one in named if (text := _mismatch(one))]
        what = f"the extra {extra!r}" if extra else "Shoal itself"
        install = f"pip install 'shoal[{extra}]'" if extra else "pip install shoal"
        if not wrong:
            yield ok("packages", f"all {len(named)} packages of {what} fit")
        elif extra and all(text.endswith("missing") for text in wrong):
            text = f"{what} is not whole ({', '.join(wrong)}); to run it: {install}"
            yield warning("packages", text)
        else:
            yield problem("packages", f"{what}: {', '.join(wrong)}; install with: {install}")


def check_torch() -> Iterator[Finding]:
    """torch, CUDA, FlashInfer, and the compiler of the CPU's kernels."""
    if importlib.util.find_spec("torch") is None:
        yield warning("torch", "not installed; a worker needs it: pip install 'shoal[worker]'")
        return
    ask = [sys.executable, "-c", _ASK_TORCH]
    try:  # in a process of its own: it is large, and may crash or hang on a bad driver
        done = subprocess.run(ask, capture_output=True, text=True, timeout=_TORCH_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"its import does not end within {_TORCH_SECONDS} s: does nvidia-smi hang as well?"
        yield problem("torch", text)
        return
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it crashed"])[-1]
        yield problem("torch", f"cannot be imported ({reason}): install it anew")
        return
    said = json.loads(done.stdout)
    gpus = visible_gpus()
    if said["gpus"]:
        yield from _check_gpus(said)
    elif gpus and said["cuda"] is None:
        yield problem(
            "GPU",
            f"there are {len(gpus)} GPUs, and torch {said['torch']} is built for CPUs: install a"
            " CUDA build (docs/gpu.md)",
        )
    elif gpus:
        yield problem("GPU", f"torch {said['torch']} sees none of {len(gpus)} GPUs: is the driver"
                      f" as new as CUDA {said['cuda']}?")  # fmt: skip
    else:
        yield ok("GPU", f"none; torch {said['torch']} computes on the CPU")


def check_compiler() -> Finding:
    """Whether the CPU's kernels are there, or can be built."""
    from services.worker.native.build import is_built

    if is_built():
        return ok("compiler", "the CPU kernels are built")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return warning("compiler", "no C++ compiler: attention on a CPU is several times slower;"
                       " apt-get install g++")  # fmt: skip
    return ok("compiler", f"{compiler} will build the CPU kernels at the first start")


def check_resources(shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Cores, memory, open files, shared memory and disk."""
    cores, memory = available_cores(), memory_limit()
    yield (
        ok("cores", f"{cores} for this process")
        if cores > 1
        else warning("cores", "one core: the gateway and the model share it; give it two or more")
    )
    few = memory < 2 * _GIB
    text = f"{gib(memory)} for this process"
    yield (
        problem("memory", f"{text}: too little even for the embedded model, which needs 2")
        if (few)
        else ok("memory", text)
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        yield warning("open files", f"at most {hard}: raise the hard limit (ulimit -Hn 65536)")
    else:
        most = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard:,}"
        yield ok("open files", most)
    if shm.is_dir() and (size := shutil.disk_usage(shm).total) < _LITTLE_SHM:
        yield warning("shared memory", f"{shm} has {size >> 20} MiB: tensor parallel needs more"
                      " (docker run --shm-size 1g)")  # fmt: skip
    else:
        yield ok("shared memory", f"{shm} is large enough" if shm.is_dir() else "not needed here")
    cache = Path(os.environ.get("HF_HOME", "~/.cache")).expanduser()
    while not cache.exists():
        cache = cache.parent
    free = shutil.disk_usage(cache).free
    text = f"{gib(free)} free at {cache}, where models are kept"
    yield ok("disk", text) if free >= _LITTLE_DISK else warning("disk", f"only {text}: make room")


def _check_gpus(said: dict[str, list[list[str]]]) -> Iterator[Finding]:
    for name, major, minor in said["gpus"]:
        if int(major) < 8:
            yield problem("GPU", f"{name} has compute capability {major}.{minor}; FlashInfer's"
                          " kernels need 8.0: say --device cpu")  # fmt: skip
        else:
            yield ok("GPU", f"{name}, compute capability {major}.{minor}")
    if not said["flashinfer"]:
        text = "not installed, so the GPUs are not used; pip install 'shoal[cuda]'"
        yield problem("FlashInfer", text)


def _belongs(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    if marker is None:
        return not extra
    return marker.evaluate({"extra": extra}) and (not extra or not marker.evaluate({"extra": ""}))


def _mismatch(requirement: Requirement) -> str:
    if requirement.name == "shoal":
        return ""  # an extra that is made of others
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} missing"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} {version} where {requirement.specifier} is needed"
