"""The OpenAPI document: valid, complete, and kept by real answers."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openapi_spec_validator
import pytest
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry

from services.gateway.config import GatewayConfig
from services.gateway.docs.openapi import openapi_document
from services.gateway.domain import Dialect
from services.gateway.http import build_routes
from services.gateway.watch.routes import Watched
from tests.gateway.rest.fake import MODEL, FakeGateway
from tests.gateway.rest.helpers import CHAT, COMPLETIONS, chat_body, completion_body, events
from tests.gateway.rest.test_responses import RESPONSES, typed_events
from tests.gateway.rest.test_tool_calls import CALLS, TOOLS, in_pieces

DOCUMENT = openapi_document()
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


def check(value: Any, name: str) -> None:
    """Holds a value to a schema of the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    Draft202012Validator(schema).validate(value)


async def test_served_and_valid(client: httpx.AsyncClient) -> None:
    response = await client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == json.loads(json.dumps(DOCUMENT))
    openapi_spec_validator.validate(response.json())


def test_every_route_is_described_and_every_description_routed(gateway: FakeGateway) -> None:
    watched = cast(Watched, SimpleNamespace(feed=None))  # whose routes alone are asked for
    routes = build_routes(gateway, GatewayConfig(), CollectorRegistry(), 1.0, watched)
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes
        for method in route.methods or {"POST"}
        if method != "HEAD"
    }
    assert served == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_every_failure_has_the_envelope(path: str, method: str) -> None:
    for status, answer in DOCUMENT["paths"][path][method]["responses"].items():
        schemas = [content.get("schema") for content in answer["content"].values()]
        if int(status) >= 400 and "text/plain" not in answer["content"]:
            assert schemas == [{"$ref": "#/components/schemas/ErrorEnvelope"}]


async def test_the_page_needs_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", page.text)
    for path, method in OPERATIONS:
        assert f"<span class=method>{method.upper()}</span><code>{path}</code>" in page.text
    for name in DOCUMENT["components"]["schemas"]:
        assert f"<details id='{name}'>" in page.text


async def test_answers_keep_to_their_schemas(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.model_dialect = Dialect("hermes", "qwen3")
    gateway.script = in_pieces(f"<think>Hm</think>{CALLS}", 5)
    details = {"logprobs": True, "return_token_ids": True, "tools": TOOLS}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for fields in ({}, details):
        body = chat_body(**fields)
        check((await client.post(CHAT, json=body)).json(), "ChatCompletion")
        for event in events(await client.post(CHAT, json={**body, **usage})):
            check(event, "ChatCompletionChunk")
    body = completion_body(return_token_ids=True, logprobs=1, echo=True)
    check((await client.post(COMPLETIONS, json=body)).json(), "TextCompletion")
    for event in events(await client.post(COMPLETIONS, json={**body, **usage})):
        check(event, "TextCompletion")
    body = {"model": MODEL, "input": "hi"}
    check((await client.post(RESPONSES, json=body)).json(), "ResponseObject")
    for event in typed_events(await client.post(RESPONSES, json={**body, "stream": True})):
        if "response" in event:
            check(event["response"], "ResponseObject")
    for event in events(await client.post("/generate", json={"text": "hi", "stream": True})):
        check(event, "SGLangText")
    for path, sent, name in (
        ("/generate", {"prompt": "hi", "stream": False}, "GeneratedText"),
        ("/generate", {"text": "hi", "return_logprob": True}, "SGLangText"),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, "TokenizedObject"),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}, "TokenizedObject"),
        ("/detokenize", {"tokens": [104]}, "DetokenizedObject"),
        ("/flush_cache", {}, "Flushed"),
        (CHAT, {}, "ErrorEnvelope"),
    ):
        check((await client.post(path, json=sent)).json(), name)
    for path, name in (
        ("/v1/models", "ModelListObject"),
        (f"/v1/models/{MODEL}", "ModelObject"),
        ("/server_info", "ServerInfo"),
        ("/v1/responses/resp_1", "ErrorEnvelope"),
    ):
        check((await client.get(path)).json(), name)


def test_bodies_keep_to_their_schemas() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    check(chat_body(tools=tools, temperature=0.5, n=2, stop=["x"], best_of=1), "ChatBody")
    check({"input": [{"role": "user", "content": "hi"}], "top_p": 1}, "ResponsesBody")
    for field, value in (("temperature", 3), ("n", 0), ("messages", []), ("best_of", 2)):
        with pytest.raises(Exception, match=r"valid|expected|maximum|minimum|non-empty|one of"):
            check(chat_body(**{field: value}), "ChatBody")
