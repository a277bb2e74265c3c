"""Keys, CORS and depth over REST."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.gateway.config import GatewayConfig
from services.gateway.http import build_app
from services.gateway.keys import KeyRing
from tests.gateway.rest.fake import FakeGateway
from tests.gateway.rest.helpers import CHAT, chat_body, error_of, events

ORIGIN = {"origin": "https://chat.example"}


@pytest.fixture
async def guarded(gateway: FakeGateway) -> AsyncIterator[httpx.AsyncClient]:
    """The application with two keys and one origin, called without a socket."""
    config = GatewayConfig(cors_origins=("https://chat.example",), max_json_depth=8)
    keys = KeyRing(("alice:sk-alice", "sk-2"))
    app = build_app(gateway, config, CollectorRegistry(), keys)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/readyz?scope=gateway", "/health"])
async def test_probes_need_no_key(guarded: httpx.AsyncClient, path: str) -> None:
    assert (await guarded.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/fake/model"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/generate"),
        ("GET", "/server_info"),
        ("POST", "/flush_cache"),
        ("GET", "/metrics"),
        ("GET", "/nothing"),
        ("GET", "/livez/"),
        ("GET", "http://gateway//livez"),
        ("POST", "/health/../v1/chat/completions"),
    ],
)
async def test_all_else_does(
    guarded: httpx.AsyncClient, gateway: FakeGateway, method: str, path: str
) -> None:
    for headers in ({}, _key("sk-wrong"), {"x-api-key": "sk-alice2"}):
        answer = await guarded.request(method, path, json=chat_body(), headers=headers)
        error = error_of(answer, 401)
        assert error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
    assert not gateway.requests
    assert not gateway.flushed


async def test_the_keys_name_is_the_requests_tenant(
    guarded: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    for headers in (_key("sk-alice"), {"x-api-key": "sk-2"}):
        assert (await guarded.post(CHAT, json=chat_body(), headers=headers)).status_code == 200
    assert [request.tenant for request in gateway.requests] == ["alice", "key-2"]
    info = await guarded.get("/server_info", headers=_key("sk-2"))
    assert "sk-" not in info.text


async def test_a_browser_of_a_named_origin_may_call(guarded: httpx.AsyncClient) -> None:
    preflight = await guarded.options(
        CHAT,
        headers={
            **ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200  # it has no key
    assert preflight.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    headers = {**ORIGIN, **_key("sk-2")}
    answer = await guarded.post(CHAT, json=chat_body(stream=True), headers=headers)
    assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    assert events(answer)
    refused = await guarded.post(CHAT, json=chat_body(), headers=ORIGIN)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN["origin"]  # so it can be read
    other = await guarded.get("/livez", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_without_the_flag_there_is_no_cors(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json=chat_body(), headers=ORIGIN)
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_body_may_be_nested_so_deep(guarded: httpx.AsyncClient) -> None:
    deep: Any = "x"
    for _ in range(6):
        deep = [deep]
    body = chat_body(metadata=deep)  # seven deep
    answer = await guarded.post(CHAT, json=body, headers=_key("sk-2"))
    assert "nested" not in answer.text
    body["metadata"] = [[[deep]]]
    error = error_of(await guarded.post(CHAT, json=body, headers=_key("sk-2")), 400)
    assert error["message"] == "the body is nested more than 8 deep"
