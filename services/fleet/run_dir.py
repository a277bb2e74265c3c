"""The directory a fleet lives in: its sockets, its `fleet.json`, and the lock that it is ours."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from services.common.errors import StartupError
from services.common.run_directory import RunDirectory
from services.fleet.plan import Role

_LONGEST_PARENT = 54  # bytes; leaves room for the names of the sockets
_PREFIX = "shoal-fleet-"
_TABLE = "fleet.json"


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

    def close(self) -> None:
        """Gives the directory up, and removes it if it was made for this fleet alone; else what
        the fleet had in it, but for the lock, which another may be about to take."""
        try:
            if self._temporary is not None:
                self._temporary.remove()
                return
            own = (_TABLE, f"{_TABLE}.new")  # services remove their sockets, but for these
            for path in (*self.path.glob("*.admin.sock"), *(self.path / name for name in own)):
                with suppress(OSError):
                    path.unlink()
        finally:
            self._lock.close()
