"""Bodies that a hostile or broken client might send, drawn from a seed.

`Fuzzer.draw` takes a valid body, spoils it in one to three places, and now and then spoils its
bytes too. Knows the endpoints by their valid bodies alone, and judges no answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
Spoil = Callable[[Any, random.Random], Path]

_TURNS = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}

VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": _TURNS, "max_tokens": 4}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_completion_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 2,
            "seed": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["x", "yy"],
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"65": 5},
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": _TURNS, "tools": [_TOOL], "tool_choice": "required", "max_tokens": 8},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": _TURNS,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": _SCHEMA},
            },
            "max_tokens": 8,
        },
    ),
    ("/v1/completions", {"prompt": "once", "max_tokens": 4, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [[72, 105], [72]], "max_tokens": 2, "stream": True, "n": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "stream": True}),
    ("/generate", {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}),
    ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": _TURNS, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [72, 105]}),
)

_WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 129, 1e308, -1e-300, 2**31, 2**32, 2**63, 2**64, -(2**63)),
    *("", "x", "\0", "\ud800", "null", "ten", "\u202e", "‮", "é" * 50, "data: [DONE]\n\n"),
    *([], [[]], [None], [0], ["x"], [{}], [{"role": "user"}], [2**40], [-1], [1.5]),
    *({}, {"a": None}, {"type": "x"}, {"role": []}, {"-1": 1}, {"x": 1}, {"999999999": 1}),
)
_RAW_WORDS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" * 400, b"-0", b"0x10", b"truely")
_HEADERS: tuple[tuple[str, str], ...] = (
    ("x-request-timeout", "nan"),
    ("x-request-timeout", "0.01"),
    ("x-request-timeout", "-1"),
    ("x-request-timeout", "1e400"),
    ("x-request-id", "a" * 2000),
    ("x-request-id", "%s {} ;,"),
    ("traceparent", "00-" + "z" * 32 + "-1-1"),
    ("content-type", "text/plain"),
    ("content-type", "application/json; charset=utf-16"),
    ("accept", "application/xml"),
    ("authorization", "Bearer nobody's"),
    ("content-encoding", "gzip"),
)
_LARGE = 10_000_000  # characters, about the largest text or list drawn
_DEPTH = 2_000


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to send; `how` says what was done to it."""

    path: str
    body: bytes
    headers: dict[str, str]
    how: str


class Fuzzer:
    """Draws requests; equal seeds draw equal ones."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def draw(self) -> Shot:
        rng = self._rng
        path, valid = rng.choice(VALID)
        body: Any = _copy(valid)
        done: list[str] = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            spoil: Spoil = rng.choice((_replace, _replace, _replace, _remove, _add, _repeat, _nest))
            if rng.random() < 0.004:
                spoil = _inflate
            if body:
                done.append(f"{spoil.__name__}{spoil(body, rng)}")
        raw = json.dumps(body, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
        if rng.random() < 0.2:
            spoil_bytes = rng.choice((_flip, _cut, _splice_word, _double_key, _noise, _wrap))
            raw = spoil_bytes(raw, rng)
            done.append(spoil_bytes.__name__)
        headers = {"content-type": "application/json"}
        if rng.random() < 0.15:
            name, value = rng.choice(_HEADERS)
            headers[name] = value
            done.append(name)
        return Shot(path, raw, headers, " ".join(done))


# -- what is done to values: each changes the body and says where


def _copy(value: Any) -> Any:
    """What is spoiled must not be what the next request is drawn from."""
    return json.loads(json.dumps(value))


def _replace(body: Any, rng: random.Random) -> Path:
    at = rng.choice(list(_paths(body)))
    _set(body, at, _copy(rng.choice(_WRONG_VALUES)))
    return at


def _remove(body: Any, rng: random.Random) -> Path:
    at = rng.choice(list(_paths(body)))
    del _parent(body, at)[at[-1]]
    return at


def _add(body: Any, rng: random.Random) -> Path:
    """A field of another endpoint, or one that no endpoint knows."""
    _, other = rng.choice(VALID)
    name = rng.choice([*other, "guided_regex", "best_of", "suffix", "__proto__", "", "\ud800"])
    body[name] = _copy(other.get(name, rng.choice(_WRONG_VALUES)))
    return (name,)


def _repeat(body: Any, rng: random.Random) -> Path:
    """A list becomes long."""
    lists = [at for at in _paths(body) if isinstance(_get(body, at), list) and _get(body, at)]
    if not lists:
        return ()
    at = rng.choice(lists)
    text = json.dumps(_get(body, at))
    times = min(rng.choice((2, 20, 300)), _LARGE // len(text) + 1)
    _set(body, at, [item for _ in range(times) for item in json.loads(text)])
    return at


def _nest(body: Any, rng: random.Random) -> Path:
    """A value becomes a deep one. json.dumps itself would not go as deep: see `_wrap`."""
    at = rng.choice(list(_paths(body)))
    value: Any = _get(body, at)
    for _ in range(rng.choice((3, 70, 300))):
        value = [value] if rng.random() < 0.5 else {"items": value}
    _set(body, at, value)
    return at


def _inflate(body: Any, rng: random.Random) -> Path:
    texts = [at for at in _paths(body) if isinstance(_get(body, at), str)]
    if not texts:
        return ()
    at = rng.choice(texts)
    _set(body, at, rng.choice("a\0é<") * rng.choice((100_000, _LARGE)))
    return at


# -- what is done to bytes


def _flip(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]


def _cut(raw: bytes, rng: random.Random) -> bytes:
    return raw[: rng.randrange(len(raw))]


def _splice_word(raw: bytes, rng: random.Random) -> bytes:
    """A word that JSON does not know, or hardly knows, in place of a value."""
    colons = [at for at, byte in enumerate(raw[:10_000]) if byte == ord(":")]
    if not colons:
        return raw
    at = rng.choice(colons)
    end = min((raw.find(mark, at) % (len(raw) + 1) for mark in (b",", b"}")), default=at)
    return raw[: at + 1] + rng.choice(_RAW_WORDS) + raw[end:]


def _double_key(raw: bytes, rng: random.Random) -> bytes:
    name = rng.choice((b"messages", b"prompt", b"max_tokens", b"model", b"stream"))
    return raw[:-1] + b',"' + name + b'":' + rng.choice((b"null", b"{}", b"3", b'"x"')) + b"}"


def _noise(raw: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 30, 5_000)))


def _wrap(raw: bytes, rng: random.Random) -> bytes:
    opening, closing = rng.choice(((b"[", b"]"), (b'{"messages":', b"}"), (b'{"a":', b"}")))
    return opening * _DEPTH + raw + closing * _DEPTH


# -- places in a body


def _paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place below the top."""
    keys: Any = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield (*at, key)
        if isinstance(value[key], dict | list) and len(at) < 8:
            yield from _paths(value[key], (*at, key))


def _parent(body: Any, at: Path) -> Any:
    for key in at[:-1]:
        body = body[key]
    return body


def _get(body: Any, at: Path) -> Any:
    return _parent(body, at)[at[-1]]


def _set(body: Any, at: Path, value: Any) -> None:
    _parent(body, at)[at[-1]] = value
