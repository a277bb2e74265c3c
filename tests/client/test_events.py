"""Event streams: bytes to chunks, wherever the pieces are cut."""

from __future__ import annotations

import pytest

from services.client.endpoint import ApiError
from services.client.events import EventSplitter, decode_chunk

STREAM = (
    b': keep-alive\n\ndata: {"a": 1}\n\ndata:{"b": 2}\n\n'
    b'event: x\nid: 3\ndata: {"c":\ndata:  3}\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b'{"c":\n 3}', b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_wherever_the_bytes_are_cut(line_end: bytes, size: int) -> None:
    stream = STREAM.replace(b"\n", line_end)
    splitter = EventSplitter()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [event for piece in pieces for event in splitter.feed(piece)] == EVENTS


def test_a_last_event_without_its_empty_line_is_found_at_the_end() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: [DONE]\n") == []
    assert splitter.close() == [b"[DONE]"]


@pytest.mark.parametrize(
    ("data", "said", "thought", "has_output"),
    [
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', "", "", False),
        (b'{"choices":[{"delta":{"content":"a"},"logprobs":{"x":[1]}}]}', "a", "", True),
        (b'{"choices":[{"text":"a","index":0}]}', "a", "", True),
        (b'{"choices":[{"delta":{"reasoning_content":"a"}}]}', "", "a", True),
        (b'{"choices":[{"delta":{"reasoning":"a","content":null}}]}', "", "a", True),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', "", "", True),
        (b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', "", "", False),
    ],
)
def test_what_a_chunk_holds(data: bytes, said: str, thought: str, has_output: bool) -> None:
    (choice,) = decode_chunk(data).choices
    assert (choice.said, choice.thought, choice.has_output) == (said, thought, has_output)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'{"error":{"message":"the worker was lost","type":"server_error"}}', "worker was lost"),
        (b'{"error":"overloaded"}', "overloaded"),
        (b'{"error":{}}', "the server failed"),
        (b"{oops", "no chunk: {oops"),
        (b'{"choices":7}', "no chunk"),
    ],
)
def test_what_is_no_chunk_is_an_error(data: bytes, sentence: str) -> None:
    with pytest.raises(ApiError, match=sentence):
        decode_chunk(data)
