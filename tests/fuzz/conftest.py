"""One fleet for every fuzzer: the model does not matter, so it has the fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.served import ServedFleet

MODEL_LENGTH = 256  # so that whatever is generated ends soon


@pytest.fixture(scope="package")
def fleet() -> Iterator[ServedFleet]:
    with ServedFleet(
        *("--engine", "fake", "--model", "byte", "--fake-step-ms", "1"),
        *("--max-model-len", str(MODEL_LENGTH)),
    ) as served:
        yield served
