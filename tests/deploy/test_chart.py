"""The chart's objects: what each must be for the fleet to find, probe and protect its pods."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.deploy.charts import BACKENDS, EXAMPLES, NAMESPACE, SERVICES, Helm, Render
from tests.deploy.validation import all_versions, schemas

VARIANTS: dict[str, dict[str, str]] = {
    "http-dns": {"probes.type": "http", "discovery.type": "dns"},
    "autoscaled": {f"{service}.autoscaling.enabled": "true" for service in SERVICES},
    "bare": {
        "networkPolicy.enabled": "false",
        "topologySpread.enabled": "false",
        **{f"{service}.podDisruptionBudget.enabled": "false" for service in SERVICES},
    },
    "ipv6": {"listenHost": "::"},
    "watched": {
        f"{what}.enabled": "true"
        for what in ("podMonitor", "serviceMonitor", "prometheusRule", "dashboards")
    },
    "secured": {
        "tls.internal.issuerRef.name": "ca",
        "tls.public.existingSecret": "public",
        "apiKeys.existingSecret": "keys",
        "tracing.otlpEndpoint": "http://otel:4317",
        "model.source": "hub",
        "model.hub.id": "org/model",
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_valid(helm: Helm, variant: str) -> None:
    schemas(all_versions()[-1]).check(helm.template(sets=VARIANTS[variant]).objects)


def test_each_service_has_its_objects(default: Render) -> None:
    names = {f"shoal-{service}" for service in SERVICES}
    for kind in ("Deployment", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"):
        assert default.of(kind).keys() == names, kind
    assert default.of("Service").keys() == names | {"shoal-gateway-grpc"}
    assert not default.of("HorizontalPodAutoscaler")
    assert not default.of("Ingress")
    assert not default.of("PersistentVolumeClaim")


def test_every_object_is_named_and_labelled(helm: Helm) -> None:
    render = helm.template(EXAMPLES[:1], release="blue")
    for item in render.objects:
        assert item["metadata"]["name"].startswith("blue-shoal"), item["metadata"]
        assert item["metadata"]["namespace"] == NAMESPACE
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "blue"


@pytest.mark.parametrize(
    "name", [*(f"shoal-{service}" for service in BACKENDS), "shoal-gateway-grpc"]
)
def test_grpc_services_are_headless(default: Render, name: str) -> None:
    service = default.one("Service", name)["spec"]
    assert service["clusterIP"] == "None"
    assert "grpc" in {port["name"] for port in service["ports"]}


def test_rest_has_a_cluster_address(default: Render) -> None:
    service = default.one("Service", "shoal-gateway")["spec"]
    assert service["type"] == "ClusterIP"
    assert "clusterIP" not in service


def test_services_and_budgets_select_their_own_pods_alone(default: Render) -> None:
    pods = {
        name: item["spec"]["template"]["metadata"]["labels"]
        for name, item in default.of("Deployment").items()
    }

    def selected(selector: dict[str, str]) -> set[str]:
        return {name for name, labels in pods.items() if selector.items() <= labels.items()}

    for name, item in default.of("Service").items():
        assert selected(item["spec"]["selector"]) == {name.removesuffix("-grpc")}
    for name, item in default.of("PodDisruptionBudget").items():
        assert selected(item["spec"]["selector"]["matchLabels"]) == {name}
    for name, item in default.of("NetworkPolicy").items():
        assert selected(item["spec"]["podSelector"]["matchLabels"]) == {name}


def test_the_gateway_may_watch_endpoint_slices_and_nothing_else(default: Render) -> None:
    (role,) = default.of("Role").values()
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (binding,) = default.of("RoleBinding").values()
    assert [subject["name"] for subject in binding["subjects"]] == ["shoal-gateway"]
    assert not {"ClusterRole", "ClusterRoleBinding"} & {item["kind"] for item in default.objects}
    mounted = {
        service: default.pod(service)["automountServiceAccountToken"] for service in SERVICES
    }
    assert mounted == {"gateway": True, "tokenizer": False, "detokenizer": False, "worker": False}


def test_with_dns_nobody_speaks_to_the_api_server(helm: Helm) -> None:
    render = helm.template(sets={"discovery.type": "dns"})
    assert not render.of("Role")
    assert not render.of("RoleBinding")
    assert render.pod("gateway")["automountServiceAccountToken"] is False
    assert render.flags("gateway")["--worker-addresses"] == (
        "dns:shoal-worker.llm.svc.cluster.local:50051"
    )
    ports = [
        rule["ports"] for rule in render.one("NetworkPolicy", "shoal-gateway")["spec"]["egress"]
    ]
    assert {port["port"] for port in itertools.chain(*ports)} == {53, 50051}


def test_pods_are_restricted(default: Render) -> None:
    """The restricted Pod Security Standard, and a read-only root beside it."""
    for service in SERVICES:
        pod = default.pod(service)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = default.container(service)["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        mounts = {m["mountPath"] for m in default.container(service)["volumeMounts"]}
        assert "/tmp" in mounts


def test_service_links_stay_out_of_the_options_environment(default: Render) -> None:
    """A Service named shoal would set SHOAL_PORT=tcp://..., which is also an option's name."""
    for service in SERVICES:
        assert default.pod(service)["enableServiceLinks"] is False


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_probes_follow_one_value(helm: Helm, kind: str) -> None:
    render = helm.template(sets={"probes.type": kind})
    for service in BACKENDS:
        container = render.container(service)
        for probe in ("startupProbe", "readinessProbe"):
            assert ("grpc" in container[probe]) == (kind == "grpc")
            assert ("httpGet" in container[probe]) == (kind == "http")
        assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "admin"}
    gateway = render.container("gateway")
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/readyz?scope=gateway"
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_probe_ports_exist(default: Render) -> None:
    for service in SERVICES:
        container = default.container(service)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "grpc" in container[probe]:
                assert container[probe]["grpc"]["port"] == ports["grpc"]
            else:
                assert container[probe]["httpGet"]["port"] in ports


