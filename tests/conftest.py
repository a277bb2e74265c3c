"""Keeps the tests off a machine's GPUs, but for those of `tests/gpu` when they are asked for."""

from __future__ import annotations

import os

if os.environ.get("SHOAL_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
