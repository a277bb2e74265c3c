"""The list of what is in an image: every image has one, and it is right."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.charts import ROOT
from tests.deploy.test_images import stages


@pytest.mark.parametrize("target", ["gateway", "tokenizer", "worker-cpu", "worker-cuda"])
def test_every_image_has_one(target: str) -> None:
    command = "tools/sbom.sh /opt/shoal/bin/python /opt/shoal/sbom.cdx.json"
    assert command in stages()[f"build-{target}"]
    assert f"COPY --from=build-{target} /opt/shoal /opt/shoal" in stages()[target]


def test_it_names_every_package_with_version_and_licence(tmp_path: Path) -> None:
    if os.environ.get("SHOAL_FULL") != "1":
        pytest.skip("installs a tool from the package index: SHOAL_FULL=1")
    environment = {**os.environ, "SBOM_VENV": str(tmp_path / "venv")}
    made = [tmp_path / "first.json", tmp_path / "second.json"]
    for path in made:
        command = [str(ROOT / "tools" / "sbom.sh"), sys.executable, str(path)]
        subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=300)
    assert made[0].read_bytes() == made[1].read_bytes()
    bill = json.loads(made[0].read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "shoal")
    parts = {part["name"]: part for part in bill["components"]}
    for name in ("grpcio", "protobuf", "uvicorn"):
        version = importlib.metadata.version(name)
        assert parts[name]["version"] == version
        assert parts[name]["purl"] == f"pkg:pypi/{name}@{version}"
    licensed = [part for part in parts.values() if part.get("licenses")]
    assert len(licensed) > 0.9 * len(parts)
    needs = {entry["ref"]: entry.get("dependsOn", []) for entry in bill["dependencies"]}
    assert any(
        name.startswith("grpcio") for name in needs[bill["metadata"]["component"]["bom-ref"]]
    )
