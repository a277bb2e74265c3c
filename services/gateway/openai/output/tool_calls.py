"""Tool calls in a model's text, in the formats of Hermes (and Qwen) and of Llama 3.

    hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama3_json  {"name": "f", "parameters": {...}}; {...}   bare, or after <|python_tag|>

A call is announced once its name is known to be a tool's and its arguments begin; from
there they go out as they come. What only looks like a call, until it is seen to be none,
is content. Blanks between calls, and around them, are no content. What follows a false mark
is looked at again, so after MAX_FALSE_CALLS of them all is content: else an output of nothing
but marks would take time by the square of its length.

    text --opening mark--> head --name and "{"--> arguments --"}"--> tail --> text
                             '--------- no call: it is content --------------'
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.gateway.openai.output.json_end import JsonEnd
from services.gateway.openai.output.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    partial_suffix,
)


@dataclass(frozen=True, slots=True)
class Syntax:
    """How calls are set apart from text.

    With `bare`, an object at the very start, or after another call, may be a call
    without the opening mark.
    """

    opening: str
    closing: str
    bare: bool


HERMES = Syntax("<tool_call>", "</tool_call>", bare=False)
LLAMA3_JSON = Syntax("<|python_tag|>", "", bare=True)

MAX_FALSE_CALLS = 64

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.){0,256}")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NOTHING = re.compile("")
_BEFORE_BARE = re.compile(r"[\s;,]*")

State = Literal["text", "head", "arguments", "tail", "closing"]


class ToolCallParser:
    """Finds the calls of one output."""

    def __init__(self, syntax: Syntax, names: Collection[str], new_id: Callable[[], str]) -> None:
        """`names` are the tools'; a call of another is no call."""
        self.num_calls = 0
        self._num_false = 0  # marks that no call followed
        self._syntax = syntax
        self._names = names
        self._new_id = new_id
        self._state: State = "text"
        self._buffer = ""  # not yet taken apart
        self._spaces = ""  # the blanks at the end of the content, which a call swallows
        self._mark = ""  # what stands before the head: content, should it be no call
        self._at_edge = True  # at the start, or after a call
        self._scan = JsonEnd()
        self._scanned = 0  # of the buffer
        self._in_tail = False  # past its first character
        self._out: list[Piece] = []
        self._steps: Mapping[State, Callable[[], bool]] = {
            "text": self._step_text,
            "head": self._step_head,
            "arguments": self._step_arguments,
            "tail": self._step_tail,
            "closing": self._step_closing,
        }

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._state == "arguments"

    def feed(self, text: str) -> Sequence[Piece]:
        self._buffer += text
        while self._steps[self._state]():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> Sequence[Piece]:
        out: list[Piece] = []
        while self._state == "head":  # what follows its mark may hold another
            self._reject()
            out += self.feed("")
        if self._state == "text":
            after_call = self._at_edge and self.num_calls > 0
            blank = _BEFORE_BARE if self._syntax.bare and after_call else _NOTHING
            self._say(blank.sub("", self._buffer, count=1))
            if self._spaces and not (self._at_edge and self.num_calls):
                self._out.append(Content(self._spaces))
        out += self._out
        self._out = []
        self._buffer = self._spaces = ""
        return out

    # -- the states; each says whether there may be more to do

    def _step_text(self) -> bool:
        syntax = self._syntax
        if self._num_false >= MAX_FALSE_CALLS:
            text, self._buffer = self._buffer, ""
            self._say(text)
            return False
        if syntax.bare and self._at_edge and not self._step_edge():
            return self._state == "head"
        at = self._buffer.find(syntax.opening)
        if at < 0:
            held = partial_suffix(self._buffer, syntax.opening)
            self._say(self._buffer[: len(self._buffer) - held])
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        self._say(self._buffer[:at])
        self._open(at, at + len(syntax.opening))
        return True

    def _step_edge(self) -> bool:
        """Looks for a bare call. False if one may begin, or there is nothing to see yet."""
        blank = _BEFORE_BARE.match(self._buffer)
        assert blank is not None, "it matches nothing, too"
        if blank.end() == len(self._buffer):
            return False
        if self._buffer[blank.end()] == "{":
            self._open(0, blank.end())
            return False
        return True

    def _open(self, start: int, end: int) -> None:
        """A call may begin at `end`; its mark stands from `start` on."""
        self._mark = self._buffer[start:end]
        self._buffer = self._buffer[end:]
        self._scan, self._scanned = JsonEnd(), 0
        self._state = "head"

    def _step_head(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head is not None:
            name = _parsed(head[1])
            if name not in self._names:
                return self._reject()
            self._begin(name)
            self._buffer = self._buffer[head.end() :]
            self._scan, self._state = JsonEnd(), "arguments"
            return True
        start = self._buffer.lstrip()
        if start and start[0] != "{":
            return self._reject()
        end = self._scanned + self._scan.feed(self._buffer[self._scanned :])
        self._scanned = len(self._buffer)
        if not self._scan.ended:
            return False
        return self._take_whole(self._buffer[:end], end)

    def _take_whole(self, text: str, end: int) -> bool:
        """A call whose object is complete, and written in an unusual way."""
        call = _parsed(text)
        name = call.get("name", call.get("function")) if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return self._reject()
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if arguments is not None and not isinstance(arguments, dict):
            return self._reject()
        self._begin(name)
        written = json.dumps(arguments or {}, ensure_ascii=False)
        self._out.append(CallArguments(self.num_calls - 1, written))
        self._buffer = self._buffer[end:]
        self._state = "closing"
        return True

    def _step_arguments(self) -> bool:
        size = self._scan.feed(self._buffer)
        if size:
            self._out.append(CallArguments(self.num_calls - 1, self._buffer[:size]))
        self._buffer = self._buffer[size:]
        if self._scan.ended:
            self._scan, self._state = JsonEnd(depth=1), "tail"
            return True
        return False

    def _step_tail(self) -> bool:
        """The rest of a call's object, which has nothing more to tell."""
        start = self._buffer.lstrip()
        if not start:
            return False
        if self._in_tail or start[0] in ",}":
            size = self._scan.feed(self._buffer)
            self._buffer = self._buffer[size:]
            self._in_tail = not self._scan.ended
            if self._in_tail:
                return False
        self._state = "closing"
        return True

    def _step_closing(self) -> bool:
        rest, mark = self._buffer.lstrip(), self._syntax.closing
        if len(rest) < len(mark) and mark.startswith(rest):
            return False
        if mark and rest.startswith(mark):
            self._buffer = rest[len(mark) :]
        self._at_edge = True
        self._state = "text"
        return True

    # -- inside

    def _begin(self, name: str) -> None:
        self._spaces = ""
        self._in_tail = False
        self._out.append(CallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def _reject(self) -> bool:
        """It is no call: its mark is content, and so may the rest be."""
        self._num_false += 1
        self._state = "text"
        self._at_edge = False
        self._say(self._mark)
        return True

    def _say(self, text: str) -> None:
        """Content, but for the blanks at its end."""
        text = self._spaces + text
        said = text.rstrip()
        self._spaces = text[len(said) :]
        if said:
            self._at_edge = False
            self._out.append(Content(said))


def _parsed(text: str) -> Any:
    """A JSON value; None if the text is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
