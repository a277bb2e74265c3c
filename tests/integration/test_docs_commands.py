"""The command blocks of the documentation, run as they stand against a fleet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_blocks import ROOT, Block, blocks
from tests.integration.served import ServedFleet

HTTP = ("127.0.0.1:8000", "localhost:8000")
# As variables, so that the blocks stay as they are: an answer of the model may be long.
_SHORT = {"SHOAL_TEMPERATURE": "0", "SHOAL_MAX_TOKENS": "16"}
_INPUT = "What is the capital of France?\n/exit\n"  # for a block that opens a shell


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `shoal` is this checkout's."""
    folder = tmp_path_factory.mktemp("bin")
    shoal = folder / "shoal"
    shoal.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m services "$@"\n')
    shoal.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    "block", [block for block in blocks() if not block.tag], ids=lambda block: block.place
)
def test_a_block_runs(block: Block, fleet: ServedFleet, path: str, tmp_path: Path) -> None:
    text = block.text.replace(".venv/bin/shoal", "shoal")
    for address in HTTP:
        text = text.replace(address, fleet.url.removeprefix("http://"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=tmp_path,
        env={**os.environ, **_SHORT, "PATH": path, "HF_HUB_OFFLINE": "1"},
        input=_INPUT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{block.place}:\n{text}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
