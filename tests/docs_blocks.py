"""The command blocks of the documentation, and what their tags mean.

A fence ```sh is run by a test as it stands, against a fleet of the default model; with a word
behind it, it is not, and the word says why:

    gpu, hub, cluster  it needs one
    make               a task of the Makefile, or the system's packages: CI runs it itself
    serves             it runs on until it is ended; another test runs what it shows
    long               it takes minutes; another test runs it in short
    tool               it needs a program that is not Shoal's (docker, grpcurl, protoc)

What any block says to `shoal` must be a command with flags that exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TAGS = ("gpu", "hub", "cluster", "make", "serves", "long", "tool")
_BLOCK = re.compile(r"^```sh(?: (\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHOAL = re.compile(r"(?:^|[;&|(])\s*(?:\S*/)?shoal (?=[a-z])([^;&|#<>)]*)")


@dataclass(frozen=True)
class Block:
    """One fence: where it is, its tag (empty: it is run) and its text."""

    place: str
    tag: str
    text: str

    def commands(self) -> list[list[str]]:
        """The words after `shoal`, of every time it is called."""
        joined = self.text.replace("\\\n", " ")
        lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
        return [match.split() for line in lines for match in _SHOAL.findall(_unquoted(line))]


def pages() -> list[Path]:
    """Every page that may show commands."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> list[Block]:
    """Every command block of every page."""
    found = []
    for page in pages():
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            place = f"{page.relative_to(ROOT)}:{line}"
            found.append(Block(place, match[1] or "", match[2]))
    return found


def _unquoted(line: str) -> str:
    """A line in which a quoted text is one word."""
    return re.sub(r"\"[^\"]*\"|'[^']*'", "TEXT", line)
