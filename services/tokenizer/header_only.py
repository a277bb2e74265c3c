"""Cuts GGUF files down to their headers, which is all that a tokenizer reads of them.

    python -m services.tokenizer.header_only FILE...

For images of the tokenizer: the weights of the embedded model are nine tenths of its file. A file
that was cut makes a vocabulary as before, and is of no use to a worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.common.gguf_header import read_header


def cut(path: Path) -> None:
    """Ends the file where its first tensor begins. Raises StartupError if it is not GGUF."""
    first = min(offset for _, offset in read_header(path).tensor_places.values())
    os.truncate(path, first)


def main(argv: Sequence[str]) -> None:
    for name in argv:
        path = Path(name)
        before = path.stat().st_size
        cut(path)
        print(f"{path.name}: {before} bytes, now {path.stat().st_size}")


if __name__ == "__main__":
    main(sys.argv[1:])
