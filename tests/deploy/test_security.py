"""Keys, certificates and traces in the chart: who mounts which secret, and what it is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import BACKENDS, SERVICES, Helm, Render, RenderError

SECURED = {
    "tls.internal.existingSecret": "inside",
    "tls.public.existingSecret": "outside",
    "tls.public.requireClientCertificates": "true",
    "apiKeys.existingSecret": "people",
    "tracing.otlpEndpoint": "http://otel.observability:4317",
}
ISSUED = {
    "tls.internal.issuerRef.name": "cluster-ca",
    "tls.internal.issuerRef.kind": "ClusterIssuer",
    "tls.public.issuerRef.name": "letsencrypt",
    "tls.public.dnsNames[0]": "llm.example.com",
}
PLAIN_FLAGS = ("--tls", "--peer-tls", "--api-key", "--otlp")


def _secrets(render: Render, service: str) -> dict[str, str]:
    """The secrets that a service's container has, by the directory where they are."""
    volumes = {
        volume["name"]: volume["secret"]["secretName"]
        for volume in render.pod(service)["volumes"]
        if "secret" in volume
    }
    mounts = render.container(service)["volumeMounts"]
    found = {m["mountPath"]: volumes[m["name"]] for m in mounts if m["name"] in volumes}
    assert len(found) == len(volumes)
    assert all(m["readOnly"] for m in mounts if m["name"] in volumes)
    return found


def test_nothing_of_it_is_there_by_default(default: Render) -> None:
    for service in SERVICES:
        assert not _secrets(default, service)
        assert not [flag for flag in default.flags(service) if flag.startswith(PLAIN_FLAGS)]


