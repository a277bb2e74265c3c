"""Several models and pools, groups of hosts, and autoscalers: what `pools` and `models` become."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.charts import BACKENDS, CHART, Helm, Render

EXAMPLES = CHART.parent / "examples"


@pytest.fixture(scope="module")
def several(helm: Helm) -> Render:
    return helm.template([EXAMPLES / "several-models.yaml"])


@pytest.fixture(scope="module")
def groups(helm: Helm) -> Render:
    return helm.template([EXAMPLES / "multi-host.yaml"])


def test_a_pool_is_the_workers_values_with_its_own_over_them(helm: Helm) -> None:
    pools = """{
      "none": {"replicas": 0, "podDisruptionBudget": {"enabled": false}, "gpu": {"count": 0}},
      "two": {"tensorParallel": 2, "gpu": {"count": 2}, "config": {"pageSize": 32},
              "resources": {"limits": {"memory": "9Gi"}}}
    }"""
    sets = {"worker.gpu.count": "1", "worker.replicas": "3", "worker.config.maxQueue": "7"}
    render = helm.template(sets=sets, json={"pools": pools})
    none, two = (
        render.one("Deployment", f"shoal-worker-{name}")["spec"] for name in pools_of(render)
    )
    assert (none["replicas"], two["replicas"]) == (0, 3)
    assert render.of("PodDisruptionBudget").keys() >= {"shoal-worker-two"}
    assert "shoal-worker-none" not in render.of("PodDisruptionBudget")
    container = two["template"]["spec"]["containers"][0]
    assert Render.flags_of(container)["--tp"] == "2"
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "9Gi", "nvidia.com/gpu": 2}
    variables = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    assert (variables["SHOAL_PAGE_SIZE"], variables["SHOAL_MAX_QUEUE"]) == ("32", "7")
    limits = none["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert "nvidia.com/gpu" not in limits
    assert "shoal-worker" not in render.of("Deployment")


def pools_of(render: Render) -> list[str]:
    """The names of a render's pools, sorted."""
    workers = (name for name in render.of("ServiceAccount") if "-worker-" in name)
    return sorted(name.removeprefix("shoal-worker-") for name in workers)


def test_no_selector_of_a_pool_takes_anothers_pods(several: Render) -> None:
    labels = several.pod_labels()
    for name, item in several.of("Deployment").items():
        selector = item["spec"]["selector"]["matchLabels"]
        taken = [pod for pod, have in labels.items() if selector.items() <= have.items()]
        assert taken == [name]
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for name, item in several.of(kind).items():
            spec = item["spec"]
            selector = (spec.get("selector") or spec["podSelector"])["matchLabels"]
            taken = [pod for pod, have in labels.items() if selector.items() <= have.items()]
            assert len(taken) == 1, (kind, name)
            assert taken[0].startswith(name)


def test_each_model_has_its_own_tokenizers_and_name(several: Render) -> None:
    for service in ("tokenizer", "detokenizer"):
        for model in ("chat", "code"):
            assert several.flags(f"{service}-{model}")["--served-model-name"] == model
    for pool, model in (("chat-fast", "chat"), ("chat-cheap", "chat"), ("code", "code")):
        flags = several.flags(f"worker-{pool}")
        assert flags["--served-model-name"] == model
        assert flags["--model"] == several.flags(f"tokenizer-{model}")["--model"]
    assert several.flags("gateway")["--expect-models"] == "chat,code"


def test_a_model_in_an_image_is_mounted_by_the_kubelet(several: Render) -> None:
    for name in ("tokenizer-code", "detokenizer-code", "worker-code"):
        (volume,) = [v for v in several.pod(name)["volumes"] if v["name"] == "model"]
        assert volume["image"]["reference"] == "registry.example.com/models/coder:1.0"
        assert several.flags(name)["--model"] == "/models/coder"


def test_a_download_job_has_the_token_and_the_network_alone(helm: Helm) -> None:
    render = helm.template([EXAMPLES / "one-gpu.yaml"])
    (job,) = render.of("Job").values()
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    flags = Render.flags_of(container)
    assert flags["--model"] == "Qwen/Qwen3-8B"
    assert "HF_TOKEN" in {item["name"] for item in container["env"]}
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for spec in render.pod_specs()
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == render.of("PersistentVolumeClaim").keys() == {"shoal-hub-cache"}
    for service in BACKENDS:
        assert "HF_TOKEN" not in render.env(service)
        assert render.env(service)["HF_HUB_OFFLINE"]["value"] == "1"
        (wait,) = render.pod(service)["initContainers"]
        assert wait["command"][-1] == flags["--mark"]
        mounts = {m["name"]: m for m in render.container(service)["volumeMounts"]}
        assert mounts["hub-cache"]["readOnly"] is True
        assert render.one("NetworkPolicy", f"shoal-{service}")["spec"]["egress"] == []
    policy = render.one("NetworkPolicy", "shoal-download")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["ingress"] == []
    assert 443 in {port["port"] for rule in policy["egress"] for port in rule["ports"]}


def test_another_image_or_model_is_another_job(helm: Helm) -> None:
    def job(**sets: str) -> tuple[str, str]:
        values = {name.replace("_", "."): value for name, value in sets.items()}
        render = helm.template([EXAMPLES / "one-gpu.yaml"], sets=values)
        ((name, item),) = render.of("Job").items()
        return name, Render.flags_of(item["spec"]["template"]["spec"]["containers"][0])["--mark"]

    name, mark = job()
    other_image, same_mark = job(image_tag="v2")
    other_model, other_mark = job(model_hub_id="org/other")
    assert len({name, other_image, other_model}) == 3
    assert mark == same_mark != other_mark


