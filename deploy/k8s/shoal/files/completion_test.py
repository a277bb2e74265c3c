"""What `helm test` runs: each model streams a completion, is left in another, and gives a whole.

Needs only the standard library. Called with the gateway's base URL, a time limit in seconds for
each answer, and the models' names, none if there is one; exits 0, or 1 after one sentence.
"""

import json
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

SECRETS = Path("/etc/shoal")  # where the chart mounts what a gateway has


def first_key(text: str) -> str:
    """The first key of a file of `name:key` or `key` lines."""
    lines = [line.strip() for line in text.splitlines()]
    entry = next(line for line in lines if line and not line.startswith("#"))
    named = re.fullmatch(r"[A-Za-z0-9._-]+:(\S+)", entry)
    return named.group(1) if named else entry


def context(secrets: Path) -> ssl.SSLContext:
    """Trusts the authority beside the gateway's certificate, and shows that certificate."""
    tls = secrets / "public-tls"
    if not (tls / "ca.crt").is_file():
        return ssl.create_default_context()
    found = ssl.create_default_context(cafile=tls / "ca.crt")
    found.load_cert_chain(tls / "tls.crt", tls / "tls.key")
    return found


def events(lines: Iterable[bytes]) -> list[str]:
    """The data of a stream of server-sent events."""
    return [line[5:].strip().decode() for line in lines if line.startswith(b"data:")]


def check(data: list[str]) -> str:
    """The completion's text. Raises ValueError naming what is wrong with the stream."""
    if not data or data[-1] != "[DONE]":
        raise ValueError("the stream did not end with [DONE]")
    chunks: list[dict[str, Any]] = [json.loads(item) for item in data[:-1]]
    for chunk in chunks:
        if "error" in chunk:
            raise ValueError(f"the stream carries an error: {chunk['error']}")
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if len(reasons) != 1 or reasons[0] not in ("stop", "length"):
        raise ValueError(f"one finish_reason, stop or length, was expected, not {reasons}")
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    if len(usages) != 1:
        raise ValueError(f"one usage was expected, not {len(usages)}")
    check_usage(usages[0])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def check_usage(usage: dict[str, int]) -> None:
    """Raises ValueError if its numbers cannot be those of a completion of at most 16 tokens."""
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    if prompt < 1 or not 1 <= completion <= 16 or usage["total_tokens"] != prompt + completion:
        raise ValueError(f"the usage is wrong: {usage}")


class Gateway:
    """Asks for chat completions as a client with the gateway's own secrets."""

    def __init__(self, base_url: str, timeout: float, secrets: Path) -> None:
        self._url = f"{base_url}/v1/chat/completions"
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        keys = secrets / "api-keys" / "keys"
        if keys.is_file():
            self._headers["Authorization"] = f"Bearer {first_key(keys.read_text())}"
        self._tls = context(secrets) if base_url.startswith("https:") else None

    def ask(self, model: str, max_tokens: int, stream: bool) -> HTTPResponse:
        """The open answer. Raises OSError."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **({"model": model} if model else {}),
        }
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url, data=data, headers=self._headers)
        answer: HTTPResponse = urllib.request.urlopen(
            request, timeout=self._timeout, context=self._tls
        )
        return answer


def try_model(gateway: Gateway, model: str) -> str:
    """The text that a model streams. Raises OSError, or ValueError naming what is wrong."""
    with gateway.ask(model, 16, stream=True) as answer:
        text = check(events(answer))
    with gateway.ask(model, 512, stream=True) as answer:
        if not answer.readline().startswith(b"data:"):
            raise ValueError("a stream did not begin with an event")
    # The stream that was left must be in nobody's way.
    with gateway.ask(model, 16, stream=False) as answer:
        whole = json.load(answer)
    check_usage(whole["usage"])
    if not whole["choices"][0]["message"]["content"]:
        raise ValueError("a whole answer has no text")
    return text


def main(base_url: str, timeout: float, models: Sequence[str] = (), secrets: Path = SECRETS) -> int:
    """Tests every model; the exit status."""
    try:
        gateway = Gateway(base_url, timeout, secrets)
        for model in models or [""]:
            print(f"{model or 'the model'} streamed: {try_model(gateway, model)!r}")
    except urllib.error.HTTPError as error:
        with error:
            print(f"the gateway answered {error.code}: {error.read().decode(errors='replace')}")
        return 1
    except (OSError, ValueError) as error:
        print(f"the test failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
