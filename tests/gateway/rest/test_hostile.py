"""Bodies and headers meant to hurt: 400 or 413, and the server lives on."""

from __future__ import annotations

import httpx
import pytest

from tests.gateway.rest.helpers import CHAT, COMPLETIONS, chat_body, error_of

DEEP = 2000
GOOD_CHAT = b'{"messages":[{"role":"user","content":"hi"}]'

HOSTILE = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "string": b'"x"',
    "number": b"123",
    "no-messages": b'{"model":"fake/model"}',
    "truncated": b'{"model":"fake/model","messages":[{"role":"us',
    "trailing": GOOD_CHAT + b"}}",
    "bom": b"\xef\xbb\xbf" + GOOD_CHAT + b"}",
    "not-json": b"messages=hi",
    "invalid-utf8": b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
    "invalid-utf8-in-unknown-field": GOOD_CHAT + b',"zz":"\xff"}',
    "invalid-utf8-in-key": GOOD_CHAT + b',"\xff":1}',
    "lone-surrogate": b'{"messages":[{"role":"user","content":"\\ud800abcdef"}]}',
    "lone-low-surrogate": b'{"messages":[{"role":"user","content":"\\udc00abcdef"}]}',
    "lone-surrogate-in-stop": GOOD_CHAT + b',"stop":"\\ud800abcdef"}',
    "lone-surrogate-in-model": GOOD_CHAT + b',"model":"\\udfffabcdef"}',
    "lone-surrogate-in-unknown-field": GOOD_CHAT + b',"zz":"\\ud800abcdef"}',
    "lone-surrogate-in-tools": GOOD_CHAT + b',"tool_choice":"none","tools":[{"a":"\\ud800abcd"}]}',
    "raw-control": b'{"messages":[{"role":"user","content":"a\nb"}]}',
    "nan": GOOD_CHAT + b',"temperature":NaN}',
    "infinity": GOOD_CHAT + b',"temperature":Infinity}',
    "nan-in-unknown-field": GOOD_CHAT + b',"zz":NaN}',
    "too-large-float": GOOD_CHAT + b',"temperature":1e999}',
    "huge-integer": GOOD_CHAT + b',"max_tokens":' + b"9" * 4000 + b"}",
    "huger-integer": GOOD_CHAT + b',"max_tokens":' + b"9" * 5000 + b"}",
    "huge-seed": GOOD_CHAT + b',"seed":' + b"9" * 4000 + b"}",
    "huge-float-integer": GOOD_CHAT + b',"n":1e300}',
    "huge-temperature": GOOD_CHAT + b',"temperature":' + b"9" * 400 + b"}",
    "deep-list": b"[" * DEEP + b"]" * DEEP,
    "deep-object": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep-content": b'{"messages":[{"role":"user","content":' + b"[" * DEEP + b"]" * DEEP + b"}]}",
    "deep-unknown": GOOD_CHAT + b',"zz":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep-kwargs": GOOD_CHAT + b',"chat_template_kwargs":{"a":' + b"[" * 100 + b"]" * 100 + b"}}",
    "deep-tools": GOOD_CHAT
    + b',"tool_choice":"none","tools":[{"a":'
    + b"[" * DEEP
    + b"]" * DEEP
    + b"}]}",
    "swapped-types": b'{"messages":"hi","model":[],"stream":{}}',
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_body(client: httpx.AsyncClient, name: str) -> None:
    error = error_of(await client.post(CHAT, content=HOSTILE[name]), 400)
    assert len(error["message"]) < 500
    # Some are fields that /tokenize does not know.
    assert (await client.post("/tokenize", content=HOSTILE[name])).status_code in (200, 400)
    assert (await client.post(CHAT, json=chat_body())).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate", "/tokenize", "/detokenize"])
async def test_every_endpoint_refuses_non_objects(client: httpx.AsyncClient, path: str) -> None:
    for body in (b"", b"[]", b"null", b"{}", b'{"prompt":1}', b'{"prompt":"\xff"}'):
        error_of(await client.post(path, content=body), 400)


async def test_nul_is_ordinary_text(client: httpx.AsyncClient) -> None:
    body = chat_body(messages=[{"role": "user", "content": "a\x00b"}])
    assert (await client.post(CHAT, json=body)).json()["usage"]["prompt_tokens"] == 3


async def test_surrogate_pairs_are_ordinary_text(client: httpx.AsyncClient) -> None:
    body = b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}'
    answer = (await client.post(CHAT, content=body)).json()
    assert answer["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_body_over_the_limit(client: httpx.AsyncClient, path: str) -> None:
    async def endless() -> object:
        for _ in range(20):
            yield b"x" * 10_000

    assert error_of(await client.post(path, content=b"x" * 100_001), 413)["type"]
    unannounced = await client.post(path, content=endless())  # type: ignore[arg-type]
    assert error_of(unannounced, 413)["code"] == "request_too_large"
    assert (await client.post(CHAT, json=chat_body())).status_code == 200


async def test_body_at_the_limit(client: httpx.AsyncClient) -> None:
    body = GOOD_CHAT + b"}"
    padded = body + b" " * (100_000 - len(body))
    assert (await client.post(CHAT, content=padded)).status_code == 200


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e300", "1_0", ""])
async def test_bad_timeout_header(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post(CHAT, json=chat_body(), headers={"x-request-timeout": value})
    assert error_of(response, 400)["param"] == "timeout"
