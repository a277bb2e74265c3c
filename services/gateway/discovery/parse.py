"""Addresses as a person writes them -> a source.

10.0.0.7:50051, unix:/run/worker.sock    as they are
dns:shoal-worker.llm.svc:50051           every address behind a name
k8s:llm/shoal-worker:grpc                the ready endpoints of a Service's port
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from services.common.errors import StartupError
from services.common.listening import is_unix
from services.gateway.discovery.dns import DnsAddresses
from services.gateway.discovery.kubernetes import EndpointSlices, KubernetesApi
from services.gateway.discovery.sources import AddressSource, MergedAddresses, StaticAddresses
from services.gateway.discovery.subset import Subset, SubsetAddresses

_HOST = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS = re.compile(rf"dns:(?P<name>{_HOST}(\.{_HOST})*\.?):(?P<port>[0-9]{{1,5}})")
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_KUBERNETES = re.compile(rf"k8s:(?P<namespace>{_LABEL})/(?P<service>{_LABEL}):(?P<port>{_LABEL})")


def address_source(
    addresses: Sequence[str],
    *,
    kubernetes: Callable[[], KubernetesApi] = KubernetesApi.in_cluster,
    subset: Subset | None = None,
) -> AddressSource:
    """The source of everything in `addresses`; `kubernetes` is called if one needs it.

    A `subset` is taken of each Service and name, which have one model each, and of all
    fixed addresses together.

    Raises StartupError, in one sentence, if an address is malformed or the process is
    not in a cluster that it names a Service of.
    """
    fixed: list[str] = []
    sources: list[AddressSource] = []
    for address in addresses:
        if address.startswith("dns:"):
            sources.append(_dns(address))
        elif address.startswith("k8s:"):
            sources.append(_endpoint_slices(address, kubernetes()))
        elif is_unix(address) or _is_host_port(address):
            fixed.append(address)
        else:
            raise StartupError(
                f"peer address {address!r} is not host:port, unix:/path, dns:name:port or"
                " k8s:namespace/service:portname"
            )
    if fixed or not sources:
        sources.append(StaticAddresses(fixed))
    if subset is not None:
        sources = [SubsetAddresses(source, subset) for source in sources]
    return sources[0] if len(sources) == 1 else MergedAddresses(sources)


def _is_host_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def _dns(address: str) -> DnsAddresses:
    match = _DNS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise StartupError(f"address {address!r} is not dns:name:port")
    return DnsAddresses(match["name"], int(match["port"]))


def _endpoint_slices(address: str, api: KubernetesApi) -> EndpointSlices:
    match = _KUBERNETES.fullmatch(address)
    if match is None:
        raise StartupError(f"address {address!r} is not k8s:namespace/service:portname")
    return EndpointSlices(api, match["namespace"], match["service"], match["port"])
