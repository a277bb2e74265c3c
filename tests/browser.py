"""A real Chromium for tests of the page, where the machine has one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"
AXE = (
    Path(__file__).parent.parent / "services/gateway/web/node_modules/axe-core/axe.min.js"
)  # of `make web`, or tools/clients.sh

# No sandbox: containers that tests run in seldom allow one. No GPU, and no shared memory
# beyond what a container has.
ARGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def chromium() -> str:
    """Its path; skips the test where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium here (Debian: apt-get install chromium)")


def picture(name: str) -> Path:
    """Where a screenshot goes; CI keeps them."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return SCREENSHOTS / f"{name}.png"
