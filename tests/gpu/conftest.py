"""Tests that need a GPU: skipped together, with one reason, where there is none."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch


def _missing() -> str:
    if os.environ.get("SHOAL_TEST_GPU") != "1":
        return "GPU tests are asked for by: make test-gpu"
    if not torch.cuda.is_available():
        return f"no GPU that torch {torch.__version__} can use"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    return ""


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    if reason := _missing():
        pytest.skip(reason)
