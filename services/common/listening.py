"""Addresses that a process listens on: their forms, and in one sentence why one cannot be had.

gRPC only says that it could not listen, and writes the reason into a log of its own; so an
address is tried here first. Who listens there afterwards is not known here.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from services.common.errors import StartupError

MAX_SOCKET_PATH = 107  # bytes; sun_path has 108, one of them the terminator


def is_unix(address: str) -> bool:
    """Whether an address is a unix socket, which only this machine reaches."""
    return address.startswith(("unix:", "unix-abstract:"))


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Host and port of `host:port`, an IPv6 host without its brackets.

    Raises StartupError, naming the flag, if it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise StartupError(f"{flag} {address!r} is not host:port or unix:/path")
    return host.strip("[]"), int(port)


def require_all_free(addresses: Iterable[tuple[str, str]]) -> None:
    """Tries each (address, flag). Raises one StartupError that tells of all that failed."""
    problems = []
    for address, flag in addresses:
        try:
            require_free(address, flag)
        except StartupError as error:
            problems.append(str(error))
    if problems:
        raise StartupError("; and ".join(problems))


def require_free(address: str, flag: str, *, shared: bool = False) -> None:
    """Tries an address, `host:port` or `unix:/path`, and lets go of it.

    A `shared` port may be in use by those who share theirs too (SO_REUSEPORT). Raises
    StartupError that says what to do if nothing could listen there.
    """
    if is_unix(address):
        _require_usable_path(address, flag)
        return
    host, port = split_address(address, flag)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(where)
    except OSError as error:
        raise cannot_listen(host, port, error, flag) from error


def cannot_listen(host: str, port: int, error: OSError, flag: str) -> StartupError:
    """What to say when `host:port`, which came from a flag, could not be listened on."""
    choose = f"choose another with {flag}"
    if isinstance(error, socket.gaierror):
        return StartupError(f"there is no host {host!r}; {choose}")
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is in use; {choose}")
    if error.errno == errno.EADDRNOTAVAIL:
        return StartupError(f"{host} is not an address of this machine; {choose}")
    if error.errno == errno.EACCES:
        return StartupError(f"only root may listen on port {port}; {choose}, 1024 or above")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StartupError(f"cannot listen on {host}:{port}: {reason}; {choose}")


def _require_usable_path(address: str, flag: str) -> None:
    if not address.startswith("unix:"):  # an abstract one has no file
        return
    path = Path(address.removeprefix("unix:").removeprefix("//"))
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise StartupError(
            f"{flag} {address} is too long for a unix socket: {MAX_SOCKET_PATH} bytes at most"
        )
    if not path.parent.is_dir():
        raise StartupError(f"{flag} {address}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StartupError(f"{flag} {address}: this user may not write to {path.parent}")
    if path.exists() and not path.is_socket():
        raise StartupError(f"{flag} {address}: {path} is there already, and is no socket")
