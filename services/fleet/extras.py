"""Which optional packages a command needs, and the command that installs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

# The packages whose absence says that an extra was not installed.
_PROOFS: dict[str, tuple[str, ...]] = {
    "gateway": ("msgspec", "httpx", "httptools", "tokenizers", "jinja2"),
    "tokenizer": ("tokenizers", "jinja2"),
    "worker": ("torch", "safetensors", "tokenizers"),
}


def missing(extras: Sequence[str]) -> str | None:
    """One sentence about the packages that are not installed, or None."""
    packages = [
        package
        for extra in extras
        for package in _PROOFS[extra]
        if importlib.util.find_spec(package) is None
    ]
    if not packages:
        return None
    names = " and ".join(dict.fromkeys(packages))
    return f"{names} missing; install with: pip install 'shoal[{','.join(extras)}]'"
