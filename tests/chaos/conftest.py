"""The seed of a run: drawn and printed, or given to repeat one."""

from __future__ import annotations

import os
import random
import secrets
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what stands in this directory."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture
def seed() -> int:
    """SHOAL_CHAOS_SEED, or a new one; the same faults and requests are drawn from the same."""
    given = os.environ.get("SHOAL_CHAOS_SEED")
    seed = int(given) if given else secrets.randbits(31)
    print(f"\nchaos seed: repeat with SHOAL_CHAOS_SEED={seed}")
    return seed


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)