def test_start_up_lasts_as_long_as_was_said(helm: Helm) -> None:
    render = helm.template(sets={"worker.startupSeconds": "601"})
    probe = render.container("worker")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 605
    deadline = render.one("Deployment", "shoal-worker")["spec"]["progressDeadlineSeconds"]
    assert deadline > 605


@pytest.mark.parametrize("drain", [1, 60, 3600])
def test_the_grace_period_holds_pre_stop_and_drain(helm: Helm, drain: int) -> None:
    render = helm.template(sets={"drainSeconds": str(drain)})
    for service in SERVICES:
        command = render.container(service)["lifecycle"]["preStop"]["exec"]["command"]
        pre_stop = int(command[1])
        assert pre_stop > 0
        assert float(render.flags(service)["--drain-timeout"]) == drain
        assert render.pod(service)["terminationGracePeriodSeconds"] >= pre_stop + drain + 5


def test_network_policies_open_the_paths_of_the_design(default: Render) -> None:
    for service in BACKENDS:
        spec = default.one("NetworkPolicy", f"shoal-{service}")["spec"]
        grpc, metrics = spec["ingress"]
        (peer,) = grpc["from"]
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
        assert [port["port"] for port in metrics["ports"]] == ["admin"]
        assert spec["egress"] == []  # the embedded model needs nobody
    spec = default.one("NetworkPolicy", "shoal-gateway")["spec"]
    reached = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in spec["egress"]
        for peer in rule.get("to", ())
    }
    assert reached == set(BACKENDS)


def test_autoscaled_deployments_leave_replicas_alone(helm: Helm) -> None:
    render = helm.template(sets=VARIANTS["autoscaled"])
    for service in SERVICES:
        assert "replicas" not in render.one("Deployment", f"shoal-{service}")["spec"]
        scaler = render.one("HorizontalPodAutoscaler", f"shoal-{service}")["spec"]
        assert scaler["scaleTargetRef"]["name"] == f"shoal-{service}"
        assert scaler["metrics"]


