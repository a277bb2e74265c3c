"""Helm and the chart's rendering with default values, once a session."""

from __future__ import annotations

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
