"""Standard input, output and error as a process may rely on them.

Whoever starts a process may have closed them, as some of those that run programs in the background
do. Then the next file that is opened takes such a number, and what writes to "stderr" writes into
a socket; libuv ends the process rather than close one of the three.
"""

from __future__ import annotations

import io
import os
import sys

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def secure() -> None:
    """Opens /dev/null in place of those that are closed, and has none of them fail for a character
    that its encoding lacks. To be called before anything is opened; again does no harm."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(_MODES):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate(_MODES.items()):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
