"""The page in a real browser: chat, what a model may not do, keys, the keyboard."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from services.gateway.domain import Chunk, GenerationRequest, TokenLogprobs
from tests.browser import AXE, picture
from tests.gateway.rest.fake import Step, words
from tests.gateway.web.conftest import Shown, showing

HOSTILE = """<img src=x onerror="window.hacked=1"> <script>window.hacked=2</script>

<iframe srcdoc="<script>parent.hacked=3</script>"></iframe>

[click](javascript:window.hacked=4) ![picture](https://elsewhere.example/x.png)

<svg onload="window.hacked=5"></svg> <a href="javascript:window.hacked=6">here</a>

```html"><img src=x onerror=window.hacked=7>
<b onclick="window.hacked=8">bold</b>
```

| a | b |
|---|---|
| <img src=x onerror=window.hacked=9> | **strong** |
"""


def script(*texts: str) -> object:
    def play(request: GenerationRequest) -> list[Step]:
        return words(*texts)

    return play


async def test_an_answers_html_never_runs(shown: Shown) -> None:
    shown.gateway.script = script(*[HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)])  # type: ignore[assignment]
    requested: list[str] = []
    shown.page.on("request", lambda request: requested.append(request.url))
    await shown.open()
    await shown.ask("Attack me")
    answer = shown.page.locator(".message.assistant .prose")
    assert await answer.locator("img, script, iframe, svg:not(.glyph), [onerror]").count() == 0
    assert await answer.locator('a[href^="javascript"]').count() == 0
    assert '<img src=x onerror="window.hacked=1">' in await answer.inner_text()
    assert await answer.locator("table strong").inner_text() == "strong"
    for link in await answer.locator("a").all():
        await link.click(modifiers=["Alt"], no_wait_after=True)
    assert await shown.page.evaluate("window.hacked") is None
    assert all(url.startswith(shown.url) for url in requested)
    await shown.page.reload()  # and not as a conversation that was kept
    await shown.page.wait_for_selector(".message.assistant .prose")
    assert await shown.page.evaluate("window.hacked") is None


async def test_markdown_code_and_figures(shown: Shown) -> None:
    text = (
        "# Title\n\nSome *text* and `code`.\n\n```python\nprint('hi')  # a comment\n```\n\n1. one\n"
    )
    shown.gateway.script = script(text)  # type: ignore[assignment]
    await shown.open()
    await shown.ask("Show me")
    answer = shown.page.locator(".message.assistant")
    assert await answer.locator("h2").inner_text() == "Title"
    assert await answer.locator("pre .hljs-comment").inner_text() == "# a comment"
    assert await answer.get_by_role("button", name="Copy").count() == 2
    assert "TTFT" in await answer.locator(".figures").inner_text()
    await shown.page.reload()
    await shown.page.wait_for_selector(".message.assistant h2")  # it was kept
    await shown.page.get_by_role("button", name="Edit").focus()
    await shown.page.keyboard.press("Enter")
    await shown.page.fill("#edited", "Show me more")
    await shown.page.keyboard.press("Tab")
    await shown.page.keyboard.press("Tab")
    await shown.page.keyboard.press("Enter")
    await shown.page.wait_for_selector(".said:has-text('Show me more')")
    assert len(shown.gateway.requests) == 2


async def test_tokens_with_what_else_they_might_have_been(shown: Shown) -> None:
    def play(request: GenerationRequest) -> list[Step]:
        assert request.sampling.logprobs == 5
        sure = TokenLogprobs(100, -0.01, ((100, -0.01), (101, -5.0)))
        unsure = TokenLogprobs(102, -2.5, ((103, -0.3), (102, -2.5)))
        return [
            Chunk(0, "Hello", [100], [sure]),
            Chunk(0, " world", [102], [unsure], finish_reason="stop"),
        ]

    shown.gateway.script = play
    await shown.open()
    await shown.page.get_by_label("Show tokens and log-probabilities").check()
    await shown.ask("Tell me")
    tokens = shown.page.locator(".token-text .token")
    assert await tokens.count() == 2
    await tokens.nth(1).hover()
    taken = shown.page.locator(".alternatives .taken")
    assert "8.2 %" in await taken.inner_text()
    await shown.page.screenshot(path=picture("chat-tokens"))


async def test_an_error_is_told_in_its_own_words(shown: Shown) -> None:
    await shown.open()
    await shown.page.fill("#max_tokens", "-5")
    await shown.page.fill("#prompt", "Hello")
    await shown.page.keyboard.press("Enter")
    failure = shown.page.get_by_role("alert")
    assert "max_tokens" in await failure.inner_text()
    shown.errors = [error for error in shown.errors if "400" not in error]


async def test_a_key_is_asked_for_and_kept_in_the_tab() -> None:
    async with showing("sk-right") as shown:
        await shown.open()
        dialog = shown.page.get_by_role("dialog")
        await dialog.get_by_label("Key").fill("sk-wrong")
        await shown.page.keyboard.press("Enter")
        await expect(dialog.locator("p").first).to_contain_text("does not know that key")
        await dialog.get_by_label("Key").fill("sk-right")
        await shown.page.screenshot(path=picture("key"))
        await shown.page.keyboard.press("Enter")
        await dialog.wait_for(state="hidden")
        await shown.page.wait_for_selector("option:has-text('fake/model')", state="attached")
        await shown.ask("Hello")
        assert await shown.page.locator(".failure").count() == 0
        stored = await shown.page.evaluate("JSON.stringify(localStorage)")
        assert "sk-right" not in stored
        await shown.page.reload()  # the tab has it still
        await shown.page.wait_for_selector("option:has-text('fake/model')", state="attached")
        assert await dialog.is_hidden()


async def test_the_keyboard_is_enough(shown: Shown) -> None:
    press = shown.page.keyboard.press
    await shown.open()
    await shown.page.wait_for_selector(".welcome")
    await press("Tab")
    assert await _focused(shown) == "Skip to content"
    await press("Enter")
    assert await shown.page.evaluate("document.activeElement.id") == "main"
    for _ in range(20):
        await press("Tab")
        if await shown.page.evaluate("document.activeElement.id") == "prompt":
            break
    await shown.page.keyboard.type("Hello")
    await press("Enter")
    await shown.page.wait_for_selector(".message.assistant[aria-busy=false]")
    await shown.page.reload()
    await shown.page.wait_for_selector(".message.assistant")
    for _ in range(4):  # past the skip link and the brand to the second view
        await press("Tab")
    assert await _focused(shown) == "Fleet"
    await press("Enter")
    await shown.page.wait_for_url("**/#/fleet")
    shown.errors = [error for error in shown.errors if "404" not in error]  # no fleet behind it


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_is_accessible(shown: Shown, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: run make web, or tools/clients.sh")
    shown.gateway.script = script(
        "# Title\n\n```python\nx = 1  # one\n```\n\n| a |\n|---|\n| b |\n"
    )  # type: ignore[assignment]
    await shown.page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
    await shown.open()
    await shown.ask("Hello")
    found = await _violations(shown)
    assert not found, found


async def _violations(shown: Shown) -> list[str]:
    """What axe finds; it is evaluated by the driver, as the page's own policy allows none."""
    await shown.page.evaluate(AXE.read_text())
    result = await shown.page.evaluate("axe.run()")
    return [
        f"{each['id']}: {node['html'][:200]}"
        for each in result["violations"]
        for node in each["nodes"]
    ]


async def _focused(shown: Shown) -> str:
    return str(await shown.page.evaluate("document.activeElement.textContent.trim()"))
