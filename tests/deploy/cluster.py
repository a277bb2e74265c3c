"""A real Kubernetes API without nodes, and one node that is played.

The API server, etcd and the controllers come from the directory that
SHOAL_TEST_KUBE_DIR names, whose `up DIR API_PORT ETCD_PORT` starts them. The node
binds pods, runs their container's command as a process of this machine with an
address of its own in 127.0.0.0/8, asks the readiness probe, and reports the status;
what a scheduler, a kubelet and a network do otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.charts import CHART, NAMESPACE, ROOT, SERVICES, find_helm

Json = dict[str, Any]
NODE = "played"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cluster:
    """The API server and its clients. `stop` ends every process it started."""

    def __init__(self, kube_dir: Path, directory: Path) -> None:
        helm = find_helm()
        assert helm is not None
        self._up = kube_dir / "up"
        self._helm = helm
        self.directory = directory
        self.port = _free_port()
        self._restarted: list[subprocess.Popen[bytes]] = []
        path = f"{Path(helm).resolve().parent}:{os.environ['PATH']}"  # kubectl comes with helm
        self._environment = {
            **os.environ,
            "PATH": path,
            "KUBECONFIG": str(directory / "kubeconfig"),
        }

    def start(self) -> None:
        self._run([str(self._up), str(self.directory), str(self.port), str(_free_port())])
        self.kubectl("create", "namespace", NAMESPACE)

    def stop(self) -> None:
        for file in self.directory.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        for process in self._restarted:
            process.wait(timeout=60)

    def restart_api_server(self) -> Callable[[], None]:
        """Kills the API server; the function returned starts it again."""
        pid_file = self.directory / "api.pid"
        pid = int(pid_file.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        os.kill(pid, signal.SIGKILL)

        def again() -> None:
            with (self.directory / "api.log").open("ab") as log:
                process = subprocess.Popen(
                    command, cwd=self.directory, stdout=log, stderr=log, start_new_session=True
                )
            self._restarted.append(process)
            pid_file.write_text(str(process.pid))

        return again

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self._run(["kubectl", *arguments], input)

    def helm(self, *arguments: str) -> str:
        return self._run([self._helm, *arguments, f"--namespace={NAMESPACE}"])

    def install(self, release: str, *arguments: str) -> str:
        """Installs the chart and waits until every pod is ready; what helm said."""
        return self._release("install", release, *arguments)

    def upgrade(self, release: str, *arguments: str) -> str:
        """Changes the values and waits for the new pods; what helm said."""
        return self._release("upgrade", release, "--reuse-values", *arguments)

    def _release(self, verb: str, release: str, *arguments: str) -> str:
        # This API server knows no policy/v1 and no native grpc probes.
        without = [f"--set={service}.podDisruptionBudget.enabled=false" for service in SERVICES]
        if self._run([self._helm, "version", "--short"]).startswith("v4"):
            without.append("--server-side=false")  # which its API server is too old for
        waiting = ("--wait", "--timeout=90s", "--set=probes.type=http")
        return self.helm(verb, release, str(CHART), *waiting, *without, *arguments)

    def client(self) -> httpx.AsyncClient:
        """A client with every right."""
        config = yaml.safe_load((self.directory / "kubeconfig").read_text())
        token = config["users"][0]["user"]["token"]
        return httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {token}"},
            verify=False,
            trust_env=False,
        )

    @property
    def ca_file(self) -> Path:
        return self.directory / "certs" / "apiserver.crt"

    async def service_account_token(self, name: str) -> str:
        """A token of a service account, as a pod of it is given."""
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
        async with self.client() as client:
            answer = await client.post(path, json={"spec": {"expirationSeconds": 3600}})
            answer.raise_for_status()
            token: str = answer.json()["status"]["token"]
            return token

    def _run(self, command: list[str], input: str | None = None) -> str:
        done = subprocess.run(
            command,
            env=self._environment,
            input=input,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


@dataclass
class RunningPod:
    """A pod's process and what the node last said of it."""

    name: str
    ip: str
    labels: dict[str, str]
    process: asyncio.subprocess.Process
    probe: str  # URL; empty where the pod runs to its end
    pre_stop: float
    ready: bool = False
    ending: asyncio.Task[None] | None = None


