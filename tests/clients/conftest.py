"""Fleets that real clients talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.served import ServedFleet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what stands in this directory."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def fake_served() -> Iterator[ServedFleet]:
    """A fleet with the fake engine, for clients of which the words do not matter."""
    with ServedFleet("--engine", "fake", "--model", "byte", "--fake-step-ms", "2") as served:
        yield served


@pytest.fixture(scope="module")
def tight_fleet() -> Iterator[ServedFleet]:
    """A fleet that serves one request, lets one wait, and refuses more."""
    with ServedFleet(
        *("--engine", "fake", "--model", "byte", "--fake-step-ms", "20"),
        *("--max-running-requests", "1", "--max-queue", "1", "--admission-queue", "0"),
    ) as served:
        yield served


@pytest.fixture(scope="session")
def grpc_address(fake_served: ServedFleet) -> str:
    address: str = fake_served.processes("gateway")[0]["address"]
    return address
