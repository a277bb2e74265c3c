"""Renders the Helm chart: where helm is found, and what comes out, by kind and name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "k8s" / "shoal"
EXAMPLES = sorted((ROOT / "deploy" / "k8s" / "examples").glob("*.yaml"))
SERVICES = ("gateway", "tokenizer", "detokenizer", "worker")
BACKENDS = SERVICES[1:]
NAMESPACE = "llm"

Json = dict[str, Any]


def find_helm() -> str | None:
    """The helm binary: SHOAL_TEST_HELM, else the environment's own, else the one on PATH."""
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return os.environ.get("SHOAL_TEST_HELM") or shutil.which("helm", path=search)


@dataclass(frozen=True)
class Render:
    """The objects of one rendering."""

    objects: tuple[Json, ...]

    def of(self, kind: str) -> dict[str, Json]:
        """Objects of a kind, by name."""
        return {item["metadata"]["name"]: item for item in self.objects if item["kind"] == kind}

    def one(self, kind: str, name: str) -> Json:
        return self.of(kind)[name]

    def pod(self, service: str) -> Json:
        """The pod spec of a service's Deployment."""
        spec: Json = self.one("Deployment", f"shoal-{service}")["spec"]["template"]["spec"]
        return spec

    def container(self, service: str) -> Json:
        (container,) = self.pod(service)["containers"]
        return dict(container)

    def flags(self, service: str) -> dict[str, str]:
        """The flags in a container's arguments, by name; the role is not among them."""
        _, *flags = self.container(service)["args"]
        return dict(flag.split("=", 1) for flag in flags)

    def env(self, service: str) -> dict[str, Json]:
        return {item["name"]: item for item in self.container(service).get("env") or ()}


class RenderError(Exception):
    """Helm refused; the message is what it said."""


class Helm:
    """Runs one helm binary on the chart."""

    def __init__(self, binary: str) -> None:
        self._binary = binary

    def lint(self, values: Sequence[Path] = ()) -> None:
        """Raises RenderError."""
        self._run("lint", "--strict", str(CHART), *self._values(values))

    def template(
        self,
        values: Sequence[Path] = (),
        sets: Mapping[str, str] | None = None,
        json: Mapping[str, str] | None = None,
        release: str = "shoal",
        kube_version: str = "1.33.0",
    ) -> Render:
        """Renders with files of values, `--set` and `--set-json`. Raises RenderError."""
        flags = [f"--set={key}={value}" for key, value in (sets or {}).items()]
        flags += [f"--set-json={key}={value}" for key, value in (json or {}).items()]
        text = self._run(
            "template",
            release,
            str(CHART),
            f"--namespace={NAMESPACE}",
            f"--kube-version={kube_version}",
            *self._values(values),
            *flags,
        )
        return Render(tuple(item for item in yaml.safe_load_all(text) if item))

    @staticmethod
    def _values(files: Sequence[Path]) -> list[str]:
        return [f"--values={path}" for path in files]

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self._binary, *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode:
            raise RenderError(done.stdout + done.stderr)
        return done.stdout
