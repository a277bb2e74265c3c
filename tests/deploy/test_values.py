"""Values: what the schema and the templates refuse, and that options are those that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.k8s.sync_options import CONFIGS, config_schema, option_schemas
from tests.deploy.charts import CHART, SERVICES, Helm, RenderError

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        ({"replica": "2"}, "replica"),
        ({"worker.replica": "2"}, "replica"),
        ({"worker.config.noSuchOption": "1"}, "noSuchOption"),
        ({"worker.config.pageSize": "big"}, "pageSize"),
        ({"worker.config.schedule": "fifo"}, "schedule"),
        ({"worker.config.drain": "later"}, "drain"),
        ({"drainSeconds": "0"}, "drainSeconds"),
        ({"drainSeconds": "soon"}, "drainSeconds"),
        ({"probes.type": "tcp"}, "probes"),
        ({"discovery.type": "consul"}, "discovery"),
        ({"model.source": "ftp"}, "source"),
        ({"model.pvc.path": "../secrets"}, "path"),
        ({"worker.sharedMemory": "a lot"}, "sharedMemory"),
        ({"worker.image.digest": "latest"}, "digest"),
        ({"gateway.service.port": "70000"}, "port"),
        ({"worker.tensorParallel": "0"}, "tensorParallel"),
        ({"model.source": "hub"}, "model.hub.id"),
        ({"model.source": "pvc", "model.pvc.claimName": "m"}, "model.pvc.path"),
        ({"worker.gpu.count": "4"}, "one GPU a rank"),
        ({"worker.hosts": "2"}, "cannot be shared by worker.hosts 2"),
        (
            {"worker.hosts": "2", "worker.tensorParallel": "8", "worker.gpu.count": "8"},
            "worker.gpu.count 8 on each of 2 hosts must make worker.tensorParallel 8",
        ),
        ({"worker.model": "chat"}, "model chat is named where models are none"),
        ({"models.chat.servedName": "x"}, "worker.model must be one of models: chat"),
        (
            {"models.chat.servedName": "x", "pools.big.model": "chart"},
            "pools.big.model must be one of models: chat",
        ),
        ({"models.chat.sauce": "hub"}, "sauce"),
        ({"models.Chat.source": "hub"}, "Chat"),
        ({"pools.big.replica": "2"}, "replica"),
        ({"pools.big.config.noSuchOption": "1"}, "noSuchOption"),
        ({"models.chat.source": "hub", "worker.model": "chat"}, "models.chat.hub.id"),
        ({"model.source": "image"}, "model.image.reference"),
        (
            {"model.source": "hub", "model.hub.id": "a/b", "model.hub.downloadJob": "true"},
            "downloadJob needs model.hub.cache.create",
        ),
        (
            {"worker.keda.enabled": "true", "model.servedName": "m"},
            "worker.keda.minReplicas 0 needs gateway.config.holdTimeout",
        ),
        (
            {"worker.keda.enabled": "true", "gateway.config.holdTimeout": "60"},
            "needs model.servedName",
        ),
        (
            {"worker.keda.enabled": "true", "worker.autoscaling.enabled": "true"},
            "either autoscaling or keda",
        ),
        ({"gateway.httpRoute.enabled": "true"}, "gateway.httpRoute.parentRefs"),
        ({"gateway.inferencePool.enabled": "true"}, "endpointPicker.name"),
        ({"podAntiAffinity": "sometimes"}, "podAntiAffinity"),
        ({"worker.extraArgs[0]": "--drain-timeout=600"}, "worker: say drainSeconds"),
        ({"gateway.extraEnv[0].name": "SHOAL_DRAIN_TIMEOUT"}, "gateway: say drainSeconds"),
        ({"fullnameOverride": "f" * 48, "pools.big-and-long-of-name.replicas": "1"}, "63"),
        (
            {"worker.autoscaling.enabled": "true", "worker.autoscaling.maxReplicas": "0"},
            "maxReplicas",
        ),
        (
            {"gateway.autoscaling.enabled": "true", "gateway.autoscaling.maxReplicas": "1"},
            "maxReplicas is below",
        ),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(helm: Helm, sets: dict[str, str], complaint: str) -> None:
    with pytest.raises(RenderError, match=re.escape(complaint)):
        helm.template(sets=sets)


def test_grpc_probes_are_refused_where_kubernetes_has_none(helm: Helm) -> None:
    with pytest.raises(RenderError, match=r"probes\.type grpc needs Kubernetes 1\.24"):
        helm.template(kube_version="1.23.0")
    helm.template(kube_version="1.23.0", sets={"probes.type": "http"})


@pytest.mark.parametrize("service", SERVICES)
def test_the_schema_knows_exactly_the_options_left_to_the_user(service: str) -> None:
    assert config_schema(SCHEMA, service)["properties"] == option_schemas(CONFIGS[service]), (
        "an option has changed: run `python -m deploy.k8s.sync_options`"
    )


def test_options_reach_the_process_as_they_were_written(helm: Helm) -> None:
    config = {
        "maxModelLen": 4096,
        "disableOverlap": True,
        "schedule": "decode-first",
        "fakeStepMs": 10.25,
    }
    gateway = {"maxBodyBytes": 33554432, "holdTimeout": 2.5}
    render = helm.template(
        json={"worker.config": json.dumps(config), "gateway.config": json.dumps(gateway)}
    )
    worker = {name: item.get("value") for name, item in render.env("worker").items()}
    assert worker["SHOAL_MAX_MODEL_LEN"] == "4096"
    assert worker["SHOAL_FAKE_STEP_MS"] == "10.25"
    assert worker["SHOAL_DISABLE_OVERLAP"] == "true"
    assert worker["SHOAL_SCHEDULE"] == "decode-first"
    values = {name: item["value"] for name, item in render.env("gateway").items()}
    assert values == {"SHOAL_MAX_BODY_BYTES": "33554432", "SHOAL_HOLD_TIMEOUT": "2.5"}


def test_the_cpu_limit_becomes_the_number_of_threads_unless_it_is_given(helm: Helm) -> None:
    assert "valueFrom" in helm.template().env("worker")["SHOAL_NUM_THREADS"]
    given = helm.template(json={"worker.config": '{"numThreads": 3}'})
    assert given.env("worker")["SHOAL_NUM_THREADS"]["value"] == "3"


def _objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the schema that lists its properties."""
    reference = schema.get("$ref", "").removeprefix("#/definitions/")
    schema = SCHEMA["definitions"][reference] if reference else schema
    if "properties" in schema:
        yield path, schema
        for key, value in schema["properties"].items():
            yield from _objects(value, f"{path}.{key}" if path else key)


def test_the_schema_is_closed_and_says_what_the_defaults_are_for() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    paths = set()
    for path, schema in _objects(SCHEMA):
        paths.add(path)
        assert schema["additionalProperties"] is False, path
        node = values
        for key in path.split(".") if path else ():
            node = node[key]
        if path.endswith("config"):
            continue
        if path in ("", *SERVICES) or node:
            assert set(schema["properties"]) - {"global"} == set(node), path
    assert {"worker.keda", "model.hub.cache", "gateway.httpRoute"} <= paths


def test_every_value_is_documented() -> None:
    """A comment stands above each value, or above the group that it is alone in."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    undocumented = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if re.match(r"^ *[A-Za-z]+: \S", line) and not before.strip().startswith("#")
    ]
    known_to_kubernetes = (
        *("run", "fsGroup", "type: R", "allow", "readOnly", "drop", "capabilities"),
        *("rollingUpdate", "requests", "limits", "scaleDown"),
    )
    assert [line for line in undocumented if not line.strip().startswith(known_to_kubernetes)] == []
