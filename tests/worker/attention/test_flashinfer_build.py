"""Opt-in: builds the modules that the backend asks for, with nvcc and without a GPU.

`make check-cuda-build` runs it. FlashInfer is installed apart, without its dependencies, so
that the environment's torch stays; what is built is the code for sm_90, which is not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "flashinfer-python==0.7.4",
    "apache-tvm-ffi<0.2",
    "ninja",
    "einops",
    "nvidia-ml-py",
    "tabulate",
    "filelock",
    "packaging",
)
ASKED = "SHOAL_CHECK_CUDA_BUILD"

pytestmark = pytest.mark.skipif(
    os.environ.get(ASKED) != "1", reason="takes up to an hour of nvcc; make check-cuda-build"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds FlashInfer, a CUDA toolkit and a driver to link with."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    cache = Path(os.environ.get("SHOAL_CUDA_BUILD_DIR") or tmp_path_factory.mktemp("cuda"))
    packages, stubs = cache / "packages", cache / "stubs"
    if not (packages / "flashinfer").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(packages), *PACKAGES], check=True)
    # Without a driver there is no libcuda to link with; its symbols are found when it is loaded.
    stubs.mkdir(exist_ok=True)
    (stubs / "empty.c").write_text("")
    subprocess.run(
        ["gcc", "-shared", "-o", str(stubs / "libcuda.so"), str(stubs / "empty.c")], check=True
    )
    return {
        **os.environ,
        "CUDA_HOME": os.environ.get("CUDA_HOME") or _toolkit(Path(nvcc)),
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "LIBRARY_PATH": f"{stubs}:{os.environ.get('LIBRARY_PATH', '')}",
        "PYTHONPATH": f"{packages}:{ROOT}",
    }


def _toolkit(nvcc: Path) -> str:
    """The toolkit's directory: nvcc itself knows where its headers are."""
    said = subprocess.run([str(nvcc), "-dryrun", "-x", "cu", "/dev/null"], capture_output=True)
    for line in said.stderr.decode().splitlines():
        if "TOP=" in line:
            return os.path.realpath(line.partition("TOP=")[2].strip())
    return str(nvcc.resolve().parents[1])


def test_every_module_builds(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "services.worker.attention.flashinfer_build"]
    done = subprocess.run(
        [*command, "--head-dim", "64", "128", "--dtype", "bfloat16", "float16"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    libraries = [Path(line) for line in done.stdout.splitlines() if line.endswith(".so")]
    assert len(libraries) == 9  # append, and prefill and decode of two types and two head sizes
    assert all(library.stat().st_size > 100_000 for library in libraries)


def test_the_library_takes_the_arguments_that_the_backend_gives(
    environment: dict[str, str],
) -> None:
    command = [sys.executable, "-m", "tests.worker.attention.flashinfer_signatures"]
    subprocess.run(command, env=environment, check=True)
