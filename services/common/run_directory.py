"""A directory of one run of something: its sockets and logs.

It is locked for as long as its owner lives. So whoever starts beside it can tell what a killed
owner left behind, and removes that. Knows nothing of what is in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_NOT_OURS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)


class RunDirectory:
    """A new directory in `parent`, until `remove`; what dead owners left there is removed first.

    Its name begins with `prefix`, which belongs to one kind of owner, and is short: the path of a
    socket in it may have 107 bytes. Raises OSError if there can be none.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        for left in parent.glob(f"{prefix}*"):
            _remove_if_left(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            lock = _try_lock(self.path)
            if lock is not None and self.path.exists():
                self._lock = lock
                return
            if lock is not None:  # somebody took it for left behind before it was locked
                os.close(lock)

    @classmethod
    def beside(cls, address: str, prefix: str) -> RunDirectory:
        """Beside a service's own socket, if it has one, so that a fleet's directory goes as a
        whole; else where temporary files are."""
        if address.startswith("unix:"):
            return cls(Path(address.removeprefix("unix:")).parent, prefix)
        return cls(Path(tempfile.gettempdir()), prefix)

    def remove(self) -> None:
        """Removes it with all that it holds. To be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_left(path: Path) -> None:
    lock = _try_lock(path)
    if lock is None:
        return
    try:
        if os.fstat(lock).st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    """A descriptor of the directory, locked; None if another has it, or it is gone or no
    directory of ours. Raises OSError where there are no locks, or no more descriptors."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in _NOT_OURS:
            return None
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
