"""The closed loop: the chart on a real API server, on a node whose pods are real processes.

Needs SHOAL_TEST_KUBE_DIR (see `tests.deploy.cluster`), helm, kubectl, and root with `ip` and `nft`
for the pods' network namespaces; skipped where one is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.deploy.charts import BACKENDS, NAMESPACE, find_helm
from tests.deploy.cluster import Cluster, Json, Release, answers_200, running, until
from tests.deploy.network import NetworkError, PodAddress, PodNetwork
from tests.deploy.node import PlayedNode

pytestmark = [pytest.mark.slow, pytest.mark.integration]

FAKE_MODEL = "--set-json=" + ",".join(
    [
        *(f'{s}.extraArgs=["--model=byte"]' for s in ("gateway", *BACKENDS)),
        'worker.config={"engine":"fake","fakeStepMs":10}',
    ]
)
OURS = "app.kubernetes.io/part-of=shoal"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"


@pytest.fixture(scope="module")
def network() -> Iterator[PodNetwork]:
    network = PodNetwork()
    try:
        network.open()
    except NetworkError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    yield network
    network.close()


@pytest.fixture(scope="module")
def cluster(
    kube_dir: Path, network: PodNetwork, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with running(kube_dir, tmp_path_factory.mktemp("kube"), network.node_ip) as cluster:
        yield cluster


@pytest.fixture(params=["helm", "helm4"])
def release(request: pytest.FixtureRequest, cluster: Cluster) -> Release:
    binary = find_helm(request.param)
    if binary is None:
        pytest.skip(f"there is no {request.param}; tools/get-helm.py gets it")
    return Release(cluster, binary, request.param.replace("helm", "loop"))


@pytest.fixture
async def node(cluster: Cluster, network: PodNetwork, tmp_path: Path) -> AsyncIterator[PlayedNode]:
    node = PlayedNode(cluster, network, tmp_path)
    playing = asyncio.create_task(node.run())
    yield node
    playing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await playing  # raises what stopped the node, if something did


async def test_streams_survive_the_life_of_a_release(
    cluster: Cluster, release: Release, node: PlayedNode
) -> None:
    """Install, helm test, rolling restart, upgrade, rollback, a gateway that decodes, uninstall."""
    print(f"helm {release.version}")
    replicas = [f"--set={s}.replicas=1" for s in ("gateway", "tokenizer", "detokenizer")]
    scaled = "--set=worker.replicas=2,drainSeconds=3"
    said = await asyncio.to_thread(release.install, *replicas, scaled, FAKE_MODEL)
    show(f"helm install {release.name} deploy/k8s/shoal", said)
    async with _gateway(node) as client:
        show(f"helm test {release.name}", await asyncio.to_thread(release.say, "test"))
        undisturbed = await _stream(client, 200)
        show("kubectl get pods", await asyncio.to_thread(_addresses, cluster))
        refused = await _assert_only_the_paths_of_the_design(node)
        show("connections that the policies refuse", ", ".join(refused))
        async with _streaming_through(client, node, undisturbed):
            show("kubectl rollout restart", await asyncio.to_thread(_restart, cluster, release))
        async with _streaming_through(client, node, undisturbed):
            said = await asyncio.to_thread(release.upgrade, "--set=worker.config.maxQueue=99")
            show(f"helm upgrade {release.name} --set worker.config.maxQueue=99", said)
        async with _streaming_through(client, node, undisturbed):
            waiting = ("1", "--wait", "--timeout=90s")
            show(
                f"helm rollback {release.name} 1",
                await asyncio.to_thread(release.say, "rollback", *waiting),
            )
    revisions = json.loads(await asyncio.to_thread(release.say, "history", "--output=json"))
    assert [item["status"] for item in revisions] == ["superseded", "superseded", "deployed"]
    assert revisions[-1]["description"] == "Rollback to 1"

    said = await asyncio.to_thread(release.upgrade, "--set=detokenizer.enabled=false")
    show(f"helm upgrade {release.name} --set detokenizer.enabled=false", said)
    await until(lambda: not node.running("detokenizer"))
    async with _gateway(node) as client:
        assert await _stream(client, 200) == undisturbed
        show("a stream from the gateway that decodes", "200 tokens, the same text")
    show(f"helm uninstall {release.name}", await asyncio.to_thread(release.say, "uninstall"))
    kinds = "deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,pods"
    ours = ("get", kinds, f"--namespace={NAMESPACE}", "--output=name", "-l", OURS)
    await until(lambda: cluster.kubectl(*ours).strip() == "")


@asynccontextmanager
async def _gateway(node: PlayedNode) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the one gateway, when it finds all it needs."""
    await until(lambda: len(node.running("gateway")) == 1)
    (gateway,) = node.running("gateway")
    url = f"http://{gateway.address.ip}:8000"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as client:
        await until(lambda: answers_200(client, "/readyz"))
        yield client


def _addresses(cluster: Cluster) -> str:
    """The pods with their addresses."""
    columns = "NAME:.metadata.name,IP:.status.podIP,NODE:.spec.nodeName"
    wide = ("get", "pods", f"--namespace={NAMESPACE}", f"--output=custom-columns={columns}")
    return cluster.kubectl(*wide)


async def _assert_only_the_paths_of_the_design(node: PlayedNode) -> list[str]:
    """Under the chart's NetworkPolicies the gateway reaches the others and nobody else does; what
    serves the gateway can open no connection. Returns what was refused."""
    pods = {service: node.running(service)[0].address for service in ("gateway", *BACKENDS)}
    refused = []
    for start, end in itertools.permutations(pods, 2):
        port = 8000 if end == "gateway" else 50051
        connects = await _connects(pods[start], pods[end], port)
        assert connects == (start == "gateway"), (start, end)
        if not connects:
            refused.append(f"{start} to {end}:{port}")
    return refused


async def _connects(start: PodAddress, end: PodAddress, port: int) -> bool:
    """Whether a process at one address can open a connection to another."""
    command = start.inside("python3", "-c", CONNECT, end.ip, str(port))
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stderr=null)
    return await process.wait() == 0


def _restart(cluster: Cluster, release: Release) -> str:
    """Replaces every worker, one after the other; what kubectl said."""
    worker = f"deployment/{release.name}-shoal-worker"
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
    before = {pod.name for pod in node.running("worker")}
    yield
    texts = await asyncio.gather(*streams)
    after = {pod.name for pod in node.running("worker")}
    assert len(after - before) == 2
    assert len(set(texts)) == 1
    assert texts[0].startswith(undisturbed)
    show(
        "four streams through it", f"{len(texts)} of 1500 tokens each, all the same text, none lost"
    )


def show(command: str, said: str) -> None:
    """Prints a piece of the transcript."""
    print(f"$ {command}\n{said.strip()}\n")


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
