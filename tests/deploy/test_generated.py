"""What is written from the chart's sources is up to date: its README and the kustomization."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import yaml

from deploy.k8s import describe_values, render_kustomize
from tests.deploy.charts import CHART, find_helm
from tests.deploy.validation import all_versions, schemas

TEXT = (CHART / "values.yaml").read_text()


def test_the_readme_is_that_of_the_values() -> None:
    written = (CHART / "README.md").read_text()
    assert written == describe_values.page(TEXT), "run `python -m deploy.k8s.describe_values`"


def test_the_readme_has_a_row_for_every_default() -> None:
    rows = {value.path: value.default for value in describe_values.values(TEXT)}
    assert rows["drainSeconds"] == 60
    assert rows["worker.keda.cooldownSeconds"] == 600
    assert rows["gateway.service.port"] == 8000
    assert f"| `tls.internal.duration` | `{json.dumps('2160h')}` |" in describe_values.page(TEXT)

    def leaves(node: object, path: str = "") -> set[str]:
        if not isinstance(node, dict) or not node:
            return {path}
        return {leaf for key, value in node.items() for leaf in leaves(value, f"{path}.{key}")}

    described = tuple(f".{path}" for path in rows)
    for leaf in leaves(yaml.safe_load(TEXT)):
        assert leaf.startswith(described), f"{leaf} has no comment"


@pytest.mark.usefixtures("helm")
def test_the_kustomization_is_the_chart_by_default() -> None:
    binary = find_helm()
    assert binary is not None
    written = render_kustomize.RENDERED.read_text()
    assert written == render_kustomize.render(binary), "run `python -m deploy.k8s.render_kustomize`"
    objects = list(yaml.safe_load_all(written))
    schemas(all_versions()[-1]).check(objects)
    assert "Helm" not in written
    assert {item["metadata"]["namespace"] for item in objects} == {"shoal"}


def test_kubectl_builds_the_kustomization() -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("there is no kubectl")
    command = [kubectl, "kustomize", str(render_kustomize.RENDERED.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    built = [item for item in yaml.safe_load_all(done.stdout) if item]
    kinds = [item["kind"] for item in built]
    assert (kinds.count("Deployment"), kinds.count("Namespace")) == (4, 1)
