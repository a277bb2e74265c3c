"""What `shoal chat` is told."""

from __future__ import annotations

from dataclasses import dataclass

from services.client.endpoint import DEFAULT_URL, EndpointOptions, check_headers, check_url
from services.common.bounds import at_least, between
from services.common.config import borrow, check_bounds, option

_GROUP = "conversation"


@dataclass(frozen=True)
class ChatConfig:
    """The configuration of the shell."""

    url: str = option(
        "",
        f"base of the OpenAI API to talk to; default: {DEFAULT_URL}, and if nothing answers"
        " there, a fleet that lives as long as the chat",
        group="server",
        metavar="URL",
    )
    model: str = option(
        "",
        "model to ask; default: the first one served. For a fleet of its own: the model to serve,"
        " as --model of `shoal serve`",
        group="server",
    )
    api_key: tuple[str, ...] = borrow(EndpointOptions, "api_key")
    header: tuple[str, ...] = borrow(EndpointOptions, "header")
    tls_ca: str = borrow(EndpointOptions, "tls_ca")

    system: str = option("", "system message of the conversation", group=_GROUP)
    temperature: float | None = option(
        None, "0 is greedy; default: the server's", group=_GROUP, bounds=between(0, 2)
    )
    max_tokens: int | None = option(
        None,
        "the most tokens of an answer; default: the server's",
        group=_GROUP,
        bounds=at_least(1),
    )
    prompt: str = option("", "ask this once, print the answer and leave", group=_GROUP)

    def __post_init__(self) -> None:
        check_url(self.url or DEFAULT_URL)
        check_headers(self.header)
        check_bounds(self)
