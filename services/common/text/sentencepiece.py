"""Pieces of sentencepiece-style vocabularies (Llama 2, Mistral, Gemma, T5): a table from id to text
or to one byte, then the decoder's rules about the first token and about runs of bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from services.common.text.token_table import list_tokens, special_ids


@dataclass(frozen=True, slots=True)
class SentencepieceRules:
    """What a sentencepiece-style decoder does.

    `replacements` are made in each token; `drop_first` is cut from the beginning of the first;
    with `byte_fallback` tokens like <0x0A> are bytes; `strip` blanks are cut from the
    beginning of the text.
    """

    replacements: tuple[tuple[str, str], ...]
    drop_first: str = ""
    byte_fallback: bool = False
    strip: int = 0
    strip_character: str = " "


def sentencepiece_rules(decoder: Any) -> SentencepieceRules | None:
    """The rules of a decoder of this family, from its JSON; None for another one."""
    if decoder is None:
        return None
    if decoder["type"] == "Metaspace":
        mark = decoder["replacement"]
        drop = mark if decoder.get("prepend_scheme", "always") != "never" else ""
        return SentencepieceRules(((mark, " "),), drop_first=drop)
    if decoder["type"] != "Sequence":
        return None
    parts = decoder["decoders"]
    names = [part["type"] for part in parts]
    if not re.fullmatch(r"(Replace )+(ByteFallback )?Fuse (Strip )?", " ".join([*names, ""])):
        return None
    replaces = [part for part in parts if part["type"] == "Replace"]
    if any("String" not in part["pattern"] for part in replaces):
        return None
    strip: dict[str, Any] = parts[-1] if names[-1] == "Strip" else {"start": 0, "content": " "}
    if strip.get("stop"):
        return None
    return SentencepieceRules(
        tuple((part["pattern"]["String"], part["content"]) for part in replaces),
        byte_fallback="ByteFallback" in names,
        strip=strip["start"],
        strip_character=strip["content"],
    )


_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>", re.ASCII)


class SentencepiecePieces:
    """Tokens that are text, with marks for blanks, or single bytes."""

    def __init__(self, tokenizer: Tokenizer, rules: SentencepieceRules) -> None:
        self.rules = rules
        self._tokens = list_tokens(tokenizer)
        self._all = [_text_or_byte(token, rules) for token in self._tokens]
        special = special_ids(tokenizer)
        self._plain = [None if id in special else piece for id, piece in enumerate(self._all)]

    def stream(self, *, skip_special_tokens: bool) -> _SentencepieceStream:
        table = self._plain if skip_special_tokens else self._all
        return _SentencepieceStream(table, self._tokens, self.rules)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._all[token_id] if token_id < len(self._all) else None
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if piece is not None else b""


def _text_or_byte(token: str | None, rules: SentencepieceRules) -> str | int | None:
    if token is None:
        return None
    for old, new in rules.replacements:
        token = token.replace(old, new)
    match = _BYTE_TOKEN.fullmatch(token) if rules.byte_fallback else None
    return int(match[1], 16) if match else token


class _SentencepieceStream:
    """A run of byte tokens is decoded when it ends, as the decoder does it: to its
    characters if the run is UTF-8, else to one U+FFFD a byte."""

    def __init__(
        self,
        table: Sequence[str | int | None],
        tokens: Sequence[str | None],
        rules: SentencepieceRules,
    ) -> None:
        self._table = table
        self._tokens = tokens
        self._rules = rules
        self._run = bytearray()
        self._first = True
        self._strip = rules.strip

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            piece = self._table[token_id] if token_id < len(self._table) else None
            if piece is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
            elif self._first and self._rules.drop_first:
                text += (self._tokens[token_id] or "").replace(self._rules.drop_first, "")
            else:
                text += self._end_run() + piece
            self._first = False
        return self._stripped(text)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._rules.strip_character:
                self._strip = 0
            else:
                self._strip -= 1
                text = text[1:]
        return text
