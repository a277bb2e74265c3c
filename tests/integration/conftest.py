"""Shared fleets with the fake engine; the one with the real model is in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.hostile import UNREAD_SECONDS, Oracle, Victims
from tests.integration.served import STEP_MS, ServedFleet
from tests.programs import eventually


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what stands in this directory."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def fake_pairs() -> Iterator[ServedFleet]:
    """A fleet with the fake engine and the byte vocabulary, two instances of each service."""
    with ServedFleet(
        *("--engine", "fake", "--model", "byte", "--fake-step-ms", "2"),
        *("--workers", "2", "--tokenizers", "2", "--detokenizers", "2"),
    ) as served:
        yield served


@pytest.fixture(scope="module")
def fake_fleet(fake_pairs: ServedFleet) -> ServedFleet:
    """The same, with all of it ready, whatever a module before has killed."""

    def all_ready() -> bool:
        return all(entry["state"] == "ready" for entry in fake_pairs.processes())

    eventually(all_ready, timeout=60, what=fake_pairs.processes)
    return fake_pairs


@pytest.fixture(scope="session")
def stepping_fleet() -> Iterator[ServedFleet]:
    """A fleet whose steps take the same time each."""
    with ServedFleet(
        *("--engine", "fake", "--model", "byte", "--fake-step-ms", str(STEP_MS))
    ) as served:
        yield served


@pytest.fixture(scope="module")  # no longer: the stream beside keeps a core busy
def victims() -> Iterator[Victims]:
    """A fleet to be attacked, with a stream beside the attacks."""
    with ServedFleet(
        *("--engine", "fake", "--model", "byte", "--fake-step-ms", "1"),
        *("--unread-timeout", str(UNREAD_SECONDS)),
    ) as fleet:
        oracle = Oracle(fleet.processes("gateway")[0]["address"])
        try:
            yield Victims(fleet, oracle)
        finally:
            oracle.close()
