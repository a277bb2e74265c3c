"""The images, built, looked into and run as a fleet. Takes minutes: SHOAL_FULL=1 only.

Needs buildah, podman and runc, and a base image (see `tests.deploy.images`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.deploy.cluster import answers_200, until
from tests.deploy.images import Container, Images, Unavailable, run
from tests.deploy.network import NetworkError, PodNetwork
from tests.full import FULL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FULL, reason="builds images: SHOAL_FULL=1"),
]

MAX_BYTES = {"gateway": 400e6, "tokenizer": 400e6, "worker-cpu": 1400e6}  # unpacked
LOOK = """
import importlib.util, json, shutil
found = lambda names, find: [name for name in names if find(name)]
print(json.dumps({
    "packages": found(["torch", "transformers", "pip", "services"], importlib.util.find_spec),
    "programs": found(["gcc", "cc", "g++", "pip", "tini", "shoal"], shutil.which),
    "sbom": [part["name"] for part in json.load(open("/opt/shoal/sbom.cdx.json"))["components"]],
}))
"""
ENCODE = """
from services.common.text.vocabulary import build_vocabulary
print(build_vocabulary("").tokenizer.encode("Paris").ids)
"""
WRITE = "import os; print([d for d in ('/', '/opt/shoal', '/tmp') if os.access(d, os.W_OK)])"


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    try:
        images = Images()
    except Unavailable as error:
        pytest.skip(str(error))
    yield images
    images.remove()


@pytest.mark.parametrize("target", MAX_BYTES)
def test_an_image_is_small_and_can_do_its_work_alone(images: Images, target: str) -> None:
    config = images.config(target)
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "shoal"]
    assert "readyz" in config["Healthcheck"]["Test"][-1]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"

    container = run("buildah", "from", "--pull-never", images.name(target)).strip()
    try:
        size = _size(run("buildah", "mount", container).strip())
        print(f"{target}: {size / 1e6:.0f} MB unpacked")
        assert size < MAX_BYTES[target]

        def inside(*command: str) -> str:
            return run("buildah", "run", "--user=10001:10001", container, "--", *command)

        worker = target.startswith("worker")
        found = json.loads(inside("python", "-c", LOOK))
        assert found["packages"] == (["torch"] if worker else []) + ["services"]
        assert found["programs"] == ["tini", "shoal"]
        assert {"grpcio", "protobuf"} <= set(found["sbom"])
        assert ("torch" in found["sbom"]) == worker
        service = target.partition("-")[0]
        assert inside("shoal", service, "--help").startswith(f"usage: shoal {service}")
        assert json.loads(inside("python", "-c", ENCODE))  # with the embedded model's header
    finally:
        run("buildah", "rm", container)


async def test_the_images_serve_together_without_rights(images: Images) -> None:
    """One pod's network each, a read-only root, no capabilities: the embedded model answers, the
    HEALTHCHECKs pass, and SIGTERM ends each with status 0."""
    for program in ("podman", "runc"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    network = PodNetwork()
    try:
        network.open()
    except NetworkError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    with ExitStack() as stack:
        stack.callback(network.close)
        pods = {target: network.add_pod() for target in MAX_BYTES}

        def start(target: str, *arguments: str) -> Container:
            place = f"ns:/run/netns/{pods[target].namespace}"
            container = Container(images.name(target), *arguments, network=place)
            stack.callback(container.remove)
            return container

        peers = [
            f"--{service}-addresses={pods[target].ip}:50051"
            for service, target in (("tokenizer", "tokenizer"), ("worker", "worker-cpu"))
        ]
        containers = {
            "tokenizer": start("tokenizer"),
            "worker-cpu": start("worker-cpu", "worker", "--num-threads=1"),
            "gateway": start("gateway", "gateway", *peers),  # which decodes by itself
        }
        url = f"http://{pods['gateway'].ip}:8000"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            await until(lambda: answers_200(client, "/readyz"))
            body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
            answer = await client.post("/v1/chat/completions", json={**body, "temperature": 0})
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        for target, container in containers.items():
            assert container.healthy(), target
            assert container.execute("id", "-u").strip() == "10001"
            assert container.execute("python", "-c", WRITE).strip() == "['/tmp']"
            assert await asyncio.to_thread(container.stop) == 0, target


def _size(directory: str) -> int:
    """Bytes of all files below."""
    done = subprocess.run(
        ["du", "-sb", directory], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout.split()[0])
