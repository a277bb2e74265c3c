"""Writes deploy/k8s/kustomize/shoal.yaml, the chart as it is by default, for `kubectl apply -k`.

    python -m deploy.k8s.render_kustomize [HELM]

The namespace is fixed, since the gateway's flags name it. Helm's own marks and its test are left
out. Run this when the chart changes; a test says so.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RENDERED = HERE / "kustomize" / "shoal.yaml"
NAMESPACE = "shoal"
_HEADER = "# Written by `python -m deploy.k8s.render_kustomize` from the chart's default values.\n"


def render(helm: str) -> str:
    """The manifest. Raises CalledProcessError if helm fails."""
    command = [helm, "template", "shoal", str(HERE / "shoal"), f"--namespace={NAMESPACE}"]
    command += ["--no-hooks", "--kube-version=1.33.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    objects = [_without_helm(item) for item in yaml.safe_load_all(done.stdout) if item]
    objects.sort(key=lambda item: (item["kind"], item["metadata"]["name"]))
    return _HEADER + yaml.safe_dump_all(objects, sort_keys=False, width=100)


def _without_helm(item: dict[str, Any]) -> dict[str, Any]:
    for label in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
        item["metadata"]["labels"].pop(label)
    return item


def main() -> None:
    """Rewrites the manifest."""
    RENDERED.write_text(render(sys.argv[1] if len(sys.argv) > 1 else "helm"))


if __name__ == "__main__":
    main()
