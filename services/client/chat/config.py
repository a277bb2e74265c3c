"""What `shoal chat` is told."""

from __future__ import annotations

from dataclasses import dataclass

from services.client.endpoint import DEFAULT_URL, EndpointOptions, check_headers, check_url
from services.common.config import borrow, option

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
    temperature: float | None = option(None, "0 is greedy; default: the server's", group=_GROUP)
    max_tokens: int | None = option(
        None, "the most tokens of an answer; default: the server's", group=_GROUP
    )
    prompt: str = option("", "ask this once, print the answer and leave", group=_GROUP)

    def __post_init__(self) -> None:
        check_url(self.url or DEFAULT_URL)
        check_headers(self.header)
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ValueError("--temperature must be from 0 to 2")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("--max-tokens must be at least 1")