class PlayedNode:
    """Plays the scheduler, the kubelet and the network for one namespace."""

    def __init__(self, cluster: Cluster, logs: Path) -> None:
        self._cluster = cluster
        self._logs = logs
        self._client = cluster.client()
        self._probes = httpx.AsyncClient(trust_env=False, timeout=5)
        self.pods: dict[str, RunningPod] = {}
        self._num_addresses = 0

    async def run(self) -> None:
        """Plays until cancelled; then kills what still runs."""
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        await self._client.post("/api/v1/nodes", json=node)
        try:
            while True:
                await self._sync()
                await asyncio.sleep(0.2)  # a kubelet syncs by the clock, too
        finally:
            for pod in self.pods.values():
                if pod.process.returncode is None:
                    pod.process.kill()
                await pod.process.wait()
            await self._client.aclose()
            await self._probes.aclose()

    async def _sync(self) -> None:
        for item in (await self._client.get(PODS)).json()["items"]:
            uid = item["metadata"]["uid"]
            if uid not in self.pods and "deletionTimestamp" not in item["metadata"]:
                self.pods[uid] = await self._start(item)
            pod = self.pods.get(uid)
            if pod is None:
                continue
            if "deletionTimestamp" in item["metadata"] and pod.ending is None:
                pod.ending = asyncio.create_task(self._end(pod))
            if not pod.probe:
                await self._report_end(pod)
                continue
            ready = await self._probe(pod)
            if ready != pod.ready:
                pod.ready = ready
                await self._report(pod)

    async def _start(self, item: Json) -> RunningPod:
        (container,) = item["spec"]["containers"]
        self._num_addresses += 1
        ip = f"127.77.{self._num_addresses // 250}.{self._num_addresses % 250 + 1}"
        name = item["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"metadata": {"name": name}, "target": target}
        await self._client.post(f"{PODS}/{name}/binding", json=binding)
        labels = item["metadata"]["labels"]
        if "readinessProbe" not in container:  # the pod of `helm test`
            return RunningPod(name, ip, labels, await self._run(item, container), "", 0)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        get = container["readinessProbe"]["httpGet"]
        pod = RunningPod(
            name,
            ip,
            labels,
            await self._spawn(item, container, ip),
            f"http://{ip}:{ports[get['port']]}{get['path']}",
            float(container["lifecycle"]["preStop"]["exec"]["command"][1]),
        )
        await self._report(pod)
        return pod

    async def _run(self, item: Json, container: Json) -> asyncio.subprocess.Process:
        """A command that ends by itself, with a cluster's DNS played in its arguments."""
        _, *options = container["command"]
        arguments = [await self._resolved(text) for text in container["args"]]
        with (self._logs / f"{item['metadata']['name']}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, *options, *arguments), stdout=log, stderr=log
            )

    async def _resolved(self, url: str) -> str:
        """A URL of a Service as that of one of its ready pods; other text as it is."""
        match = re.fullmatch(r"(https?://)([a-z0-9-]+)(:[0-9]+)", url)
        if match is None:
            return url
        path = f"/api/v1/namespaces/{NAMESPACE}/services/{match[2]}"
        selector = (await self._client.get(path)).json()["spec"]["selector"]
        ready = (pod for pod in self.pods.values() if pod.ready)
        pod = next(pod for pod in ready if selector.items() <= pod.labels.items())
        return f"{match[1]}{pod.ip}{match[3]}"

    async def _spawn(self, item: Json, container: Json, ip: str) -> asyncio.subprocess.Process:
        """The container's command on the pod's address, with the pod's service account."""
        arguments = [argument.replace("0.0.0.0", ip) for argument in container["args"]]
        # A limit that comes by the downward API is one core here.
        variables = {e["name"]: e.get("value", "1") for e in container.get("env") or ()}
        command = [sys.executable, "-m", "services", *arguments]
        if item["spec"]["automountServiceAccountToken"]:
            token = await self._cluster.service_account_token(item["spec"]["serviceAccountName"])
            credentials = self._logs / item["metadata"]["name"]
            credentials.mkdir()
            (credentials / "token").write_text(token)
            shutil.copy(self._cluster.ca_file, credentials / "ca.crt")
            variables["KUBERNETES_SERVICE_HOST"] = "127.0.0.1"
            variables["KUBERNETES_SERVICE_PORT"] = str(self._cluster.port)
            place = "/run/secrets/kubernetes.io/serviceaccount"
            mount = f"mount -t tmpfs tmpfs /run && mkdir -p {place} && cp {credentials}/* {place}"
            command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
        log = (self._logs / f"{item['metadata']['name']}.log").open("wb")
        with log:
            return await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    async def _probe(self, pod: RunningPod) -> bool:
        try:
            return (await self._probes.get(pod.probe)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _report(self, pod: RunningPod) -> None:
        state = "True" if pod.ready else "False"
        conditions = [{"type": kind, "status": state} for kind in ("Ready", "ContainersReady")]
        status = {
            "phase": "Running",
            "podIP": pod.ip,
            "podIPs": [{"ip": pod.ip}],
            "conditions": conditions,
        }
        await self._patch_status(pod, status)

    async def _report_end(self, pod: RunningPod) -> None:
        if pod.process.returncode is not None:
            phase = "Failed" if pod.process.returncode else "Succeeded"
            await self._patch_status(pod, {"phase": phase, "podIP": pod.ip})

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
        await self._client.request("DELETE", f"{PODS}/{pod.name}", json={"gracePeriodSeconds": 0})
