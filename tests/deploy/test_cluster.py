"""The chart on a real API server, and the gateway's watch of its EndpointSlices.

Needs SHOAL_TEST_KUBE_DIR (see `tests.deploy.cluster`), helm, kubectl and the right to
make mount namespaces; skipped where one is missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.gateway.discovery.kubernetes import EndpointSlices, KubernetesApi, WatchTimes
from tests.deploy.charts import CHART, NAMESPACE, find_helm
from tests.deploy.cluster import Cluster, PlayedNode
from tests.deploy.proxy import proxied
from tests.gateway.discovery.fake_api import Json, endpoint, endpoint_slice

pytestmark = [pytest.mark.slow, pytest.mark.integration]

FAKE_MODEL = "--set-json=" + ",".join(
    [
        *(f'{s}.extraArgs=["--model=byte"]' for s in ("tokenizer", "detokenizer", "worker")),
        'worker.config={"engine":"fake","fakeStepMs":10}',
    ]
)
OURS = "app.kubernetes.io/part-of=shoal"
TIMES = WatchTimes(answer=5, first_retry=0.1, max_retry=0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    kube_dir = os.environ.get("SHOAL_TEST_KUBE_DIR")
    if not kube_dir:
        pytest.skip("SHOAL_TEST_KUBE_DIR names no directory with a Kubernetes API server")
    if find_helm() is None or shutil.which("etcd") is None or shutil.which("unshare") is None:
        pytest.skip("helm, etcd or unshare is missing")
    cluster = Cluster(Path(kube_dir), tmp_path_factory.mktemp("kube"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


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
    files = ["gateway/serviceaccount", "gateway/role", "gateway/rolebinding"]
    shown = [f"--show-only=templates/{file}.yaml" for file in [*files, "worker/serviceaccount"]]
    objects = cluster.helm("template", "shoal", str(CHART), *shown)
    cluster.kubectl("apply", f"--namespace={NAMESPACE}", "-f", "-", input=objects)


async def test_streams_survive_the_life_of_a_release(cluster: Cluster, tmp_path: Path) -> None:
    """Install, helm test, rolling restart, upgrade, rollback, uninstall; streams run through."""
    node = PlayedNode(cluster, tmp_path)
    playing = asyncio.create_task(node.run())
    try:
        replicas = [f"--set={s}.replicas=1" for s in ("gateway", "tokenizer", "detokenizer")]
        scaled = "--set=worker.replicas=2,drainSeconds=3"
        said = await asyncio.to_thread(cluster.install, "loop", *replicas, scaled, FAKE_MODEL)
        show("helm install loop deploy/k8s/shoal", said)
        gateway = next(pod for pod in node.pods.values() if "gateway" in pod.name)
        url = f"http://{gateway.ip}:8000"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as client:
            await _until(lambda: _answers_200(client, "/readyz"))
            show("helm test loop", await asyncio.to_thread(cluster.helm, "test", "loop"))
            undisturbed = await _stream(client, 200)

            def upgrade() -> str:
                return cluster.upgrade("loop", "--set=worker.config.maxQueue=99")

            def roll_back() -> str:
                return cluster.helm("rollback", "loop", "1", "--wait", "--timeout=90s")

            async with _streaming_through(client, node, undisturbed):
                show("kubectl rollout restart", await asyncio.to_thread(_restart, cluster))
            async with _streaming_through(client, node, undisturbed):
                show(
                    "helm upgrade loop --set worker.config.maxQueue=99",
                    await asyncio.to_thread(upgrade),
                )
            async with _streaming_through(client, node, undisturbed):
                show("helm rollback loop 1", await asyncio.to_thread(roll_back))
        history = await asyncio.to_thread(cluster.helm, "history", "loop", "--output=json")
        revisions = json.loads(history)
        assert [item["status"] for item in revisions] == ["superseded", "superseded", "deployed"]
        assert revisions[-1]["description"] == "Rollback to 1"
        show("helm uninstall loop", await asyncio.to_thread(cluster.helm, "uninstall", "loop"))
        kinds = "deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,pods"
        ours = ("get", kinds, f"--namespace={NAMESPACE}", "--output=name", "-l", OURS)
        await _until(lambda: cluster.kubectl(*ours).strip() == "")
    finally:
        playing.cancel()
        await asyncio.wait([playing])


def _restart(cluster: Cluster) -> str:
    """Replaces every worker, one after the other; what kubectl said."""
    worker = "deployment/loop-shoal-worker"
    restart = cluster.kubectl("rollout", "restart", worker, f"--namespace={NAMESPACE}")
    wait = ("rollout", "status", worker, f"--namespace={NAMESPACE}", "--timeout=90s")
    return restart + cluster.kubectl(*wait)


@asynccontextmanager
async def _streaming_through(
    client: httpx.AsyncClient, node: PlayedNode, undisturbed: str
) -> AsyncIterator[None]:
    """Four streams, longer than the drain, run while both workers are replaced.

    Each must end with all its tokens, once and in order: a fake engine's text is known.
    """
    half_way = asyncio.Event()
    streams = [asyncio.create_task(_stream(client, 1500, half_way.set)) for _ in range(4)]
    await half_way.wait()
    before = {pod.name for pod in node.pods.values() if "worker" in pod.name}
    yield
    texts = await asyncio.gather(*streams)
    after = {pod.name for pod in node.pods.values() if "worker" in pod.name}
    assert len(after - before) == 2
    assert len(set(texts)) == 1
    assert texts[0].startswith(undisturbed)
    show(
        "four streams through it", f"{len(texts)} of 1500 tokens each, all the same text, none lost"
    )


def show(command: str, said: str) -> None:
    """Prints a piece of the transcript."""
    print(f"$ {command}\n{said.strip()}\n")


@pytest.mark.usefixtures("rights")
async def test_other_service_accounts_may_not_watch(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(cluster, "shoal-worker", tmp_path) as watch:
        await _until(lambda: any("answers 403" in r.getMessage() for r in caplog.records))
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
        await _until(lambda: proxy.num_expired == 1)
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
            await _until(lambda: _answers_200(client, "/readyz"))
        await _apply(cluster, endpoint_slice("worker-b", endpoint("10.0.0.3")))
        await watch.until("10.0.0.2:50051", "10.0.0.3:50051")

        cluster.kubectl("delete", f"--namespace={NAMESPACE}", "endpointslices", "--all")
        await watch.until()


async def _until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while True:
            held = holds()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.1)  # what is asked tells nobody when it changes


async def _answers_200(client: httpx.AsyncClient, path: str) -> bool:
    try:
        return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False


async def _stream(
    client: httpx.AsyncClient, max_tokens: int, half_way: Callable[[], None] = lambda: None
) -> str:
    """The text of one streamed completion, which must end with its length and [DONE]."""
    body = {
        "prompt": "once",
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    text, last = "", ""
    reasons: list[str] = []
    usage: Json = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            last = line[5:].strip()
            if last == "[DONE]":
                break
            event = json.loads(last)
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            if len(text) > max_tokens // 4:
                half_way()
    assert last == "[DONE]"
    assert reasons == ["length"]
    assert usage["completion_tokens"] == max_tokens
    return text
