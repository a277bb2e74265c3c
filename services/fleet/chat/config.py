"""What `shoal chat` is told."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.config import option

DEFAULT_URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class ChatConfig:
    """The configuration of the shell."""

    url: str = option(
        "",
        f"base of the OpenAI API to talk to; default: {DEFAULT_URL}, and if nothing answers"
        " there, a fleet that lives as long as the chat",
    )
    model: str = option(
        "",
        "model to ask; default: the first one served. For a fleet of its own: the model to serve,"
        " as --model of `shoal serve`",
    )
    api_key: tuple[str, ...] = option(
        (),
        "key to send; of several, as SHOAL_API_KEY may have, the first",
        metavar="KEY",
        secret=True,
    )
    tls_ca: str = option(
        "",
        "authorities (PEM) that may have signed the server's certificate; default: the system's",
        metavar="FILE",
    )
    system: str = option("", "system message of the conversation")
    temperature: float | None = option(None, "0 is greedy; default: the server's")
    max_tokens: int | None = option(None, "the most tokens of an answer; default: the server's")
    prompt: str = option("", "ask this once, print the answer and leave")

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url {self.url!r} does not start with http:// or https://")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ValueError("--temperature must be from 0 to 2")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("--max-tokens must be at least 1")
