"""The output of a response: items made of pieces, and the events that tell of them.

    reasoning      Reasoning pieces in a row      reasoning_text deltas
    message        Content pieces in a row        output_text deltas
    function_call  CallStart and its arguments    function_call_arguments deltas

One item is open at a time; the next piece of another kind closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from services.gateway.ids import new_id
from services.gateway.openai.output.pieces import CallStart, Content, Piece, Reasoning

Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class OutputItems:
    """The items of one output; each call gives the events that it leads to."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, piece: Piece, logprobs: Sequence[Any] = ()) -> list[Event]:
        """Takes in the next piece; the log-probabilities are those of a Content's tokens."""
        if isinstance(piece, CallStart):
            return self._start_call(piece)
        if isinstance(piece, Content):
            events = self._ensure("message")
            return [*events, self._add_text("output_text", piece.text, logprobs)]
        if isinstance(piece, Reasoning):
            events = self._ensure("reasoning")
            return [*events, self._add_text("reasoning_text", piece.text)]
        assert self._open is not None, "a call has begun"
        self._open["arguments"] += piece.text
        return [self._event("function_call_arguments.delta", delta=piece.text)]

    def finish(self, status: Status) -> list[Event]:
        """Closes what is open. An output without any text is one empty message."""
        events = [] if self.items else self._ensure("message")
        return [*events, *self._close(status)]

    def _ensure(self, kind: Literal["message", "reasoning"]) -> list[Event]:
        """The events that open an item of a kind, if another is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        closing = self._close("completed")
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item = {"id": _new_id("msg"), **item, "role": "assistant"}
            part: dict[str, Any] = {
                "type": "output_text",
                "text": "",
                "annotations": [],
                "logprobs": [],
            }
        else:
            item = {"id": _new_id("rs"), **item, "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        added = self._add_item(item)
        item["content"] = [part]
        shown = {**part}
        return [*closing, added, self._event("content_part.added", content_index=0, part=shown)]

    def _start_call(self, piece: CallStart) -> list[Event]:
        closing = self._close("completed")
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": piece.id,
            "name": piece.name,
            "arguments": "",
        }
        return [*closing, self._add_item(item)]

    def _add_item(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        self._open = item
        index = len(self.items) - 1
        # Copied, since the item goes on changing.
        return {"type": "response.output_item.added", "output_index": index, "item": {**item}}

    def _add_text(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> Event:
        assert self._open is not None, "an item was opened for it"
        part = self._open["content"][0]
        part["text"] += text
        fields: Event = {"content_index": 0, "delta": text}
        if kind == "output_text":
            part["logprobs"].extend(logprobs)
            fields["logprobs"] = list(logprobs)
        return self._event(f"{kind}.delta", **fields)

    def _close(self, status: Status) -> list[Event]:
        """The events that close the open item."""
        item = self._open
        if item is None:
            return []
        calls = item["type"] == "function_call"
        events = [self._call_done(item)] if calls else self._text_done(item)
        item["status"] = status
        index = len(self.items) - 1
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        self._open = None
        return events

    def _call_done(self, item: dict[str, Any]) -> Event:
        return self._event(
            "function_call_arguments.done", name=item["name"], arguments=item["arguments"]
        )

    def _text_done(self, item: dict[str, Any]) -> list[Event]:
        part = item["content"][0]
        fields: Event = {"content_index": 0, "text": part["text"]}
        if part["type"] == "output_text":
            fields["logprobs"] = part["logprobs"]
        return [
            self._event(f"{part['type']}.done", **fields),
            self._event("content_part.done", content_index=0, part=part),
        ]

    def _event(self, name: str, /, **fields: Any) -> Event:
        """An event about the open item."""
        assert self._open is not None, "it tells of one"
        index = len(self.items) - 1
        about = {"item_id": self._open["id"], "output_index": index}
        return {"type": f"response.{name}", **about, **fields}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{new_id()}"
