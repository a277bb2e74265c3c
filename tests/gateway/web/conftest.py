"""The page in Chromium, over a scripted gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from playwright.async_api import ConsoleMessage, Page, async_playwright
from prometheus_client import CollectorRegistry

from services.gateway.config import GatewayConfig
from services.gateway.http import build_app
from services.gateway.keys import KeyRing
from tests.browser import ARGS, chromium
from tests.gateway.rest.conftest import Server
from tests.gateway.rest.fake import FakeGateway


class Shown:
    """The page, the gateway behind it, and what went wrong in the browser."""

    def __init__(self, page: Page, gateway: FakeGateway, url: str) -> None:
        self.page = page
        self.gateway = gateway
        self.url = url
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._on_console)

    def _on_console(self, said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            self.errors.append(said.text)

    async def open(self, route: str = "#/chat") -> None:
        await self.page.goto(f"{self.url}/{route}")

    async def ask(self, text: str) -> None:
        """Sends a message, and waits for the answer's end."""
        await self.page.fill("#prompt", text)
        await self.page.keyboard.press("Enter")
        await self.page.wait_for_selector(".message.assistant[aria-busy=false]")


@asynccontextmanager
async def showing(*keys: str) -> AsyncIterator[Shown]:
    """The page of a gateway with these keys."""
    path = chromium()
    gateway = FakeGateway()
    app = build_app(gateway, GatewayConfig(), CollectorRegistry(), KeyRing(keys))
    server = Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None))
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=path, args=ARGS)
            page = await browser.new_page(color_scheme="light")
            page.set_default_timeout(20_000)
            yield Shown(page, gateway, f"http://127.0.0.1:{port}")
            await browser.close()
    finally:
        server.stop.set()
        await serving


@pytest.fixture
async def shown() -> AsyncIterator[Shown]:
    async with showing() as shown:
        yield shown
        assert not shown.errors
