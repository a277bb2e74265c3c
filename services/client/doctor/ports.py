"""The ports of a gateway: whether one could listen, and whether a Shoal listens already."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.client.doctor.finding import Finding, ok, warning
from services.common.errors import StartupError
from services.common.listening import require_free

_ANSWER_SECONDS = 2.0


def check_ports(host: str, ports: dict[str, int]) -> Iterator[Finding]:
    """Whether a gateway could listen at `host` on each flag's port."""
    for flag, port in ports.items():
        if port <= 0:
            continue
        address = f"{host}:{port}"
        try:
            require_free(address, flag)
        except StartupError as error:
            if _speaks_rest(address) or _speaks_grpc(address):
                text = f"a Shoal that is running has port {port} on {host}; choose another with"
                yield warning("ports", f"{text} {flag} to start one more")
            else:
                yield warning("ports", str(error))
        else:
            yield ok("ports", f"{address} is free")


def _speaks_rest(address: str) -> bool:
    """Whether a gateway answers over HTTP, or over HTTPS, whose certificate does not matter."""
    with httpx.Client(timeout=_ANSWER_SECONDS, verify=False, trust_env=False) as client:
        return any(_is_gateway(client, f"{scheme}://{address}") for scheme in ("http", "https"))


def _is_gateway(client: httpx.Client, root: str) -> bool:
    try:
        alive = client.get(f"{root}/livez")
        # 401: it has keys, and none is needed to know what it is.
        return alive.text == "ok\n" and client.get(f"{root}/server_info").status_code in (200, 401)
    except httpx.HTTPError:
        return False


def _speaks_grpc(address: str) -> bool:
    """Whether a server knows the health of a gateway's service, without TLS."""
    request = health_pb2.HealthCheckRequest(service="shoal.v1.Inference")
    with grpc.insecure_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=_ANSWER_SECONDS)
        except grpc.RpcError:
            return False
    return True
