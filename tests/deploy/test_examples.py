"""Every example: linted, rendered by both Helm majors, and valid in every Kubernetes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from deploy.k8s.sync_options import CONFIGS
from services.common.config import env_name, flag_name
from services.fleet.download.__main__ import DownloadConfig
from tests.deploy.charts import BACKENDS, EXAMPLES, Helm, Render, find_helm
from tests.deploy.validation import CUSTOM_SCHEMAS, SchemaError, all_versions, schemas
from tests.full import FULL

OLDEST, IMAGE_VOLUMES = "1.29", "1.31"  # what the chart supports, and since when there are these


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def render(helm: Helm, example: Path) -> Render:
    return helm.template([example])


def _versions(render: Render) -> list[str]:
    """The versions to check a render for: the oldest and the newest, or with SHOAL_FULL all."""
    volumes = [volume for spec in render.pod_specs() for volume in spec.get("volumes", ())]
    oldest = IMAGE_VOLUMES if any("image" in volume for volume in volumes) else OLDEST
    versions = all_versions()
    versions = versions[versions.index(oldest) :]
    return versions if FULL else [versions[0], versions[-1]]


def test_both_helms_agree_on_it_and_every_kubernetes_takes_it(
    example: Path, render: Render, helm: Helm
) -> None:
    helm.lint([example])
    versions = _versions(render)
    for version in versions:
        schemas(version).check(render.objects)
    print(f"{example.name}: {len(render.objects)} objects, Kubernetes {', '.join(versions)}")
    if (newer := find_helm("helm4")) is None:
        pytest.skip("there is no helm4, so only one major was tried; tools/get-helm.py gets it")
    helm4 = Helm(newer)
    helm4.lint([example])
    assert helm4.template([example]) == render


def test_its_gateway_finds_every_part(render: Render) -> None:
    """Each address in the gateway's flags is a headless Service that selects the pods of one
    workload, and all of those can be reached by the network policies."""
    pods = render.pod_labels()
    services = render.of("Service")
    flags = render.flags("gateway")
    found: set[str] = set()
    for backend in BACKENDS:
        for address in flags[f"--{backend}-addresses"].split(","):
            name = address.partition(":")[2].partition("/")[2].partition(":")[0]
            name = name or address.removeprefix("dns:").partition(".")[0]
            service = services[name]["spec"]
            assert service["clusterIP"] == "None"
            selected = [
                pod for pod, labels in pods.items() if service["selector"].items() <= labels.items()
            ]
            assert len(selected) == 1, (name, selected)
            found.add(selected[0])
    followers = {pod for pod, labels in pods.items() if labels.get("shoal/role") == "follower"}
    jobs = {pod for pod, labels in pods.items() if "download" in labels.values()}
    assert found == pods.keys() - followers - jobs - {"shoal-gateway"}


def test_its_flags_and_variables_exist(render: Render) -> None:
    for spec in render.pod_specs():
        (container,) = spec["containers"]
        config = CONFIGS.get(container["args"][0], DownloadConfig)
        options = {field.name for field in dataclasses.fields(config)}
        assert Render.flags_of(container).keys() <= {flag_name(name) for name in options}
        variables = {item["name"] for item in container.get("env") or ()}
        shoals = {name for name in variables if name.startswith("SHOAL_")}
        assert shoals <= {env_name(name) for name in options}


def test_its_pods_are_restricted_and_their_drain_fits(render: Render) -> None:
    for spec in render.pod_specs():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        names = {volume["name"] for volume in spec["volumes"]}
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert {mount["name"] for mount in container["volumeMounts"]} <= names
            assert container["resources"]["limits"]["memory"]
            hook = container.get("lifecycle")
            if hook is not None:
                pre_stop = int(hook["preStop"]["exec"]["command"][1])
                assert pre_stop < spec["terminationGracePeriodSeconds"]


def test_it_asks_for_as_many_gpus_as_it_has_ranks(render: Render) -> None:
    for item in render.of("Deployment").values():
        (container,) = item["spec"]["template"]["spec"]["containers"]
        flags = Render.flags_of(container)
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert gpus in (0, int(flags.get("--tp", 0)))
        assert (flags.get("--device") == "cuda") == (gpus > 0)


def test_a_wrong_object_is_found(render: Render) -> None:
    """The schemas refuse what they do not know, the small ones too."""
    newest = schemas(all_versions()[-1])
    for item in render.objects:
        wrong = {**item, "spec": {**item["spec"], "noSuchField": 1}} if "spec" in item else None
        if wrong is not None:
            with pytest.raises(SchemaError, match="noSuchField"):
                newest.check([wrong])


def test_each_small_schema_says_what_it_was_written_after() -> None:
    for path in CUSTOM_SCHEMAS.values():
        assert " of " in path.read_text().partition('"$comment": "')[2].partition('"')[0], path
