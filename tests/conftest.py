"""What holds for every test: GPUs, the shares of two processes, the fleet that most suites use.

The tests are kept off a machine's GPUs, but for those of `tests/gpu` when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.integration.served import ServedFleet

if os.environ.get("SHOAL_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# One process has all that uses the default fleet, or there would be two of them.
_ON_ONE_FLEET = ("clients", "integration")


class _Shares(LoadScopeScheduling):  # type: ignore[misc]  # the library has no types
    """What uses the default fleet is one share, every other file one of its own."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "the default fleet" if path.split("/")[1] in _ON_ONE_FLEET else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Shares(config, log)


@pytest.fixture(scope="session")
def fleet() -> Iterator[ServedFleet]:
    """The default fleet, serving the embedded model. Nobody may end any of its services."""
    with ServedFleet() as served:
        yield served
