"""The ports that a fleet's gateways listen on: free, and the fleet's for as long as it runs."""

from __future__ import annotations

import socket

from services.common.listening import cannot_listen


class SharedPort:
    """A port that several gateways share, resolved and held until it is closed.

    It is bound with SO_REUSEPORT and never listened on: the kernel gives connections to
    the gateways alone, and between two lives of theirs the port stays taken.
    """

    def __init__(self, host: str, port: int, flag: str) -> None:
        """Takes the port of a flag, a free one if it is 0. Raises StartupError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise cannot_listen(host, port, error, flag) from error
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Gives the port up."""
        self._socket.close()


def port_of(address: str) -> str:
    """The port of `host:port`, as text."""
    return address.rpartition(":")[2]
