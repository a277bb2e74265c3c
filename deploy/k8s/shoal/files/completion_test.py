"""What `helm test` runs: streams one completion and checks its end and its usage.

Needs only the standard library. Called with the gateway's base URL and a time limit
in seconds; exits 0, or 1 after one sentence.
"""

import json
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
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
    prompt, completion = usages[0]["prompt_tokens"], usages[0]["completion_tokens"]
    if prompt < 1 or not 1 <= completion <= 16 or usages[0]["total_tokens"] != prompt + completion:
        raise ValueError(f"the usage is wrong: {usages[0]}")
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def main(base_url: str, timeout: float, secrets: Path = SECRETS) -> int:
    """Streams a chat completion of at most 16 tokens from the gateway."""
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        keys = secrets / "api-keys" / "keys"
        if keys.is_file():
            request.add_header("Authorization", f"Bearer {first_key(keys.read_text())}")
        tls = context(secrets) if base_url.startswith("https:") else None
        with urllib.request.urlopen(request, timeout=timeout, context=tls) as response:
            text = check(events(response))
    except urllib.error.HTTPError as error:
        with error:
            print(f"the gateway answered {error.code}: {error.read().decode(errors='replace')}")
        return 1
    except (OSError, ValueError) as error:
        print(f"the test failed: {error}")
        return 1
    print(f"streamed: {text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
