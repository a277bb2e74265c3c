"""Token ids to text, piece by piece, so that the joined pieces are the one-shot decode.

Three ways, by what the tokenizer's decoder is made of:

- byte level (GPT-2, Llama 3, Qwen, SmolLM): a table from id to bytes, then
  incremental UTF-8;
- sentencepiece style (Llama 2, Mistral, Gemma, T5): a table from id to text or to one
  byte, then the decoder's rules about the first token and about runs of bytes;
- anything else: `tokenizers.decoders.DecodeStream`.

Each text has a stream object of its own; the tables are shared. Nothing here knows of
stop strings or sessions.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class PieceStream(Protocol):
    """The text of one list of ids, as it grows."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is settled by these ids. Ids without a token have none."""
        ...

    def flush(self) -> str:
        """What was held back: the end of the text. Nothing may be pushed after."""
        ...


class Pieces(Protocol):
    """A tokenizer's decoder."""

    def stream(self, *, skip_special_tokens: bool) -> PieceStream: ...

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, perhaps part of a character; empty if there is no such id."""
        ...


def build_pieces(tokenizer: Tokenizer) -> Pieces:
    """Chooses the way that fits the tokenizer's decoder."""
    decoder = json.loads(tokenizer.to_str())["decoder"] if tokenizer.decoder else None
    if decoder is not None and decoder["type"] == "ByteLevel":
        return BytePieces(tokenizer)
    rules = sentencepiece_rules(decoder)
    if rules is not None:
        return SentencepiecePieces(tokenizer, rules)
    return OtherPieces(tokenizer)


# --- byte level


@dataclass(frozen=True, slots=True)
class _ByteTable:
    """Each id's bytes, and its text where the bytes are whole characters (else None)."""

    pieces: list[bytes]
    texts: list[str | None]

    @classmethod
    def of(cls, pieces: list[bytes]) -> _ByteTable:
        return cls(pieces, [_whole_text(piece) for piece in pieces])


class BytePieces:
    """Byte-level BPE: every token is a string of bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        alphabet = byte_alphabet()
        special = _special_ids(tokenizer)
        pieces = [_token_bytes(token, alphabet) for token in _tokens(tokenizer)]
        self._all = _ByteTable.of(pieces)
        self._plain = _ByteTable(
            [b"" if id in special else piece for id, piece in enumerate(pieces)],
            ["" if id in special else text for id, text in enumerate(self._all.texts)],
        )

    def stream(self, *, skip_special_tokens: bool) -> PieceStream:
        return _ByteStream(self._plain if skip_special_tokens else self._all)

    def token_bytes(self, token_id: int) -> bytes:
        return self._all.pieces[token_id] if token_id < len(self._all.pieces) else b""


class _ByteStream:
    __slots__ = ("_pieces", "_rest", "_texts")

    def __init__(self, table: _ByteTable) -> None:
        self._pieces = table.pieces
        self._texts = table.texts
        self._rest = b""  # the beginning of a character

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        try:
            if len(token_ids) == 1 and not self._rest:
                text = self._texts[token_ids[0]]
                if text is not None:
                    return text
            data = b"".join([self._rest, *[pieces[token_id] for token_id in token_ids]])
        except IndexError:  # an id of a padded embedding row, which no token has
            return self.push([token_id for token_id in token_ids if token_id < len(pieces)])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._rest, "replace", True)
        self._rest = b""
        return text


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (GPT-2's table):
    printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _token_bytes(token: str | None, alphabet: dict[str, int]) -> bytes:
    """As the ByteLevel decoder has it: a token with a character outside the alphabet,
    which an added token may have, is plain text."""
    if token is None:
        return b""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


# --- sentencepiece style


@dataclass(frozen=True, slots=True)
class SentencepieceRules:
    """What a sentencepiece-style decoder does.

    `space` is replaced by a blank, or in the first token dropped if `drop_first`;
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
        self._tokens = _tokens(tokenizer)
        self._all = [_text_or_byte(token, rules) for token in self._tokens]
        special = _special_ids(tokenizer)
        self._plain = [None if id in special else piece for id, piece in enumerate(self._all)]

    def stream(self, *, skip_special_tokens: bool) -> PieceStream:
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


# --- anything else


class OtherPieces:
    """Whatever the library can decode, by its own stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def stream(self, *, skip_special_tokens: bool) -> PieceStream:
        return _LibraryStream(self._tokenizer, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class _LibraryStream:
    """DecodeStream has no end and gives up on texts whose beginning changes; the
    one-shot decode at the end makes the text whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decode: Callable[[list[int]], str] = lambda token_ids: tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens
        )
        self._tokenizer = tokenizer
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._sent = 0

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            text += self._step(token_id)
        self._sent += len(text)
        return text

    def flush(self) -> str:
        return self._decode(self._token_ids)[self._sent :]

    def _step(self, token_id: int) -> str:
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # the library raises no narrower class
            if type(error) is not Exception:
                raise
            self._stream = None
            return ""


def _tokens(tokenizer: Tokenizer) -> list[str | None]:
    """Each id's token, None where an id has none."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)
