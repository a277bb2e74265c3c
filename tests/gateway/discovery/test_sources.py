"""Static and merged addresses, and what a person may write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.errors import StartupError
from services.gateway.discovery import StaticAddresses, address_source
from services.gateway.discovery.dns import DnsAddresses
from services.gateway.discovery.kubernetes import EndpointSlices, KubernetesApi
from services.gateway.discovery.sources import MergedAddresses


class Scripted:
    """A source that yields what a test puts in; None ends it."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[frozenset[str] | Exception | None] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while (item := await self.sets.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


async def test_merged_is_the_union_and_a_silent_source_holds_up_nobody() -> None:
    silent, live = Scripted(), Scripted()
    watch = MergedAddresses([StaticAddresses(["a:1"]), silent, live]).watch()
    assert await anext(watch) == {"a:1"}
    live.sets.put_nowait(frozenset({"b:2", "c:3"}))
    seen = frozenset[str]()
    while "b:2" not in seen:
        seen = await anext(watch)
    assert seen == {"a:1", "b:2", "c:3"}
    live.sets.put_nowait(frozenset({"c:3"}))
    assert await anext(watch) == {"a:1", "c:3"}


async def test_merged_ends_with_its_last_source_and_keeps_what_they_said() -> None:
    source = Scripted()
    watch = MergedAddresses([StaticAddresses(["a:1"]), source]).watch()
    source.sets.put_nowait(frozenset({"b:2"}))
    source.sets.put_nowait(None)
    assert [item async for item in watch][-1] == {"a:1", "b:2"}


async def test_a_fault_of_a_merged_source_is_not_lost() -> None:
    source = Scripted()
    source.sets.put_nowait(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        [item async for item in MergedAddresses([StaticAddresses([]), source]).watch()]


def test_addresses_choose_their_source() -> None:
    def api() -> KubernetesApi:
        return KubernetesApi("http://api")

    assert isinstance(address_source([]), StaticAddresses)
    assert isinstance(address_source(["a:1", "unix:/run/x.sock"]), StaticAddresses)
    assert isinstance(
        address_source(["dns:shoal-worker.llm.svc.cluster.local.:50051"]), DnsAddresses
    )
    source = address_source(["k8s:llm/shoal-worker:grpc"], kubernetes=api)
    assert isinstance(source, EndpointSlices)
    assert isinstance(address_source(["a:1", "dns:b:2"]), MergedAddresses)


@pytest.mark.parametrize(
    "address",
    [
        "dns:",
        "dns:name",
        "dns:name:0",
        "dns:name:65536",
        "dns:a..b:1",
        "dns:" + "a" * 64 + ":1",
        "k8s:service:grpc",
        "k8s:ns/service",
        "k8s:ns/Service:grpc",
        "k8s:../x:grpc",
        "k8s:ns/service:grpc?watch=1",
    ],
)
def test_a_malformed_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(StartupError, match="is not"):
        address_source([address], kubernetes=lambda: KubernetesApi("http://api"))


def test_a_cluster_address_outside_a_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="only in a pod"):
        KubernetesApi.in_cluster({}, tmp_path)
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    with pytest.raises(StartupError, match="token"):
        KubernetesApi.in_cluster(environment, tmp_path)
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "ca.crt").write_text("")
    api = KubernetesApi.in_cluster(environment, tmp_path)
    assert api.base_url == "https://[fd00::1]:6443"
    assert api.headers() == {"Authorization": "Bearer first"}
    (tmp_path / "token").write_text("second")  # the kubelet rotates it
    assert api.headers() == {"Authorization": "Bearer second"}
