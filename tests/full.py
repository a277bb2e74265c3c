"""Whether the suites run in full (`make check-all`) or as CI has them."""

from __future__ import annotations

import os

import pytest

FULL = bool(os.environ.get("SHOAL_FULL"))
in_full_only = pytest.mark.skipif(not FULL, reason="SHOAL_FULL=1 runs it")
