"""The examples of docs/structured-output.md, run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.served import ServedFleet

DOCUMENT = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", DOCUMENT, re.DOTALL)
ROOT = "http://127.0.0.1:8000"


def test_the_examples_print_what_is_shown(fleet: ServedFleet) -> None:
    assert len(EXAMPLES) == DOCUMENT.count("```python") == 2
    for program, shown in EXAMPLES:
        done = subprocess.run(
            [sys.executable, "-c", program.replace(ROOT, fleet.url)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.stdout, done.stderr) == (shown, "")
