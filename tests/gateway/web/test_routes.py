"""The page's files: how they are served, and that they are what their source makes."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.gateway.config import GatewayConfig
from services.gateway.http import build_app
from services.gateway.keys import KeyRing
from tests.gateway.rest.fake import FakeGateway

WEB = Path(__file__).parents[3] / "services" / "gateway" / "web"
FILES = ("app.js", "app.css", "icon.svg", "licenses.txt")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that asks for keys."""
    app = build_app(FakeGateway(), GatewayConfig(), CollectorRegistry(), KeyRing(("sk-1",)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def test_the_page_needs_no_key_and_its_api_does(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name in FILES:
        assert (await client.get(f"/web/{name}")).content == (WEB / "bundle" / name).read_bytes()
    for path in ("/v1/models", "/fleet", "/fleet/events", "/fleet/requests", "//", "/web"):
        assert (await client.get(f"http://gateway{path}")).status_code == 401, path
    for path in ("/web/", "/web/nothing", "/web/../routes.py", "/web/index.html"):
        assert (await client.get(path)).status_code in (401, 404), path


async def test_it_may_load_and_run_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    policy = dict(
        part.split(" ", 1) for part in page.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert all(url.startswith("/web/") for url in re.findall(r'(?:src|href)="([^"]+)"', page.text))


async def test_it_is_kept_by_its_tag_and_packed(client: httpx.AsyncClient) -> None:
    first = await client.get("/web/app.js", headers={"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    assert int(first.headers["content-length"]) == len(gzip.compress(first.content, mtime=0))
    again = await client.get("/web/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = await client.get("/web/app.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == first.content


async def test_it_can_be_switched_off() -> None:
    app = build_app(FakeGateway(), GatewayConfig(web="off"), CollectorRegistry())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/")).status_code == 404
        assert (await client.get("/web/app.js")).status_code == 404
        assert (await client.get("/v1/models")).status_code == 200


def test_the_bundle_is_what_its_source_makes(tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("no node: the bundle is not made again")
    if not (WEB / "node_modules" / "esbuild").exists():
        pytest.skip("no npm packages: run make web, or tools/clients.sh")
    subprocess.run(["node", WEB / "build.mjs", tmp_path], check=True)
    for name in ("index.html", *FILES):
        made, kept = (tmp_path / name).read_bytes(), (WEB / "bundle" / name).read_bytes()
        assert made == kept, f"{name} is not what src/ makes: run make web"


def test_nothing_becomes_markup_but_by_elements() -> None:
    """Trusted types forbid it in the browser; this says it where it would be written."""
    for source in (WEB / "src").rglob("*.js*"):
        text = source.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{source}: {word}"
