"""Ids of requests, answers and their parts."""

from __future__ import annotations

import random


def new_id() -> str:
    """32 hexadecimal digits that nothing else has; no secret, so it costs no system call."""
    return f"{random.getrandbits(128):032x}"
