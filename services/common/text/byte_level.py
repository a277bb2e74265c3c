"""Pieces of byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM): a table from id to bytes, then
incremental UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from services.common.text.token_table import list_tokens, special_ids


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
        special = special_ids(tokenizer)
        pieces = [_token_bytes(token, alphabet) for token in list_tokens(tokenizer)]
        self._all = _ByteTable.of(pieces)
        self._plain = _ByteTable(
            [b"" if id in special else piece for id, piece in enumerate(pieces)],
            ["" if id in special else text for id, text in enumerate(self._all.texts)],
        )

    def stream(self, *, skip_special_tokens: bool) -> _ByteStream:
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
