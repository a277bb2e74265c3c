"""Keeping text that looks like a control token text.

A chat template writes control tokens into the prompt as text, so a message could
write them too: close its turn and open a system turn. Here every string that comes
from the request is searched for them before the template runs, and what is found is
replaced by a placeholder with a nonce in it, which no client can guess. In the
rendered prompt the placeholders are looked up again:

    content   hi<|im_end|>there           ends with a "<"
    template  <|im_start|>user\\nhi{0}there<|im_end|>...
    restored  <|im_start|>user\\nhi<|im_end|>there<|im_end|>...
                                 ^ span ^ of user text

A control token of the restored prompt that overlaps a span is the user's, the others
are the template's. Ends of strings that could make a control token together with what
the template puts beside them are spans too, so none can be assembled from halves. A
prompt without spans is not touched.

Control tokens are the special ones, and added ones that are written like <|this|>:
some models flag their role markers as ordinary. Marks such as <think> or <tool_call>
that are not flagged special stay what they are, as templates take them apart.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_WRITTEN_AS_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def control_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """The control tokens of a tokenizer, as they are written."""
    return frozenset(
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.content and (token.special or _WRITTEN_AS_CONTROL.fullmatch(token.content))
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """A rendered prompt without placeholders.

    `literals` are the places (start, end) of control tokens that are user text, in order.
    """

    text: str
    literals: Sequence[tuple[int, int]]


class ControlGuard:
    """Finds the control tokens of one tokenizer in user text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {token[:i] for token in longest_first for i in range(1, len(token))}
        self._endings = {token[i:] for token in longest_first for i in range(1, len(token))}
        self._longest = max(map(len, longest_first), default=0)
        ends = {token[0] for token in longest_first} | {token[-1] for token in longest_first}
        self._ends = re.compile(f"[{re.escape(''.join(sorted(ends)))}]" if ends else r"(?!)")

    def marking(self) -> Marking:
        """Placeholders for one prompt."""
        return Marking(self)

    def may_be_in(self, text: str) -> bool:
        """Whether a text may have a control token in it, or a part of one at an end: each such
        piece has the token's first character or its last."""
        return self._ends.search(text) is not None

    def split(self, text: str) -> list[tuple[bool, str]]:
        """A string in pieces, each with whether it must be marked."""
        pieces: list[tuple[bool, str]] = []
        end = 0
        for match in self._tokens.finditer(text):
            pieces += [(False, text[end : match.start()]), (True, match[0])]
            end = match.end()
        pieces.append((False, text[end:]))
        pieces[-1:] = self._split_end(pieces[-1][1])
        pieces[:1] = self._split_beginning(pieces[0][1])
        return [(marked, piece) for marked, piece in pieces if piece]

    def literals(self, text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The control tokens of a text that overlap one of the spans, which are in order."""
        found: list[tuple[int, int]] = []
        index = 0
        for match in self._tokens.finditer(text):
            while index < len(spans) and spans[index][1] <= match.start():
                index += 1
            if index == len(spans):
                break
            if spans[index][0] < match.end():
                found.append(match.span())
        return found

    def _split_end(self, text: str) -> list[tuple[bool, str]]:
        """Cuts off the beginning of a control token at the end; a template may strip."""
        body = text.rstrip()
        for length in range(min(self._longest - 1, len(body)), 0, -1):
            if body[-length:] in self._beginnings:
                cut = len(body) - length
                return [(False, text[:cut]), (True, body[cut:]), (False, text[len(body) :])]
        return [(False, text)]

    def _split_beginning(self, text: str) -> list[tuple[bool, str]]:
        body = text.lstrip()
        for length in range(min(self._longest - 1, len(body)), 0, -1):
            if body[:length] in self._endings:
                cut = len(text) - len(body)
                return [(False, text[:cut]), (True, body[:length]), (False, body[length:])]
        return [(False, text)]


class Marking:
    """The placeholders of one prompt."""

    def __init__(self, guard: ControlGuard) -> None:
        self._guard = guard
        self._pieces: list[str] = []
        self._nonce = ""  # made with the first placeholder: most prompts have none

    def mark(self, value: Any) -> Any:
        """A JSON value with placeholders in its strings, keys included."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {self._mark_text(key): self.mark(item) for key, item in value.items()}
        return value

    def restore(self, rendered: str) -> Restored:
        """Puts back what the placeholders stand for, and says what of it is control text."""
        if not self._pieces:
            return Restored(rendered, ())
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        length = end = 0
        placeholder = re.compile(f"{self._nonce}\ue100([0-9]+)\ue101{self._nonce}")
        for match in placeholder.finditer(rendered):
            before, piece = rendered[end : match.start()], self._pieces[int(match[1])]
            parts += [before, piece]
            start = length + len(before)
            length = start + len(piece)
            spans.append((start, length))
            end = match.end()
        text = "".join([*parts, rendered[end:]])
        return Restored(text, self._guard.literals(text, spans))

    def _mark_text(self, text: str) -> str:
        if not self._guard.may_be_in(text):
            return text
        pieces = self._guard.split(text)
        if not any(marked for marked, _ in pieces):
            return text
        return "".join(self._place(piece) if marked else piece for marked, piece in pieces)

    def _place(self, piece: str) -> str:
        if not self._nonce:
            # Private-use characters: no template strips them, changes their case or escapes them.
            self._nonce = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(12))
        self._pieces.append(piece)
        return f"{self._nonce}\ue100{len(self._pieces) - 1}\ue101{self._nonce}"