def test_each_pod_has_its_own_secrets_alone(helm: Helm) -> None:
    render = helm.template(sets=SECURED)
    for service in BACKENDS:
        assert _secrets(render, service) == {"/etc/shoal/internal-tls": "inside"}
    assert _secrets(render, "gateway") == {
        "/etc/shoal/internal-tls": "inside",
        "/etc/shoal/public-tls": "outside",
        "/etc/shoal/api-keys": "people",
    }
    for volume in render.pod("gateway")["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440  # readable by fsGroup
            assert "subPath" not in volume  # which would never be updated


@pytest.mark.parametrize("sets", [SECURED, ISSUED])
def test_every_file_in_a_flag_is_mounted(helm: Helm, sets: dict[str, str]) -> None:
    render = helm.template(sets=sets)
    for service in SERVICES:
        secrets = _secrets(render, service)
        files = [
            value
            for flag, value in render.flags(service).items()
            if flag.startswith(PLAIN_FLAGS) and value.startswith("/")
        ]
        assert files
        assert {str(Path(file).parent) for file in files} == secrets.keys()


def test_both_ends_of_a_wire_agree(helm: Helm) -> None:
    render = helm.template(sets=SECURED)
    gateway = render.flags("gateway")
    inside = "/etc/shoal/internal-tls"
    for service in BACKENDS:
        flags = render.flags(service)
        assert flags["--tls-cert"] == gateway["--peer-tls-cert"] == f"{inside}/tls.crt"
        assert flags["--tls-key"] == gateway["--peer-tls-key"] == f"{inside}/tls.key"
        assert flags["--tls-ca"] == gateway["--peer-tls-ca"] == f"{inside}/ca.crt"
    assert gateway["--peer-tls-server-name"] == "shoal.internal"
    assert gateway["--tls-ca"] == "/etc/shoal/public-tls/ca.crt"
    without = helm.template(sets={**SECURED, "tls.public.requireClientCertificates": "false"})
    assert "--tls-ca" not in without.flags("gateway")


def test_certificates_are_asked_of_cert_manager(helm: Helm) -> None:
    render = helm.template(sets=ISSUED)
    inside = render.one("Certificate", "shoal-internal-tls")["spec"]
    assert inside["issuerRef"] == {
        "name": "cluster-ca",
        "kind": "ClusterIssuer",
        "group": "cert-manager.io",
    }
    assert inside["dnsNames"] == [render.flags("gateway")["--peer-tls-server-name"]]
    assert {"server auth", "client auth"} <= set(inside["usages"])
    outside = render.one("Certificate", "shoal-public-tls")["spec"]
    assert "client auth" not in outside["usages"]
    asking = helm.template(sets={**ISSUED, "tls.public.requireClientCertificates": "true"})
    shown = asking.one("Certificate", "shoal-public-tls")["spec"]
    assert "client auth" in shown["usages"], "the test pod shows it to the gateway"
    assert "llm.example.com" in outside["dnsNames"]
    url = render.one("Pod", "shoal-test")["spec"]["containers"][0]["args"][1]
    match = re.fullmatch(r"https://([^:]+):8000", url)
    assert match
    assert match.group(1) in outside["dnsNames"]
    assert _secrets(render, "worker")["/etc/shoal/internal-tls"] == inside["secretName"]
    assert _secrets(render, "gateway")["/etc/shoal/public-tls"] == outside["secretName"]


@pytest.mark.parametrize("sets", [{}, SECURED])
def test_probes_and_scrapes_need_no_certificate_and_no_key(
    helm: Helm, sets: dict[str, str]
) -> None:
    render = helm.template(sets={**sets, "podMonitor.enabled": "true"})
    for service in SERVICES:
        container = render.container(service)
        assert render.flags(service)["--admin-address"] == "0.0.0.0:9090"
        assert {"name": "admin", "containerPort": 9090} in container["ports"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe: dict[str, Any] = container[kind]
            if "grpc" in probe:
                assert not sets
            else:
                assert probe["httpGet"]["port"] == "admin"
    (monitor,) = render.of("PodMonitor").values()
    assert [end["port"] for end in monitor["spec"]["podMetricsEndpoints"]] == ["admin"]


def test_the_helm_test_has_what_a_client_needs(helm: Helm) -> None:
    pod = helm.template(sets=SECURED).one("Pod", "shoal-test")["spec"]
    mounts = {m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    assert {"/etc/shoal/public-tls", "/etc/shoal/api-keys"} <= mounts
    assert {m["name"] for m in pod["containers"][0]["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_services_say_what_is_spoken(helm: Helm, default: Render) -> None:
    def protocols(render: Render) -> dict[tuple[str, str], str]:
        return {
            (name, port["name"]): port["appProtocol"]
            for name, service in render.of("Service").items()
            for port in service["spec"]["ports"]
            if "appProtocol" in port
        }

    assert set(protocols(default).values()) == {"http", "kubernetes.io/h2c"}
    assert set(protocols(helm.template(sets=SECURED)).values()) == {"https"}


def test_traces_leave_every_pod(helm: Helm) -> None:
    render = helm.template(sets=SECURED)
    for service in SERVICES:
        assert render.flags(service)["--otlp-endpoint"] == SECURED["tracing.otlpEndpoint"]
        egress = render.one("NetworkPolicy", f"shoal-{service}")["spec"]["egress"]
        ports = {port["port"] for rule in egress for port in rule["ports"]}
        assert {4317, 53} <= ports


def test_cors_is_an_option_of_the_gateway(helm: Helm) -> None:
    sets = {"gateway.config.corsOrigins": r"https://a.example\,https://b.example"}
    value = helm.template(sets=sets).env("gateway")["SHOAL_CORS_ORIGINS"]["value"]
    assert value == "https://a.example,https://b.example"


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        (
            {"tls.internal.existingSecret": "a", "tls.internal.issuerRef.name": "b"},
            "tls.internal: either existingSecret or issuerRef",
        ),
        ({"tls.public.requireClientCertificates": "true"}, "requireClientCertificates needs"),
        ({"tls.internal.existingSecret": "Not A Name"}, "existingSecret"),
        ({"tls.internal.duration": "a while"}, "duration"),
        ({"tracing.otlpEndpoint": "otel:4317"}, "otlpEndpoint"),
        ({"gateway.config.apiKey": "sk-in-a-values-file"}, "apiKey"),
        ({"apiKeys.keys": "sk"}, "keys"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(helm: Helm, sets: dict[str, str], complaint: str) -> None:
    with pytest.raises(RenderError, match=re.escape(complaint)):
        helm.template(sets=sets)
