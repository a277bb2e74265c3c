"""A cluster's network on one machine: each pod in a network namespace of its own.

    this machine, the node    bridge, 10.A.B.1
      |-- pod's namespace     eth0, 10.A.B.2
      |-- pod's namespace     eth0, 10.A.B.3

A pod reaches the others at their addresses, and the API server at the node's, as pods of a real
cluster do; `enforce` plays the plugin that enforces NetworkPolicies. Needs root, `ip` and `nft`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


class NetworkError(Exception):
    """The kernel, or a missing program, refused; the message is what was said."""


@dataclass(frozen=True)
class PodAddress:
    """Where a pod is."""

    namespace: str
    ip: str

    def inside(self, *command: str) -> list[str]:
        """The command, run in the pod's namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]


class PodNetwork:
    """Makes and takes away the pods' namespaces. `close` leaves nothing behind."""

    def __init__(self) -> None:
        pid = os.getpid()
        self._tag = f"sh{pid}"  # interfaces' names have at most 15 characters
        self._subnet = f"10.{128 + pid % 100}.{pid // 100 % 256}"
        self._num_pods = 0
        self._namespaces: set[str] = set()
        self.node_ip = f"{self._subnet}.1"

    def open(self) -> None:
        """Makes the bridge. Raises NetworkError."""
        for program in ("ip", "nft"):
            if shutil.which(program) is None:
                raise NetworkError(f"there is no {program}")
        bridge = self._tag
        _ip(
            f"link add {bridge} type bridge",
            f"addr add {self.node_ip}/24 dev {bridge}",
            f"link set {bridge} up",
        )

    def close(self) -> None:
        for namespace in self._namespaces:
            _ip(f"netns del {namespace}")
        _ip(f"link del {self._tag}")

    def add_pod(self) -> PodAddress:
        """A new namespace, with an address that was never used before."""
        self._num_pods += 1
        number = self._num_pods
        pod = PodAddress(f"{self._tag}-{number}", f"{self._subnet}.{number + 1}")
        veth = f"{self._tag}-{number}"
        _ip(
            f"netns add {pod.namespace}",
            f"link add {veth} type veth peer name eth0 netns {pod.namespace}",
            f"link set {veth} master {self._tag} up",
        )
        self._namespaces.add(pod.namespace)
        _ip(
            "link set lo up",
            f"addr add {pod.ip}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.node_ip}",
            namespace=pod.namespace,
        )
        return pod

    def remove_pod(self, pod: PodAddress) -> None:
        """Takes the namespace and its address away."""
        _ip(f"netns del {pod.namespace}")
        self._namespaces.remove(pod.namespace)

    def enforce(self, pods: Sequence[PolicedPod], policies: Iterable[Json]) -> None:
        """Lets each pod have the connections that the NetworkPolicies allow it, and no others."""
        policies = list(policies)
        for pod in pods:
            rules = _ruleset(pod, pods, policies, self.node_ip)
            _run(pod.address.inside("nft", "-f", "-"), rules)


@dataclass(frozen=True)
class PolicedPod:
    """What a policy knows of a pod."""

    address: PodAddress
    labels: Mapping[str, str]
    ports: Mapping[str, int]  # by name


def _ruleset(
    pod: PolicedPod, pods: Sequence[PolicedPod], policies: list[Json], node_ip: str
) -> str:
    """The pod's firewall. A direction that no policy selects the pod for stays open."""
    chains = []
    for kind, hook in (("Ingress", "input"), ("Egress", "output")):
        mine = [p["spec"] for p in policies if _selects(p["spec"]["podSelector"], pod)]
        mine = [spec for spec in mine if kind in spec["policyTypes"]]
        if mine:
            side = "saddr" if kind == "Ingress" else "daddr"
            peers = "from" if kind == "Ingress" else "to"
            allowed = itertools.chain.from_iterable(spec.get(kind.lower(), ()) for spec in mine)
            rules = [
                line for rule in allowed for line in _rules(rule, rule.get(peers), side, pod, pods)
            ]
            chains.append(_chain(hook, rules, node_ip))
    return "\n".join(("table ip pod", "delete table ip pod", "table ip pod {", *chains, "}"))


def _chain(hook: str, rules: list[str], node_ip: str) -> str:
    device = "iif" if hook == "input" else "oif"
    always = [f"{device} lo accept", "ct state established,related accept"]
    if hook == "input":  # a node's probes always reach its pods
        always.append(f"ip saddr {node_ip} accept")
    otherwise = ["meta l4proto tcp reject with tcp reset", "drop"]
    lines = [f"type filter hook {hook} priority 0;", *always, *rules, *otherwise]
    return "\n".join((f"chain {hook} {{", *lines, "}"))


def _rules(
    rule: Json, peers: list[Json] | None, side: str, pod: PolicedPod, pods: Sequence[PolicedPod]
) -> list[str]:
    """One rule of a policy, as nft says it. Peers here are selectors of pods."""
    among = ""
    if peers:
        reached = [p for p in pods if any(_selects(peer["podSelector"], p) for peer in peers)]
        if not reached:
            return []
        among = f"ip {side} {{ {', '.join(p.address.ip for p in reached)} }} "
    lines = []
    for port in rule.get("ports") or ():
        number = pod.ports.get(port["port"], port["port"])
        lines.append(f"{among}{port['protocol'].lower()} dport {number} accept")
    return lines or [f"{among}accept"]


def _selects(selector: Json, pod: PolicedPod) -> bool:
    wanted: Mapping[str, str] = selector["matchLabels"]
    return wanted.items() <= pod.labels.items()


def _ip(*commands: str, namespace: str = "") -> None:
    """Runs the commands, in a namespace where one is named, up to the first that fails."""
    inside = ["-n", namespace] if namespace else []
    _run(["ip", *inside, "-batch", "-"], "\n".join(commands) + "\n")


def _run(command: list[str], text: str) -> None:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()} in:\n{text}")
