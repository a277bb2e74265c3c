"""The clients that programs really use, each against one fleet with the embedded model.

Each suite is a program of its own, run with its library's own environment (tools/clients.sh),
which says what it did. Afterwards nothing of it may be left: each has cancelled a request.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.clients.toolchains import NODE_MODULES, ROOT, need, run
from tests.full import FULL
from tests.integration.served import ServedFleet
from tests.integration.test_fleet_life import assert_nothing_is_held

SUITES = Path(__file__).parent / "suites"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
MODEL = "SmolLM2-135M-Instruct"

_FULL = (
    "models",
    "chat, n, logprobs",
    "streaming",
    "completions",
    "tools",
    "structured output with parse",
    "responses",
    "cancel",
    "errors",
)
# What each suite must have done.
STEPS: dict[str, tuple[str, ...]] = {
    "use_openai.py": _FULL,
    "use_openai.mjs": _FULL,
    "use_langchain.py": ("chat", "streaming", "tool call", "schema", "cancel", "error"),
    "use_litellm.py": ("chat", "streaming", "schema", "cancel", "error"),
    "use_instructor.py": ("chat, schema", "tool call", "streaming", "cancel", "error"),
    "use_pydantic_ai.py": ("chat", "streaming", "schema", "tool call", "cancel", "error"),
    "use_ai_sdk.mjs": ("chat", "streaming", "schema", "tool call", "cancel", "error"),
}
# The others run with SHOAL_FULL=1: each takes seconds to import its library alone.
ALWAYS = ("use_openai.py", "use_openai.mjs", "use_langchain.py")
PACKAGES: dict[str, tuple[str, ...]] = {
    "use_openai.py": ("openai",),
    "use_openai.mjs": ("openai",),
    "use_langchain.py": ("langchain-openai",),
    "use_litellm.py": ("litellm",),
    "use_instructor.py": ("instructor",),
    "use_pydantic_ai.py": ("pydantic-ai-slim",),
    "use_ai_sdk.mjs": ("ai", "@ai-sdk/openai-compatible"),
}


def pinned(suite: str) -> dict[str, str]:
    """The versions that tools/clients.sh installs for a suite."""
    if suite.endswith(".mjs"):
        manifest = json.loads((ROOT / "tools/clients/package.json").read_text())
        versions: dict[str, str] = manifest["dependencies"]
    else:
        text = (ROOT / "tools/clients/requirements.txt").read_text()
        versions = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)", text, re.MULTILINE))
    return {package: versions[package] for package in PACKAGES[suite]}


def command(suite: str) -> list[str]:
    """How to run a suite. Skips if its environment was not made."""
    if suite.endswith(".mjs"):
        need("node")
        if not (NODE_MODULES / "openai").is_dir():
            pytest.skip("no npm clients: run tools/clients.sh")
        return ["node", str(SUITES / suite)]
    if not PYTHON.exists():
        pytest.skip("no Python clients: run tools/clients.sh")
    return [str(PYTHON), str(SUITES / suite)]


@pytest.mark.parametrize("suite", STEPS)
def test_a_suite(fleet: ServedFleet, suite: str) -> None:
    if suite not in ALWAYS and not FULL:
        pytest.skip("SHOAL_FULL=1 runs it")
    program = command(suite)
    # litellm would look its table of prices up in the network.
    env = {"CLIENTS_NODE": str(NODE_MODULES.parent), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    lines = run(*program, f"{fleet.url}/v1", MODEL, timeout=1200, env=env).splitlines()
    versions = dict(line.split()[1:] for line in lines if line.startswith("version "))
    assert versions == pinned(suite)
    assert [line.removeprefix("ok ") for line in lines if line.startswith("ok ")] == list(
        STEPS[suite]
    )
    assert_nothing_is_held(fleet, timeout=60)


def test_an_overload_is_waited_out_in_python(tight_fleet: ServedFleet) -> None:
    """The SDK comes back when Retry-After says; without patience it raises its own error."""
    with openai.OpenAI(base_url=f"{tight_fleet.url}/v1", api_key="none", timeout=120) as client:

        def ask(number: int, *, retries: int = 30) -> int | openai.RateLimitError:
            patient = client.with_options(max_retries=retries)
            try:
                answer = patient.completions.create(
                    model="byte", prompt=f"request {number}", max_tokens=10
                )
            except openai.RateLimitError as error:
                return error
            assert answer.usage is not None
            return answer.usage.completion_tokens

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(6))) == [10] * 6
            hasty = list(pool.map(lambda number: ask(number, retries=0), range(8)))
    refused = [outcome for outcome in hasty if isinstance(outcome, openai.RateLimitError)]
    assert 0 < len(refused) < 8
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert tight_fleet.total("gateway", "shoal_gateway_errors_total", code="overloaded") > 0


def test_an_overload_is_waited_out_in_node(tight_fleet: ServedFleet) -> None:
    program = command("retry_openai.mjs")
    env = {"CLIENTS_NODE": str(NODE_MODULES.parent)}
    output = run(*program, f"{tight_fleet.url}/v1", "byte", timeout=300, env=env)
    assert output == "ok retries\nok refusals\n"


def test_the_page_says_what_is_run() -> None:
    """docs/compatibility.md: every suite with its versions, and every link leads somewhere."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for suite in STEPS:
        assert f"(../tests/clients/suites/{suite})" in page, suite
        for package, version in pinned(suite).items():
            assert f"{package} {version}" in page, f"{package} {version} is not on the page"
    for link in re.findall(r"\]\((\.\./[^)#]+)", page):
        assert (ROOT / "docs" / link).resolve().exists(), link
