"""The images of gateway and tokenizer, built and looked into. Takes minutes: SHOAL_FULL=1 only.

Needs buildah, and a base image: SHOAL_TEST_BASE_IMAGE, or the Dockerfile's own from its registry.
Package indexes and their files that the host has are given to the build.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess

import pytest

from tests.deploy.charts import ROOT
from tests.full import FULL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FULL, reason="builds images: SHOAL_FULL=1"),
]

MAX_BYTES = 400 * 10**6  # unpacked
# As in containers themselves: the kernel's overlays and namespaces may not be there.
ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
LOOK = """
import importlib.util, json, shutil, sys
from services.common.model_files import resolve
found = lambda names, find: [name for name in names if find(name)]
print(json.dumps({
    "packages": found(["torch", "transformers", "pip", "services"], importlib.util.find_spec),
    "programs": found(["gcc", "cc", "g++", "pip", "tini", "shoal"], shutil.which),
}))
"""


def _buildah(*arguments: str) -> str:
    done = subprocess.run(
        ["buildah", *arguments],
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    if done.returncode:
        raise AssertionError(
            f"buildah {' '.join(arguments)}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


@functools.cache
def _base() -> str:
    """The base image's flag. Skips where it cannot be had."""
    if shutil.which("buildah") is None:
        pytest.skip("there is no buildah")
    if given := os.environ.get("SHOAL_TEST_BASE_IMAGE"):
        return f"--build-arg=BASE={given}"
    default = "docker.io/library/debian:bookworm-slim"
    try:
        _buildah("pull", "-q", default)
    except AssertionError:
        pytest.skip(f"{default} cannot be pulled, and SHOAL_TEST_BASE_IMAGE names no other")
    return f"--build-arg=BASE={default}"


@pytest.mark.parametrize("target", ["gateway", "tokenizer"])
def test_an_image_is_small_and_can_do_its_work_alone(target: str) -> None:
    base = _base()
    name = f"shoal-test-{target}"
    wheels = os.environ.get("SHOAL_TEST_WHEELS", "")
    extra = [f"--volume={wheels}:{wheels}:ro"] if wheels else []
    options = ["--format=docker", "--network=host", "--layers", f"--target={target}", base, *extra]
    ignore = "--ignorefile=deploy/Dockerfile.dockerignore"
    _buildah("bud", "-q", *options, ignore, "--file=deploy/Dockerfile", f"--tag={name}", ".")
    (image,) = json.loads(_buildah("images", "--json", f"localhost/{name}"))
    print(f"{target}: {image['size']} unpacked")
    described = json.loads(_buildah("inspect", "--type=image", f"localhost/{name}"))["Docker"]
    config = described["config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "shoal"]
    assert "readyz" in config["Healthcheck"]["Test"][-1]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"

    container = _buildah("from", "--pull-never", f"localhost/{name}").strip()
    try:
        assert _size(_buildah("mount", container).strip()) < MAX_BYTES

        def run(*command: str) -> str:
            return _buildah("run", "--user=10001:10001", container, "--", *command)

        assert json.loads(run("python", "-c", LOOK)) == {
            "packages": ["services"],
            "programs": ["tini", "shoal"],
        }
        assert run("shoal", target, "--help").startswith(f"usage: shoal {target}")
        if target == "tokenizer":  # whose embedded model is a header alone
            code = "from services.common.text.vocabulary import build_vocabulary as b; "
            code += "print(b('').tokenizer.encode('Paris').ids)"
            assert json.loads(run("python", "-c", code))
    finally:
        _buildah("rm", container)


def _size(directory: str) -> int:
    """Bytes of all files below."""
    done = subprocess.run(
        ["du", "-sb", directory], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout.split()[0])
