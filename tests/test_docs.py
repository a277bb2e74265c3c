"""The documentation: references are of this code, commands exist, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from services.commands import COMMANDS
from services.common.config import build_parser
from tests.docs_blocks import ROOT, TAGS, blocks, pages
from tools.reference_pages import FOLDER, PAGES

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("name", PAGES)
def test_the_references_are_of_this_code(name: str) -> None:
    page = (FOLDER / name).read_text()
    assert page == PAGES[name]().rstrip() + "\n", "run: python -m tools.reference_pages"


def test_every_block_is_run_or_says_why_not() -> None:
    found = blocks()
    assert len(found) >= 25
    assert {block.tag for block in found} <= {"", *TAGS}
    assert sum(not block.tag for block in found) >= 8


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.place)
def test_every_command_shown_exists(block: object) -> None:
    from tests.docs_blocks import Block

    assert isinstance(block, Block)
    for name, *argv in block.commands():
        command = COMMANDS.get(name)
        assert command is not None, f"{block.place}: there is no shoal {name}"
        if name == "completion":
            continue  # it takes a word, which tests/client/test_completion.py tries
        parser = build_parser(command.config_class(), prog=f"shoal {name}", description="")
        parser.parse_args([word for word in argv if word != "\\"])  # exits for an unknown flag


def test_links_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in [*pages(), ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
        for link in _LINK.findall(page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not broken


def test_the_site_builds_with_every_link_checked(tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", f"{tmp_path}/site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_every_command_was_recorded() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in COMMANDS:
        _, _, section = page.partition(f"## shoal {name}\n")
        shown = section.partition("```console\n")[2].partition("\n```")[0]
        assert shown.startswith(f"$ shoal {name}"), f"{name}: run: python -m tools.record_cli"
        assert len(shown.splitlines()) > 1
        assert "Traceback" not in shown
