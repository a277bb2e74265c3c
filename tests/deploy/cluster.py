"""A real Kubernetes API without nodes, and helm on it.

The API server, etcd and the controllers come from the directory that
SHOAL_TEST_KUBE_DIR names, whose `up DIR API_PORT ETCD_PORT` starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.charts import CHART, NAMESPACE, SERVICES

Json = dict[str, Any]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cluster:
    """The API server and its clients. `stop` ends every process it started.

    `node_ip` is where pods reach the API server, beside its own 127.0.0.1 (`reachable`).
    """

    def __init__(self, kube_dir: Path, directory: Path, node_ip: str) -> None:
        self._up = kube_dir / "up"
        self.directory = directory
        self.node_ip = node_ip
        self.port = _free_port()
        self._restarted: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "KUBECONFIG": str(directory / "kubeconfig")}

    def start(self) -> None:
        self._make_certificate()
        self._run([str(self._up), str(self.directory), str(self.port), str(_free_port())])
        self.kubectl("create", "namespace", NAMESPACE)

    def _make_certificate(self) -> None:
        """The API server's, which it would make for itself without the node's address."""
        self.ca_file.parent.mkdir()
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        names = f"subjectAltName=IP:127.0.0.1,IP:{self.node_ip}"
        files = ["-keyout", str(self.ca_file.with_suffix(".key")), "-out", str(self.ca_file)]
        self._run(
            ["openssl", "req", "-x509", *key, "-subj", "/CN=kubernetes", "-addext", names, *files]
        )

    def stop(self) -> None:
        for file in self.directory.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        for process in self._restarted:
            process.wait(timeout=60)

    @asynccontextmanager
    async def reachable(self) -> AsyncIterator[None]:
        """Within it the API server is at the node's address too, port 443."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                upstream = await asyncio.open_connection("127.0.0.1", self.port)
                await asyncio.gather(_copy(reader, upstream[1]), _copy(upstream[0], writer))

        async with await asyncio.start_server(pass_on, self.node_ip, 443):
            yield

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

    def run_helm(self, binary: str, *arguments: str) -> str:
        """Runs a helm on the namespace; what it said."""
        return self._run([binary, *arguments, f"--namespace={NAMESPACE}"])

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


class Release:
    """A release of the chart, made by one helm."""

    def __init__(self, cluster: Cluster, helm: str, name: str) -> None:
        self._cluster = cluster
        self._helm = helm
        self.name = name
        self.version = cluster.run_helm(helm, "version", "--short").strip()

    def install(self, *arguments: str) -> str:
        """Installs the chart and waits until every pod is ready; what helm said."""
        return self._deploy("install", *arguments)

    def upgrade(self, *arguments: str) -> str:
        """Changes the values and waits for the new pods; what helm said."""
        return self._deploy("upgrade", "--reuse-values", *arguments)

    def say(self, verb: str, *arguments: str) -> str:
        """Another verb of helm on the release."""
        return self._cluster.run_helm(self._helm, verb, self.name, *arguments)

    def _deploy(self, verb: str, *arguments: str) -> str:
        # This API server knows no policy/v1 and no native grpc probes.
        without = [f"--set={service}.podDisruptionBudget.enabled=false" for service in SERVICES]
        if self.version.startswith("v4"):
            without.append("--server-side=false")  # which its API server is too old for
        waiting = ("--wait", "--timeout=90s", "--set=probes.type=http")
        return self.say(verb, str(CHART), *waiting, *without, *arguments)


@contextmanager
def running(kube_dir: Path, directory: Path, node_ip: str) -> Iterator[Cluster]:
    """A cluster, for as long as the context."""
    cluster = Cluster(kube_dir, directory, node_ip)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes bytes on until there are no more."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # the other end has gone, which is passed on too
    finally:
        writer.close()


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Waits a minute at most until what is asked holds."""
    async with asyncio.timeout(60):
        while True:
            held = holds()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.1)  # what is asked tells nobody when it changes


async def answers_200(client: httpx.AsyncClient, path: str) -> bool:
    """Whether a path of a server that may be away is answered with 200."""
    try:
        return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False
