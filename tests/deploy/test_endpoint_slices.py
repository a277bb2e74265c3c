"""The gateway's watch of EndpointSlices against a real API server, with the chart's own rights.

Needs SHOAL_TEST_KUBE_DIR (see `tests.deploy.cluster`), helm and kubectl; skipped without.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.gateway.discovery.kubernetes import EndpointSlices, KubernetesApi, WatchTimes
from tests.deploy.charts import CHART, NAMESPACE, find_helm
from tests.deploy.cluster import Cluster, answers_200, running, until
from tests.deploy.proxy import proxied
from tests.gateway.discovery.fake_api import Json, endpoint, endpoint_slice

pytestmark = [pytest.mark.slow, pytest.mark.integration]

TIMES = WatchTimes(answer=5, first_retry=0.1, max_retry=0.5)


@pytest.fixture(scope="module")
def cluster(kube_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(kube_dir, tmp_path_factory.mktemp("kube"), "127.0.0.1") as cluster:
        yield cluster


class Watch:
    """A source, pulled all the time; `until` waits for a set."""

    def __init__(self, source: EndpointSlices) -> None:
        self._source = source
        self._changed = asyncio.Condition()
        self.current: frozenset[str] | None = None

    async def run(self) -> None:
        async for addresses in self._source.watch():
            async with self._changed:
                self.current = addresses
                self._changed.notify_all()

    async def until(self, *expected: str) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: self.current == frozenset(expected))


@asynccontextmanager
async def watching(
    cluster: Cluster, account: str, tmp_path: Path, url: str = ""
) -> AsyncIterator[Watch]:
    """Watches with a service account's token, at another URL where one is given."""
    token = tmp_path / "token"
    token.write_text(await cluster.service_account_token(account))
    url = url or f"https://127.0.0.1:{cluster.port}"
    api = KubernetesApi(url, token, cluster.ca_file if url.startswith("https") else None)
    watch = Watch(EndpointSlices(api, NAMESPACE, "worker", "grpc", times=TIMES))
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _apply(cluster: Cluster, item: Json) -> None:
    full = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **item}
    path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
    async with cluster.client() as client:
        answer = await client.put(f"{path}/{item['metadata']['name']}", json=full)
        if answer.status_code == 404:
            answer = await client.post(path, json=full)
        answer.raise_for_status()


@pytest.fixture(scope="module")
def rights(cluster: Cluster) -> None:
    """The chart's service accounts, role and binding, without its pods."""
    helm = find_helm()
    assert helm is not None
    files = ["gateway/serviceaccount", "gateway/role", "gateway/rolebinding"]
    shown = [f"--show-only=templates/{file}.yaml" for file in [*files, "worker/serviceaccount"]]
    objects = cluster.run_helm(helm, "template", "shoal", str(CHART), *shown)
    cluster.kubectl("apply", f"--namespace={NAMESPACE}", "-f", "-", input=objects)


@pytest.mark.usefixtures("rights")
async def test_other_service_accounts_may_not_watch(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(cluster, "shoal-worker", tmp_path) as watch:
        await until(lambda: any("answers 403" in r.getMessage() for r in caplog.records))
        assert watch.current is None


@pytest.mark.usefixtures("rights")
async def test_a_dropped_watch_and_a_real_410_are_followed_by_a_list(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with (
        proxied(cluster) as proxy,
        watching(cluster, "shoal-gateway", tmp_path, proxy.url) as watch,
    ):
        await watch.until()
        await _apply(cluster, endpoint_slice("worker-c", endpoint("10.0.1.1")))
        await watch.until("10.0.1.1:50051")
        lists = proxy.num_lists
        proxy.drop()
        await _apply(cluster, endpoint_slice("worker-c", endpoint("10.0.1.2")))
        await watch.until("10.0.1.2:50051")
        assert proxy.num_lists > lists

        proxy.age_next_watch()
        proxy.drop()
        await until(lambda: proxy.num_expired == 1)
        await _apply(cluster, endpoint_slice("worker-c", endpoint("10.0.1.3")))
        await watch.until("10.0.1.3:50051")
        path = ("delete", f"--namespace={NAMESPACE}", "endpointslices", "worker-c")
        await asyncio.to_thread(cluster.kubectl, *path)
        await watch.until()


# The last one: the controllers do not all outlive their API server.
@pytest.mark.usefixtures("rights")
async def test_endpoint_slices_of_a_real_api_server(cluster: Cluster, tmp_path: Path) -> None:
    async with watching(cluster, "shoal-gateway", tmp_path) as watch:
        await watch.until()
        await _apply(cluster, endpoint_slice("worker-a", endpoint("10.0.0.1")))
        await watch.until("10.0.0.1:50051")
        both = [endpoint("10.0.0.1"), endpoint("10.0.0.2")]
        await _apply(cluster, endpoint_slice("worker-a", *both))
        await watch.until("10.0.0.1:50051", "10.0.0.2:50051")
        leaving = [endpoint("10.0.0.1", ready=False, terminating=True), endpoint("10.0.0.2")]
        await _apply(cluster, endpoint_slice("worker-a", *leaving))
        await watch.until("10.0.0.2:50051")

        start_again = cluster.restart_api_server()
        await asyncio.sleep(1)  # an outage is a length of time
        assert watch.current == frozenset({"10.0.0.2:50051"})
        start_again()
        async with cluster.client() as client:
            await until(lambda: answers_200(client, "/readyz"))
        await _apply(cluster, endpoint_slice("worker-b", endpoint("10.0.0.3")))
        await watch.until("10.0.0.2:50051", "10.0.0.3:50051")

        cluster.kubectl("delete", f"--namespace={NAMESPACE}", "endpointslices", "--all")
        await watch.until()
