"""API keys: who may call, and in whose name.

Keys are hashed when they are read and never kept, nor logged. A key that a client sends
is compared with every one that is known, in constant time each, so that an answer's time
tells nothing of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from services.common.errors import StartupError, Unauthenticated
from services.common.watched import WatchedFiles

log = logging.getLogger(__name__)

RELOAD_SECONDS = 5.0
_NAMED = re.compile(r"([A-Za-z0-9._-]+):(\S+)")
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)


class KeyRing:
    """The known keys; with none, everybody may call.

    An entry is `key`, or `name:key`; an unnamed key is called key-1, key-2, ... in the order
    of the entries, those of the file last.
    """

    def __init__(self, entries: Iterable[str] = (), file: str = "") -> None:
        """Raises StartupError if the file cannot be read or has no key, naming no key."""
        self._entries = tuple(entries)
        self._file = file
        self._watched = WatchedFiles((file,))
        self._names = self._load()

    def __bool__(self) -> bool:
        return bool(self._names)

    def identify(self, headers: Mapping[str, str]) -> str:
        """The name of the caller's key, sent as `Authorization: Bearer` or `x-api-key`.

        Empty if no keys are configured. Raises Unauthenticated.
        """
        if not self._names:
            return ""
        bearer = _BEARER.fullmatch(headers.get("authorization", ""))
        given = bearer.group(1) if bearer else headers.get("x-api-key", "")
        if not given:
            raise Unauthenticated("an API key is needed: send it as Authorization: Bearer KEY")
        name = self._find(given)
        if name is None:
            raise Unauthenticated("the API key is wrong")
        return name

    async def follow_file(self, interval: float = RELOAD_SECONDS) -> None:
        """Reads the file again whenever it changes, until cancelled.

        A file that cannot be used leaves the keys as they are.
        """
        while self._file:
            await asyncio.sleep(interval)
            if not self._watched.changed():
                continue
            try:
                self._names = self._load()
            except StartupError as error:
                log.error("the new API keys are not used", extra={"reason": str(error)})
            else:
                log.info("using new API keys", extra={"num_keys": len(self._names)})

    def _find(self, given: str) -> str | None:
        digest = _digest(given)
        found = None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _load(self) -> dict[bytes, str]:
        entries = list(self._entries)
        if self._file:
            from_file = _read(self._file)
            if not from_file:
                raise StartupError(f"there is no key in --api-key-file {self._file}")
            entries += from_file
        names: dict[bytes, str] = {}
        for position, entry in enumerate(entries, 1):
            name, key = split_entry(entry)
            name = name or f"key-{position}"
            if not key.isascii() or not key.isprintable() or " " in key:
                raise StartupError(f"API key number {position} has a character no header carries")
            names[_digest(key)] = name
        return names


def split_entry(entry: str) -> tuple[str, str]:
    """The name, empty if there is none, and the key of an entry."""
    named = _NAMED.fullmatch(entry)
    return (named.group(1), named.group(2)) if named else ("", entry)


def _read(path: str) -> list[str]:
    """The entries of a file, one a line; empty lines and those after # are skipped."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise StartupError(f"cannot read --api-key-file {path}: {reason}")
    return [text for line in lines if (text := line.strip()) and not text.startswith("#")]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
