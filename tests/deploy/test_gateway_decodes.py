"""The chart without detokenizers: the gateway has what it decodes with, and nothing is left."""

from __future__ import annotations

import re
from typing import Any

import pytest

from services.common.config import parse
from services.common.tracing import NoTracing
from services.gateway.config import GatewayConfig
from services.gateway.core import make_local_decoder
from services.gateway.local_decoder import LocalDecoder
from tests.deploy.charts import EXAMPLES, Helm, Render, RenderError
from tests.deploy.validation import all_versions, schemas

OFF = {"detokenizer.enabled": "false"}
HUB = {**OFF, "model.source": "hub", "model.hub.id": "org/model", "model.servedName": "m"}


@pytest.fixture(scope="module")
def decodes(helm: Helm) -> Render:
    """With the embedded model."""
    return helm.template(sets=OFF)


@pytest.fixture(scope="module")
def from_hub(helm: Helm) -> Render:
    return helm.template(sets={**HUB, "model.hub.tokenSecret.name": "hub-token"})


def _mounts(render: Render) -> dict[str, dict[str, Any]]:
    return {m["name"]: m for m in render.container("gateway")["volumeMounts"]}


def _egress(render: Render) -> tuple[set[str], set[int | str]]:
    """The services that gateways may open connections to, and the ports open to everybody."""
    rules = render.one("NetworkPolicy", "shoal-gateway")["spec"]["egress"]
    services = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in rules
        for peer in rule.get("to", ())
    }
    return services, {p["port"] for rule in rules if "to" not in rule for p in rule["ports"]}


def test_no_object_of_a_detokenizer_is_left(decodes: Render, default: Render) -> None:
    schemas(all_versions()[-1]).check(decodes.objects)
    left = {(item["kind"], item["metadata"]["name"]) for item in decodes.objects}
    before = {(item["kind"], item["metadata"]["name"]) for item in default.objects}
    assert {name for _, name in before - left} == {"shoal-detokenizer"}
    assert left <= before
    assert "shoal-detokenizer" not in str(decodes.objects)
    assert _egress(decodes)[0] == {"tokenizer", "worker"}


def test_the_gateways_flags_make_it_decode(decodes: Render) -> None:
    flags = decodes.flags("gateway")
    assert "--detokenizer-addresses" not in flags
    assert "--model" not in flags  # the embedded one
    assert decodes.env("gateway")["HF_HUB_OFFLINE"]["value"] == "1"
    assert flags.keys() >= {"--tokenizer-addresses", "--worker-addresses"}


def test_a_gateway_with_these_flags_has_a_decoder_of_its_own(
    decodes: Render, default: Render
) -> None:
    def decoder(render: Render, *more: str) -> LocalDecoder | None:
        _, *arguments = render.container("gateway")["args"]
        config = parse(GatewayConfig, [*arguments, *more], prog="", description="")
        return make_local_decoder(config, NoTracing())

    assert decoder(default) is None
    assert decoder(decodes, "--model=byte") is not None


def test_it_downloads_as_tokenizers_do(from_hub: Render) -> None:
    gateway, tokenizer = from_hub.container("gateway"), from_hub.container("tokenizer")
    assert from_hub.flags("gateway")["--model"] == "org/model"
    assert "--served-model-name" not in from_hub.flags("gateway")
    names = {"HF_HOME", "HF_TOKEN"}
    for container in (gateway, tokenizer):
        assert {item["name"] for item in container["env"]} >= names
    assert [e for e in gateway["env"] if e["name"] in names] == [
        e for e in tokenizer["env"] if e["name"] in names
    ]
    (cache,) = [v for v in from_hub.pod("gateway")["volumes"] if v["name"] == "hub-cache"]
    assert cache["emptyDir"] == {}
    assert _mounts(from_hub)["hub-cache"]["mountPath"] == "/var/cache/huggingface"
    assert 443 in _egress(from_hub)[1]


def test_it_waits_for_the_download_job(helm: Helm) -> None:
    sets = {**OFF, "discovery.type": "dns"}
    example = next(path for path in EXAMPLES if path.name == "one-gpu.yaml")
    render = helm.template([example], sets=sets)
    (wait,) = render.pod("gateway")["initContainers"]
    assert wait["image"] == render.container("gateway")["image"]
    (worker_waits,) = render.pod("worker")["initContainers"]
    assert wait["command"] == worker_waits["command"]
    assert _mounts(render)["hub-cache"]["readOnly"] is True
    assert "HF_TOKEN" not in render.env("gateway")
    assert _egress(render)[1] == {53}  # neither the hub nor, with dns, the API server


def test_a_model_in_an_image_or_on_a_volume_is_mounted(helm: Helm) -> None:
    volume = {"model.source": "pvc", "model.pvc.claimName": "models", "model.pvc.path": "a"}
    image = {"model.source": "image", "model.image.reference": "r.example/m:1"}
    for sets in (volume, image):
        render = helm.template(sets={**OFF, **sets})
        (mine,) = [v for v in render.pod("gateway")["volumes"] if v["name"] == "model"]
        assert mine in render.pod("worker")["volumes"]
        assert _mounts(render)["model"]["readOnly"] is True


def test_one_model_by_key_is_one_model(helm: Helm) -> None:
    models = '{"chat": {"source": "hub", "hub": {"id": "org/chat"}}}'
    render = helm.template(sets={**OFF, "worker.model": "chat"}, json={"models": models})
    assert render.flags("gateway")["--model"] == "org/chat"
    assert render.flags("gateway")["--expect-models"] == "chat"


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        (
            {**OFF, "models.a.servedName": "a", "models.b.servedName": "b", "worker.model": "a"},
            "detokenizer.enabled false: a gateway decodes for one model, and models has a, b",
        ),
        ({"detokenizer.replicas": "0"}, "detokenizer.replicas 0 leaves nobody to decode"),
        ({"detokenizer.enabled": "sometimes"}, "detokenizer"),
    ],
    ids=["several", "none", "neither"],
)
def test_what_cannot_decode_is_refused(helm: Helm, sets: dict[str, str], complaint: str) -> None:
    with pytest.raises(RenderError, match=re.escape(complaint)):
        helm.template(sets=sets)
