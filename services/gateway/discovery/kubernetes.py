"""The ready endpoints of a Kubernetes Service, told by the API server as they change.

Each round lists the Service's EndpointSlices and then watches from there:

    list -> watch ............ (relist seconds, or the stream ends) -> list -> ...

Listing anew is the one answer to everything: a watch that was cut, a resource
version that is too old (410 Gone), an event that was missed. Where the API server
cannot be reached the source is silent, and the last known set stays in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.common.errors import StartupError
from services.gateway.discovery.sources import join_host_port

log = logging.getLogger(__name__)

_CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class WatchTimes:
    """Seconds: `relist` is the length of a round, `answer` what the API server gets to
    answer. A round that ends within `min_round` of its list is followed by a pause."""

    relist: float = 60.0
    answer: float = 10.0
    min_round: float = 1.0
    first_retry: float = 0.5
    max_retry: float = 10.0


@dataclass(frozen=True)
class KubernetesApi:
    """Where the API server is and how to speak to it."""

    base_url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(
        cls, environment: Mapping[str, str] = os.environ, credentials: Path = _CREDENTIALS
    ) -> KubernetesApi:
        """The API of the cluster that this process is a pod of.

        Raises StartupError if it is none, or was given no service account token.
        """
        host = environment.get("KUBERNETES_SERVICE_HOST")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise StartupError("k8s: addresses work only in a pod; outside, use dns: or host:port")
        token, ca = credentials / "token", credentials / "ca.crt"
        for path in (token, ca):
            if not path.is_file():
                raise StartupError(f"k8s: addresses need {path}; mount a service account token")
        return cls(f"https://{join_host_port(host, int(port))}", token, ca)

    def client(self, times: WatchTimes) -> httpx.AsyncClient:
        """A client for one source."""
        verify = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else True
        return httpx.AsyncClient(
            base_url=self.base_url, verify=verify, timeout=times.answer, trust_env=False
        )

    def headers(self) -> dict[str, str]:
        """The token is read anew each time: the kubelet replaces it every hour or so."""
        if self.token_file is None:
            return {}
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}


class _Failed(Exception):
    """A round went wrong; the next one starts after a pause."""


class EndpointSlices:
    """The endpoints of one port of a Service that are ready and not terminating.

    A terminating one leaves the set at once: it takes no new work, and its session
    lives until its open requests have ended (see `services.gateway.peers.pool`).
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        service: str,
        port_name: str,
        *,
        times: WatchTimes = WatchTimes(),
    ) -> None:
        self._api = api
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._name = f"{namespace}/{service}"
        self._port_name = port_name
        self._times = times

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        known: frozenset[str] | None = None
        num_failures = 0
        async with self._api.client(self._times) as client:
            while True:
                listed_at: float | None = None
                failure = "the watch ended at once"
                try:
                    async with contextlib.aclosing(self._round(client)) as states:
                        async for slices in states:
                            listed_at = listed_at or time.monotonic()
                            found = addresses(slices, self._port_name)
                            if found != known:
                                known = found
                                yield found
                except (httpx.HTTPError, OSError, _Failed) as error:
                    failure = str(error) or type(error).__name__
                except (ValueError, KeyError, TypeError) as error:
                    failure = f"the answer is no EndpointSlice: {error!r}"
                if listed_at and time.monotonic() - listed_at >= self._times.min_round:
                    num_failures = 0
                    continue
                if not num_failures:
                    log.warning("watching endpoints of %s: %s; trying again", self._name, failure)
                num_failures += 1
                await asyncio.sleep(self._pause(num_failures))

    def _pause(self, num_failures: int) -> float:
        """Seconds before the next round; a part is random, so that gateways do not march."""
        longest = self._times.first_retry * 2.0 ** min(num_failures - 1, 16)
        return min(self._times.max_retry, longest) * random.uniform(0.5, 1)

    async def _round(self, client: httpx.AsyncClient) -> AsyncGenerator[list[dict[str, Any]], None]:
        """All slices, after the list and after each event; ends with the watch."""
        headers = self._api.headers()
        answer = await client.get(self._path, params=self._selector, headers=headers)
        _check(answer.status_code, answer.text)
        listed = answer.json()
        slices = {item["metadata"]["name"]: item for item in listed["items"]}
        yield list(slices.values())
        params = {
            **self._selector,
            "watch": "1",
            "resourceVersion": listed["metadata"]["resourceVersion"],
            "timeoutSeconds": str(max(1, round(self._times.relist))),
        }
        # A watch that says nothing for longer than a round is dead, even if TCP is up.
        timeout = httpx.Timeout(self._times.answer, read=self._times.relist + self._times.answer)
        async with client.stream(
            "GET", self._path, params=params, headers=headers, timeout=timeout
        ) as stream:
            if stream.status_code != 200:
                _check(stream.status_code, (await stream.aread()).decode(errors="replace"))
            async for line in stream.aiter_lines():
                _apply(slices, json.loads(line))
                yield list(slices.values())


def addresses(slices: Iterable[Mapping[str, Any]], port_name: str) -> frozenset[str]:
    """The addresses in EndpointSlices (discovery.k8s.io/v1) that take new work.

    An absent `ready` means ready. A dual-stack Service has slices of both kinds for the
    same pods: where there is an IPv4 address, only those count.
    """
    by_type: dict[str, set[str]] = {}
    for item in slices:
        ports = [p for p in item.get("ports") or () if (p.get("name") or "") == port_name]
        found = by_type.setdefault(item.get("addressType", "IPv4"), set())
        for port in ports:
            if port.get("port") is None:
                continue
            for endpoint in item.get("endpoints") or ():
                if _takes_work(endpoint.get("conditions") or {}):
                    # All addresses of an endpoint are the same pod's; consumers take the first.
                    found.add(join_host_port(endpoint["addresses"][0], port["port"]))
    return frozenset(by_type.get("IPv4") or by_type.get("IPv6") or ())


def _takes_work(conditions: Mapping[str, Any]) -> bool:
    return conditions.get("ready") is not False and not conditions.get("terminating")


def _apply(slices: dict[str, dict[str, Any]], event: Mapping[str, Any]) -> None:
    """Raises _Failed on an ERROR event, such as 410 Gone."""
    kind, item = event["type"], event["object"]
    if kind == "ERROR":
        raise _Failed(f"{item.get('code')} {item.get('message')}")
    if kind == "DELETED":
        slices.pop(item["metadata"]["name"], None)
    elif kind in ("ADDED", "MODIFIED"):
        slices[item["metadata"]["name"]] = item


def _check(status: int, body: str) -> None:
    if status in (401, 403):
        raise _Failed(f"the API server answers {status}: may this service account list and watch?")
    if status != 200:
        raise _Failed(f"the API server answers {status}: {body[:200]}")
