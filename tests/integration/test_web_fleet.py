"""The page over a real fleet, in a real browser: chat, stop, a worker's death, a journey."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser import ARGS, chromium, picture
from tests.integration.served import ServedFleet
from tests.programs import eventually

DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        page = browser.new_page(viewport=DESKTOP, color_scheme="light")  # type: ignore[arg-type]
        page.set_default_timeout(20_000)
        yield page
        browser.close()


@pytest.fixture(scope="module")
def fleet(page: Page) -> Iterator[ServedFleet]:
    """Two workers of the fake engine; after the browser, whose absence skips without it."""
    with ServedFleet(
        *("--engine", "fake", "--model", "byte", "--fake-step-ms", "10", "--workers", "2"),
        *("--num-pages", "2048"),
    ) as served:
        yield served


def running(fleet: ServedFleet) -> int:
    """Requests that the workers hold, as they say themselves."""
    return int(fleet.total("worker", "vllm:num_requests_running"))


def longer_than(length: int) -> re.Pattern[str]:
    return re.compile(f".{{{length},}}", re.DOTALL)


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def test_chat_streams_and_stop_frees_the_request(fleet: ServedFleet, page: Page) -> None:
    page.goto(f"{fleet.url}/#/chat")
    page.wait_for_selector("option:has-text('byte')", state="attached")
    page.screenshot(path=picture("chat-welcome"))
    ask(page, "Go on for ever")
    answer = page.locator(".message.assistant").last
    expect(answer).to_have_text(longer_than(20))
    expect(answer).to_have_text(longer_than(len(answer.inner_text()) + 20))
    eventually(lambda: running(fleet) == 1, timeout=20, what="the worker has the request")
    page.get_by_role("button", name="Stop").click()
    eventually(lambda: running(fleet) == 0, timeout=20, what="the worker is rid of it")
    page.wait_for_selector(".message.assistant[aria-busy=false]")
    assert "stopped" in answer.inner_text()
    page.screenshot(path=picture("chat-stopped"))


def test_a_journey_is_shown(fleet: ServedFleet, page: Page) -> None:
    page.goto(f"{fleet.url}/#/chat")
    page.get_by_label("Max tokens").fill("30")
    page.get_by_role("button", name="New conversation").first.click()
    ask(page, "word " * 1000)
    page.wait_for_selector(".message.assistant[aria-busy=false]")
    page.get_by_role("link", name="journey").click()
    page.wait_for_selector(".waterfall")
    told = page.locator(".waterfall").inner_text()
    for phase in ("Encode", "Prefill", "Decode", "First text", "Last text"):
        assert phase in told
    assert page.locator(".tick").count() >= 1  # the parts of a long prompt
    assert "30" in page.locator(".tiles").inner_text()
    page.screenshot(path=picture("journey"))
    page.get_by_role("link", name="All requests").click()
    page.wait_for_selector("table.requests")
    assert "cancelled" in page.locator("table.requests").inner_text()
    page.screenshot(path=picture("requests"))


def test_the_fleet_shows_a_killed_worker_and_its_return(fleet: ServedFleet, page: Page) -> None:
    page.goto(f"{fleet.url}/#/fleet")
    page.wait_for_selector("tr[data-state=ready][data-address*=worker-1]")
    with httpx.Client(base_url=fleet.url, timeout=60) as client:
        body = {"prompt": "a" * 700, "max_tokens": 40, "ignore_eos": True, "stream": False}
        for _ in range(3):
            client.post("/v1/completions", json=body)
    page.get_by_text("As numbers").click()
    expect(
        page.locator(".timeline tbody td:nth-child(2)", has_text=re.compile("[1-9]"))
    ).not_to_have_count(0)
    victim = next(each for each in fleet.processes("worker") if each["name"] == "worker-1")
    os.kill(victim["pid"], signal.SIGKILL)
    page.wait_for_selector("tr[data-state=dead][data-address*=worker-1]", timeout=5000)
    page.locator("#detokenizer-title").scroll_into_view_if_needed()
    page.screenshot(path=picture("fleet-killed"))
    page.wait_for_selector("tr[data-state=ready][data-address*=worker-1]", timeout=60_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("size", "name"), [(DESKTOP, "desktop"), (PHONE, "phone")])
def test_pictures(
    fleet: ServedFleet, page: Page, scheme: str, size: dict[str, int], name: str
) -> None:
    """Kept to be looked at; nothing may be wider than the screen."""
    page.set_viewport_size(size)  # type: ignore[arg-type]
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    for view, ready in (("fleet", ".tiles"), ("requests", "table.requests"), ("chat", "#prompt")):
        page.goto(f"{fleet.url}/#/{view}")
        page.wait_for_selector(ready)
        page.screenshot(path=picture(f"{view}-{name}-{scheme}"))
        wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wide, f"{view} is wider than {size['width']} pixels"
