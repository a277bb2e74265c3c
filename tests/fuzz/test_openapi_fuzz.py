"""The served OpenAPI description against the service: what it promises, generated requests check.

schemathesis draws requests from the description, valid ones and invalid ones, and holds every
answer to it: no 5xx, only described statuses and content types, bodies of the described shape.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full import FULL
from tests.integration.served import ServedFleet

MAX_EXAMPLES = 300 if FULL else 12
PHASES = "coverage,fuzzing" if FULL else "fuzzing"
CONFIG = Path(__file__).with_name("schemathesis.toml")
SEED = int(os.environ.get("SHOAL_FUZZ_SEED") or random.SystemRandom().randrange(1 << 32))
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,unsupported_method"
)


def test_answers_are_as_described(
    fleet: ServedFleet, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
            *("run", f"{fleet.url}/openapi.json", "--phases", PHASES, "--checks", CHECKS),
            *("--max-examples", str(MAX_EXAMPLES), "--seed", str(SEED)),
            *("--request-timeout", "60", "--continue-on-failure"),
            *("--exclude-path", "/fleet/events"),  # a stream without an end
            *("--suppress-health-check", "all", "--warnings", "off"),
        ],
        capture_output=True,
        text=True,
        timeout=3000,
        cwd=tmp_path,  # it leaves a cache behind
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    counted = re.search(r"(\d[\d,]*) generated", run.stdout)
    assert counted is not None, run.stdout[-3000:]
    with capsys.disabled():
        print(f"\nopenapi fuzz: {counted.group(1)} requests, SHOAL_FUZZ_SEED={SEED}")