def test_gpus_are_requested_and_shared_memory_is_mounted(helm: Helm) -> None:
    render = helm.template(sets={"worker.gpu.count": "4", "worker.tensorParallel": "4"})
    container = render.container("worker")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["resources"]["limits"]["memory"] == "4Gi"
    assert render.flags("worker")["--tp"] == "4"
    assert render.flags("worker")["--device"] == "cuda"
    assert "--device" not in helm.template().flags("worker")
    assert "SHOAL_NUM_THREADS" not in render.env("worker")
    (shm,) = [v for v in render.pod("worker")["volumes"] if v["name"] == "shared-memory"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def _volume(render: Render, service: str, name: str) -> dict[str, Any]:
    (volume,) = [v for v in render.pod(service)["volumes"] if v["name"] == name]
    return dict(volume)


def test_model_from_the_hub(helm: Helm) -> None:
    sets = {
        "model.source": "hub",
        "model.hub.id": "org/model",
        "model.hub.tokenSecret.name": "hub-token",
        "model.hub.cache.create": "true",
    }
    render = helm.template(sets=sets)
    for service in BACKENDS:
        assert render.flags(service)["--model"] == "org/model"
        secret = render.env(service)["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "hub-token", "key": "token"}
        egress = render.one("NetworkPolicy", f"shoal-{service}")["spec"]["egress"]
        assert 443 in {port["port"] for rule in egress for port in rule["ports"]}
    claim = render.one("PersistentVolumeClaim", "shoal-hub-cache")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    volume = _volume(render, "worker", "hub-cache")
    assert volume["persistentVolumeClaim"]["claimName"] == "shoal-hub-cache"
    assert "emptyDir" in _volume(render, "tokenizer", "hub-cache")
    assert "HF_TOKEN" not in render.env("gateway")


def test_model_from_a_volume(helm: Helm) -> None:
    sets = {"model.source": "pvc", "model.pvc.claimName": "models", "model.pvc.path": "/a/b.gguf"}
    render = helm.template(sets=sets)
    for service in BACKENDS:
        assert render.flags(service)["--model"] == "/models/a/b.gguf"
        assert render.env(service)["HF_HUB_OFFLINE"]["value"] == "1"
        volume = _volume(render, service, "model")
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_embedded_model_needs_no_flag_and_no_network(default: Render) -> None:
    for service in BACKENDS:
        assert "--model" not in default.flags(service)
        assert default.env(service)["HF_HUB_OFFLINE"]["value"] == "1"


def test_ingress_neither_buffers_nor_ends_long_streams(helm: Helm) -> None:
    sets = {"gateway.ingress.enabled": "true", "gateway.ingress.hosts[0]": "llm.example.com"}
    ingress = helm.template(sets=sets).one("Ingress", "shoal-gateway")
    annotations = ingress["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert int(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "llm.example.com"
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "shoal-gateway", "port": {"name": "http"}}


def test_images_by_registry_tag_and_digest(helm: Helm) -> None:
    digest = "sha256:" + "a" * 64
    sets = {"image.registry": "r.example/x/", "image.tag": "v2", "worker.image.digest": digest}
    render = helm.template(sets=sets)
    assert render.container("gateway")["image"] == "r.example/x/shoal-gateway:v2"
    assert render.container("detokenizer")["image"] == "r.example/x/shoal-tokenizer:v2"
    assert render.container("worker")["image"] == f"r.example/x/shoal-worker-cpu@{digest}"


def test_a_new_chart_version_alone_restarts_no_pod(default: Render) -> None:
    for item in default.of("Deployment").values():
        assert "helm.sh/chart" not in item["spec"]["template"]["metadata"]["labels"]
