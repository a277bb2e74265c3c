"""How tensor-parallel ranks meet, and the sockets by which rank 0 leads them.

Collectives go through torch.distributed, set up from the variables that torchrun
sets. Batches go over TCP instead: a rank that waits for one blocks in recv for as
long as it takes, while an idle collective would end at the group's timeout.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from services.common import logs
from services.common.errors import StartupError
from services.worker.core import Batch
from services.worker.engine.batch_wire import Announcement
from services.worker.engine.runner import Indices
from services.worker.layers.parallel import Parallel

CPU = torch.device("cpu")
_SECRET_BYTES = 16
_CONNECT_TIMEOUT = 60.0


@contextmanager
def join_group(
    size: int, *, device: torch.device = CPU, ordered: bool = False
) -> Iterator[Parallel]:
    """Joins the process group that torchrun's variables describe, of `size` ranks.

    Tensors on the host go by gloo, those on CUDA by NCCL. With `ordered`, sums over the ranks
    are batch-invariant.

    Raises StartupError if there are no such variables or the size is another.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise StartupError(f"--tp {size} needs {size} ranks started by torchrun")
    if (world := int(os.environ["WORLD_SIZE"])) != size:
        raise StartupError(f"--tp {size} was given, but torchrun started {world} ranks")
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield Parallel(dist.get_rank(), size, ordered)
    finally:
        dist.destroy_process_group()


class Leader:
    """Rank 0's connections to the other ranks."""

    def __init__(self, connections: list[socket.socket]) -> None:
        self._connections = connections

    @classmethod
    @contextmanager
    def accept(cls, parallel: Parallel) -> Iterator[Leader]:
        """Waits until every other rank has connected; closes the connections at the end."""
        secret = secrets.token_bytes(_SECRET_BYTES)
        connections: list[socket.socket] = []
        try:
            with socket.create_server((_listen_host(), 0)) as server:
                server.settimeout(_CONNECT_TIMEOUT)
                parallel.broadcast(_meeting_point(server.getsockname()[1], secret))
                while len(connections) < parallel.size - 1:
                    connection, _ = server.accept()
                    connection.settimeout(_CONNECT_TIMEOUT)
                    if _read_secret(connection) == secret:
                        connection.settimeout(None)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        _keep_alive(connection)
                        connections.append(connection)
                    else:
                        connection.close()
            yield cls(connections)
        finally:
            for connection in connections:
                connection.close()

    def announce(self, batch: Batch, logit_index: Indices) -> None:
        """Tells the other ranks to compute a batch."""
        message = Announcement(batch, logit_index, logs.level_number()).to_bytes()
        for connection in self._connections:
            connection.sendall(message)

    def check(self) -> None:
        """Raises ConnectionError if a rank has closed its connection; they never send."""
        for connection in self._connections:
            with suppress(BlockingIOError):
                if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise ConnectionError("a rank of the group is gone")


def connect_to_leader(parallel: Parallel) -> socket.socket:
    """Connects a rank to rank 0. Raises OSError if it cannot be reached."""
    data = parallel.broadcast(_meeting_point(0, bytes(_SECRET_BYTES))).numpy().tobytes()
    port = int.from_bytes(data[:2], "little")
    host = "127.0.0.1" if _single_host() else os.environ["MASTER_ADDR"]
    connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT)
    connection.sendall(data[2:])
    connection.settimeout(None)
    _keep_alive(connection)
    return connection


def _keep_alive(connection: socket.socket) -> None:
    """Lets the kernel find a host that is gone without a word, within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _meeting_point(port: int, secret: bytes) -> torch.Tensor:
    return torch.tensor(list(port.to_bytes(2, "little") + secret), dtype=torch.uint8)


def _read_secret(connection: socket.socket) -> bytes:
    """What a stranger sends counts as no secret."""
    data = b""
    try:
        while len(data) < _SECRET_BYTES and (piece := connection.recv(_SECRET_BYTES - len(data))):
            data += piece
    except OSError:
        return b""
    return data


def _single_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _listen_host() -> str:
    return "127.0.0.1" if _single_host() else ""
