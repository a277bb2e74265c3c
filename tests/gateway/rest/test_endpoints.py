"""Everything but the two OpenAI generating endpoints."""

from __future__ import annotations

import httpx
import pytest

from services.common.errors import PeerLost
from services.gateway.domain import ChatPrompt, Chunk, Readiness, TextPrompt
from services.gateway.sse import text_event
from tests.gateway.rest.fake import MODEL, FakeGateway, words
from tests.gateway.rest.helpers import CHAT, HI, chat_body, error_of


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == MODEL
    assert model["object"] == "model"
    assert model["max_model_len"] == 8192
    assert (await client.get(f"/v1/models/{MODEL}")).json() == model
    error = error_of(await client.get("/v1/models/nope"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    asked = error_of(await client.post(CHAT, json=chat_body(model="nope")), 404)
    assert error["message"] == asked["message"]


async def test_tokenize(client: httpx.AsyncClient) -> None:
    text = {"model": MODEL, "prompt": "hi", "return_token_strs": True}
    assert (await client.post("/tokenize", json=text)).json() == {
        "count": 2,
        "max_model_len": 8192,
        "tokens": [104, 105],
        "token_strs": ["h", "i"],
    }
    chat = (await client.post("/tokenize", json={"messages": HI})).json()
    assert (chat["tokens"], chat["token_strs"]) == ([104, 105], None)
    error_of(await client.post("/tokenize", json={"model": "nope", "prompt": "hi"}), 404)


async def test_tokenize_passes_options_on(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    seen: list[ChatPrompt | TextPrompt] = []
    tokenize = gateway.tokenize

    async def spy(model: str, prompt: ChatPrompt | TextPrompt, **options: bool) -> object:
        seen.append(prompt)
        return await tokenize(model, prompt, **options)

    gateway.tokenize = spy  # type: ignore[method-assign, assignment]
    await client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})
    await client.post("/tokenize", json={"messages": HI, "add_generation_prompt": False})
    assert seen[0] == TextPrompt("hi", add_special_tokens=False)
    assert isinstance(seen[1], ChatPrompt)
    assert not seen[1].add_generation_prompt


async def test_detokenize(client: httpx.AsyncClient) -> None:
    answer = await client.post("/detokenize", json={"model": MODEL, "tokens": [104, 105]})
    assert answer.json() == {"prompt": "hi"}
    for tokens in ([-1], [2**40], ["a"], None):
        error = error_of(await client.post("/detokenize", json={"tokens": tokens}), 400)
        assert error["param"].startswith("tokens")


async def test_generate_streams_plain_text(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.script = lambda request: words("one", " two\nthree", "", "\r\n", "four\rfive")
    body = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True}
    response = await client.post("/generate", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text == (
        "data: one\n\n"
        "data:  two\ndata: three\n\n"
        "data: \ndata: \n\n"
        "data: four\ndata: five\n\n"
        "data: [DONE]\n\n"
    )
    request = gateway.requests[0]
    assert request.prompt == TextPrompt("hi")
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (5, True)
    assert request.sampling.temperature == 0


async def test_generate_plain(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/generate", json={"prompt": [1], "stream": False})).json()
    assert answer["text"] == "Hello world0"
    assert answer["finish_reason"] == "stop"
    assert error_of(await client.post("/generate", json={"prompt": "a", "n": 2}), 400)


async def test_generate_error_in_the_stream(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.script = lambda request: [Chunk(0, "a", [1]), PeerLost("lost")]
    text = (await client.post("/generate", json={"prompt": "hi"})).text
    assert text.startswith('data: a\n\ndata: {"error":{"message":"lost"')
    assert text.endswith("\n\ndata: [DONE]\n\n")


def test_text_event_keeps_the_framing() -> None:
    assert text_event("a") == b"data: a\n\n"
    assert text_event("\n") == b"data: \ndata: \n\n"
    assert text_event("a\r") == b"data: a\ndata: \n\n"


async def test_probes(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    for path in ("/livez", "/readyz", "/health", "/readyz?scope=gateway"):
        assert (await client.get(path)).status_code == 200
    gateway.readiness_now = Readiness(False, ("no worker is ready",))
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/readyz?scope=gateway")).status_code == 200
    for path in ("/readyz", "/health"):
        response = await client.get(path)
        assert response.status_code == 503
        assert "no worker is ready" in response.text
    gateway.readiness_now = Readiness(False, ("draining",), draining=True)
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/readyz?scope=gateway")).status_code == 503


async def test_metrics_and_info(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    assert "fake_things" in (await client.get("/metrics")).text
    info = (await client.get("/server_info")).json()
    assert info["models"][0]["id"] == MODEL
    assert info["limits"]["max_body_bytes"] == 100_000
    assert info["quantizations"] == {MODEL: ["int8", "none"]}
    assert (await client.post("/flush_cache")).json() == {"success": True}
    assert gateway.flushed == 1


async def test_unknown_route_and_method(client: httpx.AsyncClient) -> None:
    assert error_of(await client.get("/v1/nope"), 404)["code"] == "not_found"
    assert error_of(await client.get("/v1/models/"), 404)
    response = await client.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "This server generates text; it has no /v1/embeddings."),
        ("/v1/audio/speech", "This server generates text; it has no /v1/audio/speech."),
        ("/v1/fine_tuning/jobs", "it has no /v1/fine_tuning/jobs."),
        ("/v1/files/x.jsonl", "it has no /v1/files/x.jsonl."),
        ("/rerank", "it has no /rerank."),
        ("/files/v1.2/content", "it has no /files/v1.2/content."),
        ("/images/logo.png", "Not Found: POST /images/logo.png"),
        ("/chat/completions", "There is no /chat/completions; the base URL "),
        ("/models/x", "ends in /v1, once."),
        ("/v1/v1/chat/completions", "ends in /v1, once."),
        ("/v1/embeddingz", "Not Found: POST /v1/embeddingz"),
        ("/v1/responses/x", "This server keeps no responses"),
    ],
)
async def test_a_path_that_leads_nowhere_is_told_what_it_misses(
    client: httpx.AsyncClient, path: str, words: str
) -> None:
    error = error_of(await client.post(path, json={}), 404)
    assert words in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "not_found")


async def test_fault_outside_generation(
    client: httpx.AsyncClient, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(model: str, token_ids: object) -> str:
        raise ZeroDivisionError("secret")

    gateway.detokenize = broken  # type: ignore[method-assign]
    response = await client.post("/detokenize", json={"tokens": [1]})
    assert error_of(response, 500)["message"] == "internal error"
    assert "secret" not in response.text
    assert any(record.exc_info for record in caplog.records)


async def test_request_id(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    for given in (b"mine", b"with space", "é漢".encode(), b"x" * 256):
        response = await client.post(CHAT, json=chat_body(), headers={b"x-request-id": given})
        assert response.status_code == 200
        name, value = next(
            (name, value) for name, value in response.headers.raw if name.lower() == b"x-request-id"
        )
        assert value == given, name
        assert gateway.requests[-1].request_id == given.decode("latin-1")
    long = await client.post(CHAT, json=chat_body(), headers={"x-request-id": "y" * 5000})
    assert long.headers["x-request-id"] == "y" * 256
    fresh = [(await client.get("/livez")).headers["x-request-id"] for _ in range(2)]
    assert fresh[0] != fresh[1]
    refused = await client.post(CHAT, json={}, headers={"x-request-id": "r"})
    assert refused.headers["x-request-id"] == "r"


async def test_timeout_header(client: httpx.AsyncClient, gateway: FakeGateway) -> None:
    headers = {"x-request-timeout": "2.5"}
    await client.post(CHAT, json=chat_body(), headers=headers)
    assert gateway.requests[-1].timeout == 2.5
    await client.post(CHAT, json=chat_body(timeout=1), headers=headers)
    assert gateway.requests[-1].timeout == 1
