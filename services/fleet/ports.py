"""The ports that a fleet's gateways listen on: free, and the fleet's for as long as it runs."""

from __future__ import annotations

import errno
import socket

from services.common.errors import StartupError


def require_free(host: str, port: int) -> None:
    """Raises StartupError if something listens on the port, or the host is not this machine's."""
    if port <= 0:
        return
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartupError(
                    f"port {port} on {host} is in use; choose another with --port or --grpc-port"
                )
            raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}")


class SharedPort:
    """A port that several gateways share, resolved and held until it is closed.

    It is bound with SO_REUSEPORT and never listened on: the kernel gives connections to
    the gateways alone, and between two lives of theirs the port stays taken.
    """

    def __init__(self, host: str, port: int) -> None:
        """Takes the port, a free one if it is 0. Raises StartupError."""
        self._socket = socket.socket(_family(host), socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}")
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Gives the port up."""
        self._socket.close()


def port_of(address: str) -> str:
    """The port of `host:port`, as text."""
    return address.rpartition(":")[2]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
