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

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # six times as quick, where it was built


def find_helm(name: str = "helm") -> str | None:
    """A helm binary: SHOAL_TEST_HELM (or ..._HELM4), else the environment's own, else the one
    on PATH."""
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return os.environ.get(f"SHOAL_TEST_{name.upper()}") or shutil.which(name, path=search)


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

    def pod_templates(self) -> dict[str, Json]:
        """The pod templates of every workload, by its name; followers and Jobs too."""
        found: dict[str, Json] = {}
        for item in self.objects:
            name = item["metadata"]["name"]
            if item["kind"] in ("Deployment", "Job"):
                found[name] = item["spec"]["template"]
            elif item["kind"] == "LeaderWorkerSet":
                group = item["spec"]["leaderWorkerTemplate"]
                found[name] = group["leaderTemplate"]
                found[f"{name}-follower"] = group["workerTemplate"]
        return found

    def pod_labels(self) -> dict[str, dict[str, str]]:
        """The pods' labels, by the workload's name."""
        return {name: pod["metadata"]["labels"] for name, pod in self.pod_templates().items()}

    def pod_specs(self) -> list[Json]:
        """The pod specs of every workload."""
        return [pod["spec"] for pod in self.pod_templates().values()]

    def container(self, service: str) -> Json:
        (container,) = self.pod(service)["containers"]
        return dict(container)

    def flags(self, service: str) -> dict[str, str]:
        """The flags in a service's arguments, by name; the role is not among them."""
        return self.flags_of(self.container(service))

    @staticmethod
    def flags_of(container: Json) -> dict[str, str]:
        """The flags in a container's arguments, by name."""
        _, *flags = container["args"]
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
        return Render(tuple(item for item in yaml.load_all(text, Loader=_LOADER) if item))

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
