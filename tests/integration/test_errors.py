"""Bad bodies through the real fleet: the error envelope, and the fleet unharmed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.served import ServedFleet

CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "hi"}]

CASES: list[tuple[str, str, Any, int, str | None]] = [
    ("not JSON", CHAT, b"{nope", 400, None),
    ("empty body", CHAT, b"", 400, None),
    ("invalid UTF-8", CHAT, b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', 400, None),
    ("a list", CHAT, [], 400, None),
    ("null", CHAT, None, 400, None),
    ("no messages", CHAT, {}, 400, "messages"),
    ("messages is an object", CHAT, {"messages": {}}, 400, "messages"),
    ("messages is empty", CHAT, {"messages": []}, 400, "messages"),
    ("max_tokens is text", CHAT, {"messages": TURN, "max_tokens": "ten"}, 400, "max_tokens"),
    ("max_tokens is negative", CHAT, {"messages": TURN, "max_tokens": -1}, 400, "max_tokens"),
    ("max_tokens is zero", CHAT, {"messages": TURN, "max_tokens": 0}, 400, "max_tokens"),
    ("temperature too high", CHAT, {"messages": TURN, "temperature": 2.1}, 400, "temperature"),
    ("top_p zero", CHAT, {"messages": TURN, "top_p": 0}, 400, "top_p"),
    ("stream with bad value", CHAT, {"messages": TURN, "stream": True, "n": 0}, 400, "n"),
    ("lone surrogate", CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, None),
    ("unknown model", CHAT, {"model": "nope", "messages": TURN}, 404, "model"),
    ("empty prompt list", "/v1/completions", {"prompt": []}, 400, "prompt"),
    ("ids out of range", "/v1/completions", {"prompt": [1, 10**6]}, 400, "prompt"),
    ("negative id", "/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("no such path", "/v1/nothing", {}, 404, None),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_bad_bodies(
    fake_fleet: ServedFleet, path: str, body: Any, status: int, param: str | None
) -> None:
    kwargs: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"content-type": "application/json"}
    if body is None:
        kwargs = {"content": b"null"}
    response = httpx.post(f"{fake_fleet.url}{path}", headers=headers, timeout=30, **kwargs)
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert error["message"]
    assert error["type"]
    if param is not None:
        assert error["param"] == param, error
    for word in ("Traceback", "Exception", ".py"):
        assert word not in response.text
    good = httpx.post(f"{fake_fleet.url}{CHAT}", json={"messages": TURN, "max_tokens": 2})
    assert good.status_code == 200


def test_too_long_names_both_numbers(fleet: ServedFleet) -> None:
    for stream in (False, True):
        response = httpx.post(
            f"{fleet.url}/v1/completions",
            json={"prompt": [5] * 9000, "max_tokens": 1, "stream": stream},
            timeout=60,
        )
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "9000" in error["message"]
        assert "8192" in error["message"]


def test_too_large_a_body_is_413(fake_fleet: ServedFleet) -> None:
    response = httpx.post(
        f"{fake_fleet.url}/v1/completions",
        content=b'{"prompt":"' + b"a" * (17 * 1024 * 1024) + b'"}',
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"
