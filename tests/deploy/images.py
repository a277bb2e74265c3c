"""Builds the images with buildah and runs them with podman, in containers without an init system.

SHOAL_TEST_BASE_IMAGE names a base image where the Dockerfile's own cannot be pulled, and
SHOAL_TEST_WHEELS a directory laid out as a package index for what pip's own lacks: torch for CPUs,
in torch/ beside an index.html that links to the wheel, since pip lists no directories.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from tests.deploy.charts import ROOT

DEFAULT_BASE = "docker.io/library/debian:bookworm-slim"
# As in containers themselves: the kernel's overlays and namespaces may not be there.
ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
RESTRICTED = [
    *("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"),
    *("--ulimit=nofile=20000:20000", "--ulimit=nproc=10000:10000"),
]


class Unavailable(Exception):
    """Images cannot be built here; the message says why."""


def run(*command: str, timeout: float = 60) -> str:
    """What a command said. Raises AssertionError, with its last words, if it failed."""
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


class Images:
    """Builds each target once. `remove` takes away every image that was made."""

    def __init__(self) -> None:
        """Raises Unavailable."""
        if shutil.which("buildah") is None:
            raise Unavailable("there is no buildah")
        self._base = os.environ.get("SHOAL_TEST_BASE_IMAGE", "")
        self._wheels = os.environ.get("SHOAL_TEST_WHEELS", "")
        self._built: dict[str, str] = {}
        if not self._base:
            try:
                run("buildah", "pull", "-q", DEFAULT_BASE, timeout=600)
            except AssertionError:
                reason = (
                    f"{DEFAULT_BASE} cannot be pulled, and SHOAL_TEST_BASE_IMAGE names no other"
                )
                raise Unavailable(reason) from None
            self._base = DEFAULT_BASE

    def name(self, target: str) -> str:
        """The image of a target, which is built if it was not yet."""
        if target not in self._built:
            self._build(target)
        return self._built[target]

    def _build(self, target: str) -> None:
        name = f"localhost/shoal-test-{target}"
        options = ["--format=docker", "--network=host", f"--target={target}", f"--tag={name}"]
        options.append(f"--build-arg=BASE={self._base}")
        options.append("--ignorefile=deploy/Dockerfile.dockerignore")
        if self._wheels:
            options.append(f"--volume={self._wheels}:{self._wheels}:ro")
            options.append(f"--build-arg=TORCH_INDEX=file://{self._wheels}")
        run("buildah", "bud", "-q", *options, "--file=deploy/Dockerfile", ".", timeout=1500)
        self._built[target] = name

    def remove(self) -> None:
        for name in self._built.values():
            run("buildah", "rmi", "--force", name)

    def config(self, target: str) -> dict[str, Any]:
        """What the image says of itself, as Docker does."""
        (described,) = [json.loads(run("buildah", "inspect", "--type=image", self.name(target)))]
        config: dict[str, Any] = described["Docker"]["config"]
        return config


class Container:
    """A running container of an image, restricted as the chart's pods are."""

    def __init__(self, image: str, *arguments: str, network: str) -> None:
        options = ["--detach", f"--network={network}", *RESTRICTED]
        self._id = self._podman("run", *options, image, *arguments).strip()

    def execute(self, *command: str) -> str:
        """Runs a command inside; what it said. Raises AssertionError if it fails."""
        return self._podman("exec", self._id, *command)

    def healthy(self) -> bool:
        """Whether the image's HEALTHCHECK passes now."""
        try:
            self._podman("healthcheck", "run", self._id)
        except AssertionError:
            return False
        return True

    def stop(self) -> int:
        """Sends SIGTERM and waits; the exit status."""
        self._podman("stop", "--time=60", self._id)
        return int(self._podman("inspect", "--format={{.State.ExitCode}}", self._id))

    def remove(self) -> None:
        """Ends it, if it still runs, and takes it away."""
        self._podman("rm", "--force", "--time=0", self._id)

    @staticmethod
    def _podman(verb: str, *arguments: str) -> str:
        # The default runtime, crun, needs cgroups that a container has not.
        return run("podman", "--runtime=runc", verb, *arguments, timeout=120)