def _group(render: Render) -> dict[str, Any]:
    spec: dict[str, Any] = render.one("LeaderWorkerSet", "shoal-worker")["spec"]
    return spec


def test_a_group_is_as_many_pods_as_hosts_and_ends_as_one(groups: Render) -> None:
    spec = _group(groups)
    assert spec["replicas"] == 2
    assert spec["startupPolicy"] == "LeaderCreated"
    template = spec["leaderWorkerTemplate"]
    assert template["size"] == 2
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "shoal-worker" not in groups.of("Deployment")


def test_members_meet_at_the_leader(groups: Render) -> None:
    """The controller sets both variables in every container, before all others."""
    assert _group(groups)["networkConfig"] == {"subdomainPolicy": "UniquePerReplica"}
    for pod in ("leaderTemplate", "workerTemplate"):
        (container,) = _group(groups)["leaderWorkerTemplate"][pod]["spec"]["containers"]
        flags = Render.flags_of(container)
        assert (flags["--nnodes"], flags["--tp"]) == ("2", "16")
        assert flags["--node-rank"] == "$(LWS_WORKER_INDEX)"
        assert flags["--rendezvous"] == "$(LWS_LEADER_ADDRESS):29500"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_a_leader_serves_and_a_follower_only_lives(groups: Render) -> None:
    template = _group(groups)["leaderWorkerTemplate"]
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    (follower,) = template["workerTemplate"]["spec"]["containers"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= leader.keys()
    assert "livenessProbe" in follower
    assert not {"startupProbe", "readinessProbe"} & follower.keys()
    selector = groups.one("Service", "shoal-worker")["spec"]["selector"]
    assert selector.items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    assert not selector.items() <= template["workerTemplate"]["metadata"]["labels"].items()


def test_a_follower_computes_while_its_leader_drains(groups: Render) -> None:
    template = _group(groups)["leaderWorkerTemplate"]
    leader, follower = template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]

    def pre_stop(spec: dict[str, Any]) -> int:
        return int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])

    drain = int(Render.flags_of(leader["containers"][0])["--drain-timeout"])
    assert pre_stop(follower) >= pre_stop(leader) + drain
    assert follower["terminationGracePeriodSeconds"] > pre_stop(follower)


def test_a_group_may_speak_among_itself(groups: Render) -> None:
    spec = groups.one("NetworkPolicy", "shoal-worker")["spec"]
    own = spec["podSelector"]["matchLabels"]
    assert {"from": [{"podSelector": {"matchLabels": own}}]} in spec["ingress"]
    assert {"to": [{"podSelector": {"matchLabels": own}}]} in spec["egress"]


def test_autoscalers_scale_groups_too(helm: Helm) -> None:
    sets = {"worker.autoscaling.enabled": "true"}
    render = helm.template([EXAMPLES / "multi-host.yaml"], sets=sets)
    target = render.one("HorizontalPodAutoscaler", "shoal-worker")["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "shoal-worker",
    }
    assert "replicas" not in _group(render)


def test_a_pool_that_may_sleep_is_woken_by_held_requests(several: Render) -> None:
    assert several.of("ScaledObject").keys() == {"shoal-worker-code"}
    spec = several.one("ScaledObject", "shoal-worker-code")["spec"]
    assert spec["minReplicaCount"] == 0
    assert spec["scaleTargetRef"]["name"] == "shoal-worker-code"
    assert "replicas" not in several.one("Deployment", "shoal-worker-code")["spec"]
    (trigger,) = spec["triggers"]
    query = trigger["metadata"]["query"]
    assert 'shoal_gateway_requests_held{namespace="llm",model="code"}' in query
    assert r'pod=~"shoal-worker-code-[a-z0-9]+-[a-z0-9]+"' in query
    assert float(several.env("gateway")["SHOAL_HOLD_TIMEOUT"]["value"]) > 0


def test_routes_neither_buffer_nor_end_streams(helm: Helm) -> None:
    render = helm.template([EXAMPLES / "one-gpu.yaml"])
    (rule,) = render.one("HTTPRoute", "shoal-gateway")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert rule["backendRefs"] == [{"name": "shoal-gateway", "port": 8000}]
    (rule,) = render.one("GRPCRoute", "shoal-gateway")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "shoal-gateway-grpc", "port": 8001}]
    assert "shoal.v1.Inference" in {match["method"]["service"] for match in rule["matches"]}


def test_an_inference_pool_is_of_gateways(several: Render) -> None:
    pool = several.one("InferencePool", "shoal-gateway")["spec"]
    selector = pool["selector"]["matchLabels"]
    taken = {pod for pod, have in several.pod_labels().items() if selector.items() <= have.items()}
    assert taken == {"shoal-gateway"}
    assert pool["targetPorts"] == [{"number": 8000}]
    (rule,) = several.one("HTTPRoute", "shoal-gateway")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "shoal-gateway")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("soft", "preferredDuringSchedulingIgnoredDuringExecution"),
        ("hard", "requiredDuringSchedulingIgnoredDuringExecution"),
        ("none", ""),
    ],
)
def test_pods_keep_apart(helm: Helm, value: str, kind: str) -> None:
    own = '{"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}'
    render = helm.template(sets={"podAntiAffinity": value}, json={"worker.affinity": own})
    affinity = render.pod("worker")["affinity"]
    assert "nodeAffinity" in affinity
    assert list(affinity.get("podAntiAffinity", {"": 0})) == [kind]
    assert ("affinity" in render.pod("gateway")) == (value != "none")
