"""Who is let in by which key, and that keys leave no trace."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from services.common.errors import StartupError, Unauthenticated
from services.gateway.keys import KeyRing


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_keys_everybody_is_let_in() -> None:
    assert KeyRing().identify({}) == ""
    assert not KeyRing()


def test_names_follow_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nbob:sk-bob\n\n  sk-nobody  \n")
    keys = KeyRing(("alice:sk-alice", "sk-first"), str(file))
    assert keys.identify(_bearer("sk-alice")) == "alice"
    assert keys.identify({"authorization": "bearer   sk-first "}) == "key-2"
    assert keys.identify({"x-api-key": "sk-bob"}) == "bob"
    assert keys.identify(_bearer("sk-nobody")) == "key-4"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": "Basic sk-a"},
        {"authorization": "sk-a"},
        {"authorization": "Bearer sk-b"},
        {"authorization": "Bearer sk-a sk-a"},
        {"authorization": "Bearer sk-", "x-api-key": "sk-a"},  # what is sent first counts
        {"x-api-key": "alice:sk-a"},
        {"x-api-key": "sk-\u00e9"},
    ],
)
def test_others_are_turned_away(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        KeyRing(("alice:sk-a",)).identify(headers)
    assert "sk-" not in str(caught.value)


def test_every_known_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an answer tells neither which key matched nor how much of it."""
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr("services.gateway.keys.hmac.compare_digest", compare)
    keys = KeyRing(("k1", "k2", "k3"))
    for given in ("k1", "k3"):
        compared.clear()
        keys.identify(_bearer(given))
        assert len(set(compared)) == 3


def test_no_key_is_kept() -> None:
    assert "sk-secret" not in repr(vars(KeyRing((), ""))) + repr(KeyRing(("sk-secret",))._names)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("# nobody\n", "there is no key in"), ("two words\n", "API key number 1 has a character")],
)
def test_a_bad_file_ends_the_start(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(StartupError, match=sentence) as caught:
        KeyRing((), str(file))
    assert "two" not in str(caught.value)
    with pytest.raises(StartupError, match="cannot read --api-key-file"):
        KeyRing((), str(tmp_path / "none"))


async def test_the_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    real, link = tmp_path / "one", tmp_path / "keys"
    real.write_text("old")
    link.symlink_to(real)
    keys = KeyRing((), str(link))
    following = asyncio.create_task(keys.follow_file(0.005))

    async def until_logged(text: str) -> None:
        async with asyncio.timeout(20):
            while text not in caplog.text:  # noqa: ASYNC110  # the file system tells nobody
                await asyncio.sleep(0.005)

    try:
        other, swap = tmp_path / "two", tmp_path / "swap"
        other.write_text("new-key")
        swap.symlink_to(other)
        swap.replace(link)  # as a Kubernetes secret is
        await until_logged("using new API keys")
        assert keys.identify(_bearer("new-key")) == "key-1"
        with pytest.raises(Unauthenticated):
            keys.identify(_bearer("old"))
        link.unlink()
        await until_logged("the new API keys are not used")
        assert keys.identify(_bearer("new-key")) == "key-1"
        assert "new-key" not in caplog.text
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
