"""Tiny services with the outside of real ones: what the fleet's supervisor sees, and no more.

Run as a module: `python -m tests.fleet.scripted ROLE [--address A] [--admin-address A]
[--port P] [--mishap M]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from protos import worker_pb2, worker_pb2_grpc
from services.common import process, rpc
from services.common.errors import StartupError
from services.fleet.config import FleetConfig
from services.fleet.plan import Role, ServiceSpec


def spec(role: Role, run_dir: Path, *args: str) -> ServiceSpec:
    """The spec of one scripted service."""
    address = "" if role == "gateway" else f"unix:{run_dir}/{role}.sock"
    admin = f"unix:{run_dir}/{role}.admin.sock"
    listens = (f"--address={address}", f"--admin-address={admin}")
    command = (sys.executable, "-m", "tests.fleet.scripted", role, *listens, *args)
    return ServiceSpec(f"{role}-0" if address else role, role, command, address, admin)


def plan(config: FleetConfig, run_dir: Path) -> list[ServiceSpec]:
    """A fleet of one scripted service of each kind."""
    return [
        spec("gateway", run_dir, f"--port={config.port}"),
        spec("tokenizer", run_dir),
        spec("detokenizer", run_dir),
        spec("worker", run_dir),
    ]


class _Worker(worker_pb2_grpc.WorkerServicer):
    # The other methods answer UNIMPLEMENTED.
    def __init__(self) -> None:
        self.info: worker_pb2.WorkerInfo | None = None
        self.asked = asyncio.Event()

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: object
    ) -> worker_pb2.GetInfoResponse:
        if self.info is not None:
            return worker_pb2.GetInfoResponse(info=self.info)
        self.asked.set()
        progress = worker_pb2.LoadProgress(phase="loading weights", done=1, total=4)
        return worker_pb2.GetInfoResponse(progress=progress)


async def _serve_peer(args: argparse.Namespace, stop: asyncio.Event) -> None:
    server = rpc.Server([])
    worker = _Worker()  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)
    await server.start(args.address)
    if args.mishap == "never-ready":
        await stop.wait()
    if args.role == "worker":
        await worker.asked.wait()
    worker.info = worker_pb2.WorkerInfo(model="scripted")
    await server.set_serving(True)
    await stop.wait()
    print(f"{args.role} stops", file=sys.stderr, flush=True)
    await server.stop(0)


async def _serve_gateway(args: argparse.Namespace, stop: asyncio.Event) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", args.port)
    admin_path = args.admin_address.removeprefix("unix:")
    admin = await asyncio.start_unix_server(answer, admin_path)
    port = server.sockets[0].getsockname()[1]
    print("a line that is no address", flush=True)
    print(json.dumps({"http": f"127.0.0.1:{port}", "grpc": ""}), flush=True)
    await stop.wait()
    print("gateway stops", file=sys.stderr, flush=True)
    server.close()
    admin.close()


def main() -> None:
    """Serves until SIGTERM, or meets its mishap."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--address", default="")
    parser.add_argument("--admin-address", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--mishap", default="")
    args = parser.parse_args()

    async def run(stop: asyncio.Event) -> None:
        if args.mishap == "mistake":
            raise StartupError("there is no model 'nonesuch'")
        if args.mishap == "stubborn":
            stop = asyncio.Event()  # deaf to SIGTERM
        await (_serve_gateway if args.role == "gateway" else _serve_peer)(args, stop)

    process.run(run)


if __name__ == "__main__":
    main()
