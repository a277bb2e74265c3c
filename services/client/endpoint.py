"""Where a server of the OpenAI API is, and how to get in: URL, key, headers, trust.

What `shoal chat`, `shoal bench` and `shoal top` have in common. The server may be any that
speaks the API; nothing here knows of Shoal's own fleet.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import httpx

from services.common.config import option
from services.common.errors import StartupError
from services.gateway.keys import split_entry

DEFAULT_URL = "http://127.0.0.1:8000/v1"
CONNECT_SECONDS = 5.0

_GROUP = "server"
_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+)\s*[:=]\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class EndpointOptions:
    """The flags that say where the server is. Configs borrow them."""

    url: str = option(DEFAULT_URL, "base of the OpenAI API", group=_GROUP, metavar="URL")
    api_key: tuple[str, ...] = option(
        (),
        "key to send; of several, as SHOAL_API_KEY may have, the first",
        group=_GROUP,
        metavar="KEY",
        secret=True,
    )
    header: tuple[str, ...] = option(
        (),
        "header to send with every request, as 'Name: value'; may be repeated",
        group=_GROUP,
        metavar="HEADER",
        commas=False,
        secret=True,
    )
    tls_ca: str = option(
        "",
        "authorities (PEM) that may have signed the server's certificate; default: the system's",
        group=_GROUP,
        metavar="FILE",
    )


class HasEndpoint(Protocol):
    """A config with the flags above."""

    @property
    def url(self) -> str: ...
    @property
    def api_key(self) -> tuple[str, ...]: ...
    @property
    def header(self) -> tuple[str, ...]: ...
    @property
    def tls_ca(self) -> str: ...


class ApiError(Exception):
    """The server refused or failed; the message is for a person."""


@dataclass(frozen=True)
class Endpoint:
    """One server. `url` is the base that ends in /v1, without a slash at its end."""

    url: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    ca: str = ""

    @classmethod
    def of(cls, config: HasEndpoint, url: str = "") -> Endpoint:
        """The server that a config names, or the one at `url` with the config's key."""
        headers = dict(parse_header(line) for line in config.header)
        if config.api_key:
            headers["Authorization"] = f"Bearer {split_entry(config.api_key[0])[1]}"
        return cls(base_url(url or config.url), headers, config.tls_ca)

    @property
    def root(self) -> str:
        """The server's own root, where what is not of the OpenAI API lives."""
        return self.url.removesuffix("/v1")

    def trust(self) -> ssl.SSLContext:
        """Whose certificates are good. Raises StartupError if `ca` cannot be used."""
        try:
            return ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:
            raise StartupError(f"cannot use --tls-ca {self.ca}: {error.strerror or error}")

    def client(self, timeout: float | None = None) -> httpx.AsyncClient:
        """A general client, for what is not measured; `timeout` is in seconds."""
        limits = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
        return httpx.AsyncClient(timeout=limits, headers=self.headers, verify=self.trust())


class Caller:
    """What talks to one server, until the end of its `async with`."""

    def __init__(self, endpoint: Endpoint, timeout: float | None = None) -> None:
        """`timeout` is in seconds. Raises StartupError if the endpoint cannot be trusted."""
        self._http = endpoint.client(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()


async def list_models(http: httpx.AsyncClient, url: str) -> list[str]:
    """The names of the models served at `url`.

    Raises:
        httpx.TransportError: nothing answers.
        ApiError: what answers does not speak this API.
    """
    response = await http.get(f"{url}/models", timeout=CONNECT_SECONDS)
    if response.status_code != 200:
        raise ApiError(error_text(response.content, response.status_code))
    try:
        return [card["id"] for card in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise ApiError(f"what answers at {url} does not speak the OpenAI API")


def error_text(body: bytes, status: int) -> str:
    """The sentence in the body of a failed answer, or one about its status."""
    try:
        return message_of(json.loads(body)) or f"the server answered {status}"
    except ValueError:
        return f"the server answered {status}"


def message_of(value: Any) -> str:
    """The message in an error object of the API; empty if there is none."""
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, str):
        return error
    return str(error.get("message") or "") if isinstance(error, dict) else ""


def check_url(url: str) -> None:
    """Raises ValueError, with a sentence for the person who typed it."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # asking for the port checks it
        httpx.URL(url)  # which checks more
    except (ValueError, httpx.InvalidURL) as error:
        raise ValueError(f"--url {url!r} is no URL: {error}")
    if not url.startswith(("http://", "https://")) or not host:
        raise ValueError(f"--url {url!r} does not start with http:// or https:// and a host")


def check_headers(lines: Sequence[str]) -> None:
    """Raises ValueError if one is not a header."""
    for line in lines:
        parse_header(line)


def parse_header(line: str) -> tuple[str, str]:
    """Name and value of `Name: value`, or of vLLM's `Name=value`. Raises ValueError."""
    match = _HEADER.fullmatch(line.strip())
    if match is None or "\n" in line or "\r" in line:
        raise ValueError(f"--header {line!r} is not of the form 'Name: value'")
    return match[1], match[2]


def base_url(url: str) -> str:
    """The base of the API: a URL without a path is one whose API is at /v1."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"
