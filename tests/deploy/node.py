"""A node that is played: what a scheduler, a kubelet and a network do otherwise.

It binds pods, gives each a network namespace, runs its container's command there as a process of
this machine, asks the readiness probe, reports the status, and enforces the NetworkPolicies. The
names of Services stand in each pod's /etc/hosts, in place of a cluster's DNS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.deploy.charts import NAMESPACE, ROOT
from tests.deploy.cluster import Cluster, Json
from tests.deploy.network import PodAddress, PodNetwork, PolicedPod

NODE = "played"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
POLICIES = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"


@dataclass
class RunningPod:
    """A pod's process and what the node last said of it."""

    name: str
    address: PodAddress
    labels: dict[str, str]
    ports: dict[str, int]
    process: asyncio.subprocess.Process
    probe: str  # URL; empty where the pod runs to its end
    pre_stop: float
    ready: bool = False
    ending: asyncio.Task[None] | None = None

    @property
    def component(self) -> str:
        """Which service it is of."""
        return self.labels["app.kubernetes.io/component"]


class PlayedNode:
    """Plays the node for one namespace."""

    def __init__(self, cluster: Cluster, network: PodNetwork, logs: Path) -> None:
        self._cluster = cluster
        self._network = network
        self._logs = logs
        self._client = cluster.client()
        self._probes = httpx.AsyncClient(trust_env=False, timeout=5)
        self._pods: dict[str, RunningPod] = {}  # by uid; None is started twice

    async def run(self) -> None:
        """Plays until cancelled; then kills what still runs."""
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        await self._client.post("/api/v1/nodes", json=node)
        try:
            async with self._cluster.reachable():
                while True:
                    await self._sync()
                    await asyncio.sleep(0.2)  # a kubelet syncs by the clock, too
        finally:
            for pod in self.running():
                pod.process.kill()
                await pod.process.wait()
            await self._client.aclose()
            await self._probes.aclose()

    def running(self, component: str = "") -> list[RunningPod]:
        """The pods whose process runs, of one service or of all."""
        return [
            pod
            for pod in self._pods.values()
            if pod.process.returncode is None and component in ("", pod.component)
        ]

    async def _sync(self) -> None:
        items = {
            item["metadata"]["uid"]: item for item in (await self._client.get(PODS)).json()["items"]
        }
        new = [
            uid
            for uid, item in items.items()
            if uid not in self._pods and "deletionTimestamp" not in item["metadata"]
        ]
        for uid in new:
            self._pods[uid] = await self._start(items[uid])
        if new:
            await self._enforce()
        for uid, item in items.items():
            if uid in self._pods:
                await self._look(self._pods[uid], "deletionTimestamp" in item["metadata"])

    async def _enforce(self) -> None:
        policies = (await self._client.get(POLICIES)).json()["items"]
        pods = [PolicedPod(pod.address, pod.labels, pod.ports) for pod in self.running()]
        await asyncio.to_thread(self._network.enforce, pods, policies)

    async def _look(self, pod: RunningPod, deleted: bool) -> None:
        if deleted and pod.ending is None:
            pod.ending = asyncio.create_task(self._end(pod))
        if not pod.probe:
            await self._report_end(pod)
            return
        ready = await self._probe(pod)
        if ready != pod.ready:
            pod.ready = ready
            await self._report(pod)

    async def _start(self, item: Json) -> RunningPod:
        (container,) = item["spec"]["containers"]
        name = item["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"metadata": {"name": name}, "target": target}
        await self._client.post(f"{PODS}/{name}/binding", json=binding)
        address = self._network.add_pod()
        labels = item["metadata"]["labels"]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports") or ()}
        process = await self._spawn(item, container, address)
        if "readinessProbe" not in container:  # the pod of `helm test`
            return RunningPod(name, address, labels, ports, process, "", 0)
        get = container["readinessProbe"]["httpGet"]
        pod = RunningPod(
            name,
            address,
            labels,
            ports,
            process,
            f"http://{address.ip}:{ports[get['port']]}{get['path']}",
            float(container["lifecycle"]["preStop"]["exec"]["command"][1]),
        )
        await self._report(pod)
        return pod

    async def _spawn(
        self, item: Json, container: Json, address: PodAddress
    ) -> asyncio.subprocess.Process:
        """The container's command at the pod's address, with what a kubelet mounts."""
        _, *options = container.get("command") or ("", "-m", "services")
        files = self._logs / item["metadata"]["name"]
        files.mkdir()
        # A limit that comes by the downward API is one core here.
        variables = {e["name"]: e.get("value", "1") for e in container.get("env") or ()}
        setup = [f"mount --bind {await self._hosts(files)} /etc/hosts"]
        if item["spec"]["automountServiceAccountToken"]:
            setup.append(await self._mount_account(files, item["spec"]["serviceAccountName"]))
            variables["KUBERNETES_SERVICE_HOST"] = self._cluster.node_ip
            variables["KUBERNETES_SERVICE_PORT"] = "443"
        script = " && ".join([*setup, 'exec "$@"'])
        command = ["sh", "-c", script, "sh", sys.executable, *options, *container["args"]]
        with (self._logs / f"{item['metadata']['name']}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *address.inside("unshare", "--mount", *command),
                cwd=ROOT,
                env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    async def _hosts(self, files: Path) -> str:
        """A file of hosts: each Service that is no headless one, as one of its ready pods."""
        lines = ["127.0.0.1 localhost"]
        for service in (await self._client.get(SERVICES)).json()["items"]:
            spec = service["spec"]
            ready = (pod for pod in self.running() if pod.ready)
            pods = [pod for pod in ready if spec["selector"].items() <= pod.labels.items()]
            if pods and spec["clusterIP"] != "None":
                lines.append(f"{pods[0].address.ip} {service['metadata']['name']}")
        path = files / "hosts"
        path.write_text("\n".join(lines) + "\n")
        return shlex.quote(str(path))

    async def _mount_account(self, files: Path, account: str) -> str:
        """The shell's words that mount a service account's token and the API server's CA."""
        (files / "token").write_text(await self._cluster.service_account_token(account))
        shutil.copy(self._cluster.ca_file, files / "ca.crt")
        return (
            f"mount -t tmpfs tmpfs /run && mkdir -p {ACCOUNT}"
            f" && cp {files}/token {files}/ca.crt {ACCOUNT}"
        )

    async def _probe(self, pod: RunningPod) -> bool:
        try:
            return (await self._probes.get(pod.probe)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _report(self, pod: RunningPod) -> None:
        state = "True" if pod.ready else "False"
        conditions = [{"type": kind, "status": state} for kind in ("Ready", "ContainersReady")]
        ip = pod.address.ip
        addresses = {"podIP": ip, "podIPs": [{"ip": ip}]}
        await self._patch_status(pod, {"phase": "Running", **addresses, "conditions": conditions})

    async def _report_end(self, pod: RunningPod) -> None:
        if pod.process.returncode is not None:
            phase = "Failed" if pod.process.returncode else "Succeeded"
            await self._patch_status(pod, {"phase": phase, "podIP": pod.address.ip})

    async def _patch_status(self, pod: RunningPod, status: Json) -> None:
        await self._client.patch(
            f"{PODS}/{pod.name}/status",
            json={"status": status},
            headers={"Content-Type": "application/strategic-merge-patch+json"},
        )

    async def _end(self, pod: RunningPod) -> None:
        """preStop, SIGTERM, and the object's end when the process has ended."""
        await asyncio.sleep(pod.pre_stop)
        with contextlib.suppress(ProcessLookupError):
            pod.process.terminate()
        await pod.process.wait()
        self._network.remove_pod(pod.address)
        await self._client.request("DELETE", f"{PODS}/{pod.name}", json={"gracePeriodSeconds": 0})
