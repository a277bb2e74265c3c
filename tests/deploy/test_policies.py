"""The chart's NetworkPolicies on a real firewall: who reaches whom, exactly.

Every pod is a network namespace where all ports of its service listen; needs root, `ip`, `nft`
and Helm.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.deploy.charts import BACKENDS, Helm, Render
from tests.deploy.network import NetworkError, PodNetwork, PolicedPod

LISTEN = """
import socket, sys
sockets = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("ready", flush=True)
sys.stdin.read()
"""
CONNECT = """
import json, socket, sys
def opens(ip, port):
    try:
        socket.create_connection((ip, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True
targets = json.loads(sys.argv[1])
print(json.dumps([name for name, ip, port in targets if opens(ip, port)]))
"""
STRANGERS = {"stranger": {"app": "other"}, "web": {"app": "web"}}
Reach = dict[str, set[str]]


@contextmanager
def pods_of(render: Render) -> Iterator[dict[str, PolicedPod]]:
    """A pod of each service and two of other applications, that listen, under the policies."""
    with ExitStack() as stack:
        network = PodNetwork()
        try:
            network.open()
        except NetworkError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        stack.callback(network.close)
        pods: dict[str, PolicedPod] = {}
        for name, labels in {**render.pod_labels(), **STRANGERS}.items():
            ports = {}
            if name not in STRANGERS:
                (container,) = render.one("Deployment", name)["spec"]["template"]["spec"][
                    "containers"
                ]
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            pods[name.removeprefix("shoal-")] = PolicedPod(network.add_pod(), labels, ports)
        for pod in pods.values():
            command = [sys.executable, "-c", LISTEN, *map(str, pod.ports.values())]
            process = subprocess.Popen(
                pod.address.inside(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.enter_context(process)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        network.enforce(list(pods.values()), render.of("NetworkPolicy").values())
        yield pods


def reached(pods: dict[str, PolicedPod]) -> Reach:
    """What each pod can open a connection to, as service:port."""
    found: Reach = {}
    for name, pod in pods.items():
        targets = [
            (f"{other}:{port}", target.address.ip, number)
            for other, target in pods.items()
            for port, number in target.ports.items()
            if other != name
        ]
        command = pod.address.inside(sys.executable, "-c", CONNECT, json.dumps(targets))
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found[name] = set(json.loads(done.stdout))
    return found


def test_who_reaches_whom(helm: Helm, default: Render) -> None:
    metrics = {f"{backend}:admin" for backend in BACKENDS} | {"gateway:admin"}
    with pods_of(default) as pods:
        everybody = metrics | {"gateway:http", "gateway:grpc"}
        assert reached(pods) == {
            "gateway": {f"{backend}:grpc" for backend in BACKENDS},
            **{backend: set() for backend in BACKENDS},
            "stranger": everybody,
            "web": everybody,
        }
    closed = {
        "networkPolicy.gatewayFrom[0].podSelector.matchLabels.app": "web",
        "networkPolicy.metricsFrom[0].podSelector.matchLabels.app": "prometheus",
        "detokenizer.enabled": "false",
    }
    with pods_of(helm.template(sets=closed)) as pods:
        assert reached(pods) == {
            "gateway": {"tokenizer:grpc", "worker:grpc"},
            "tokenizer": set(),
            "worker": set(),
            "stranger": set(),
            "web": {"gateway:http", "gateway:grpc"},
        }
