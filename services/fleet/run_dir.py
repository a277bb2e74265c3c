"""The directory a fleet lives in: its sockets, its `fleet.json`, and the lock that it is ours."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from services.common.errors import StartupError
from services.common.run_directory import RunDirectory
from services.fleet.plan import Role

_LONGEST_PARENT = 54  # bytes; leaves room for the names of the sockets
_PREFIX = "shoal-fleet-"
_TABLE = "fleet.json"
_SOCKET = re.compile(
    r"((worker|tokenizer|detokenizer)-\d+(\.admin)?|gateway(-\d+)?\.admin)\.sock", re.ASCII
)  # as `plan` names them


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One service as `fleet.json` has it; `pid` is None between two of its lives."""

    name: str
    role: Role
    pid: int | None
    state: str
    address: str
    admin_address: str


class RunDir:
    """A fleet's directory, locked while the fleet runs."""

    def __init__(self, path: Path, lock: TextIO, temporary: RunDirectory | None) -> None:
        self.path = path
        self._lock = lock
        self._temporary = temporary

    @classmethod
    def open(cls, path: str) -> RunDir:
        """Makes or takes the directory; an empty path makes a fresh one, removed by `close`.

        Beside a fresh one, what killed fleets of this user left is removed.

        Raises:
            StartupError: it cannot be written, or another fleet lives in it.
        """
        temporary = None
        try:
            if path:
                directory = Path(path).absolute()
                directory.mkdir(parents=True, exist_ok=True)
            else:
                parent = tempfile.gettempdir()
                too_long = len(os.fsencode(parent)) > _LONGEST_PARENT
                temporary = RunDirectory(Path("/tmp" if too_long else parent), _PREFIX)
                directory = temporary.path
            lock = (directory / "lock").open("w")
        except OSError as error:
            if temporary is not None:
                temporary.remove()
            what = f"use --run-dir {path}" if path else "make a directory for temporary files"
            raise StartupError(f"cannot {what}: {error.strerror}")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StartupError(f"another fleet runs in --run-dir {path}")
        return cls(directory, lock, temporary)

    def write_table(self, url: str, model: str, processes: Sequence[ProcessInfo]) -> None:
        """Writes `fleet.json`; a reader sees the old table or the new one, never a part."""
        table = {
            "url": url,
            "model": model,
            "processes": [dataclasses.asdict(process) for process in processes],
        }
        new = self.path / f"{_TABLE}.new"
        new.write_text(json.dumps(table, indent=2) + "\n")
        new.replace(self.path / _TABLE)

    def close(self, sockets: Iterable[Path] = ()) -> None:
        """Gives the directory up, and removes it if it was made for this fleet alone; else what
        fleets had in it, but for the lock, which another may be about to take.

        `sockets` are those of this fleet's services, which have ended. Of others, those go that
        have names which a fleet gives, as one that was killed leaves them, and are nobody's.
        """
        try:
            if self._temporary is not None:
                self._temporary.remove()
                return
            tables = (self.path / _TABLE, self.path / f"{_TABLE}.new")
            left = (path for path in self.path.glob("*.sock") if _is_left(path))
            for path in (*tables, *sockets, *left):
                with suppress(OSError):
                    path.unlink()
        finally:
            self._lock.close()


def _is_left(path: Path) -> bool:
    """A socket with a name that a fleet gives, at which nobody listens."""
    if not _SOCKET.fullmatch(path.name):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:  # also of a file that is no socket
            return path.is_socket()
        except OSError:
            return False
    return False
