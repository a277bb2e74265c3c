"""The example clients of every language, against a fleet, and their text in the docs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.clients import toolchains
from tests.clients.toolchains import EXAMPLES, ROOT, run
from tests.integration.served import ServedFleet
from tests.integration.test_fleet_life import assert_nothing_is_held

CLIENTS: dict[str, Callable[[Path], list[str]]] = {
    "python": lambda _: toolchains.python_client("chat.py"),
    "python aio": lambda _: toolchains.python_client("chat_aio.py"),
    "node": lambda _: toolchains.node_client("chat.js"),
    "c++": toolchains.cpp_client,
    "ruby": toolchains.ruby_client,
    "go": toolchains.go_client,
}
# What is shown in docs/grpc.md, each file whole.
SHOWN = (
    "python/chat.py",
    "python/chat_aio.py",
    "python/session.py",
    "node/chat.js",
    "cpp/chat.cpp",
    "cpp/Makefile",
    "ruby/chat.rb",
    "go/chat.go",
)


def expected_output(fleet: ServedFleet) -> str:
    """What every client prints, with the answer as REST gives it."""
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60).json()
    usage = answer["usage"]
    model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]
    return (
        f"model: {model['id']} {model['max_model_len']}\n"
        f"chat: {answer['choices'][0]['message']['content']}\n"
        "finish: FINISH_REASON_LENGTH\n"
        f"usage: {usage['prompt_tokens']} {usage['completion_tokens']}\n"
        "cancelled: CANCELLED\n"
        "error: INVALID_ARGUMENT\n"
        "field: temperature\n"
    )


@pytest.mark.parametrize("language", CLIENTS)
def test_a_client(
    fake_served: ServedFleet, grpc_address: str, tmp_path: Path, language: str
) -> None:
    client = CLIENTS[language](tmp_path / "build")
    environment = {"PYTHONPATH": str(ROOT), "NODE_PATH": str(toolchains.NODE_MODULES)}
    output = run(*client, grpc_address, timeout=120, env=environment)
    assert output == expected_output(fake_served)
    assert_nothing_is_held(fake_served)  # of the cancelled one


def test_the_session_example(fake_served: ServedFleet, grpc_address: str) -> None:
    client = toolchains.python_client("session.py")
    output = run(*client, grpc_address, timeout=120, env={"PYTHONPATH": str(ROOT)})
    body = {"prompt": "Number 0 is", "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{fake_served.url}/v1/completions", json=body, timeout=60).json()
    assert output == (
        f"first: {answer['choices'][0]['text']}\nfinished: 99\ncancelled: ERROR_CODE_CANCELLED\n"
    )
    assert_nothing_is_held(fake_served)


def test_grpcurl_lists_and_streams(fake_served: ServedFleet, grpc_address: str) -> None:
    """As docs/grpc.md shows it, by reflection."""
    grpcurl = toolchains.grpcurl()
    assert "shoal.v1.Inference" in run(grpcurl, "-plaintext", grpc_address, "list")
    request = '{"text": "Hello", "options": {"sampling": {"max_tokens": 4}}}'
    output = run(grpcurl, "-plaintext", "-d", request, grpc_address, "shoal.v1.Inference/Generate")
    assert re.search(r'"completion_?[tT]okens": 4\b', output)  # as its version spells fields


def test_the_docs_show_the_files() -> None:
    page = (ROOT / "docs" / "grpc.md").read_text()
    blocks = re.findall(r"^```[a-z+]*(?: [a-z]+)*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for name in SHOWN:
        assert (EXAMPLES / name).read_text() in blocks, f"{name} is not in docs/grpc.md as it is"
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.*") if path.is_file()}
    files.add("cpp/Makefile")
    assert files == set(SHOWN), "every example is shown"
