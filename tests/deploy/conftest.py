"""Helm, the chart's rendering with default values, and where a Kubernetes API server is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.deploy.charts import Helm, Render, find_helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    binary = find_helm()
    if binary is None:
        pytest.skip("there is no helm on PATH; SHOAL_TEST_HELM may name one")
    return Helm(binary)


@pytest.fixture(scope="session")
def default(helm: Helm) -> Render:
    """The chart with the values it comes with."""
    return helm.template()


@pytest.fixture(scope="session")
def kube_dir() -> Path:
    """The directory with an API server to start (see `tests.deploy.cluster`)."""
    kube_dir = os.environ.get("SHOAL_TEST_KUBE_DIR")
    if not kube_dir:
        pytest.skip("SHOAL_TEST_KUBE_DIR names no directory with a Kubernetes API server")
    for program in ("etcd", "kubectl", "openssl", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    if find_helm() is None:
        pytest.skip("there is no helm on PATH; SHOAL_TEST_HELM may name one")
    return Path(kube_dir)
