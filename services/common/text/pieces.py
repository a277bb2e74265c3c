"""Token ids to text, piece by piece, so that the joined pieces are the one-shot decode.

The way depends on what the tokenizer's decoder is made of: `byte_level`, `sentencepiece`, or for
anything else `library_pieces`. Each text has a stream object of its own; the tables are shared.
Nothing here knows of stop strings or sessions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from services.common.text.byte_level import BytePieces
from services.common.text.library_pieces import LibraryPieces
from services.common.text.sentencepiece import SentencepiecePieces, sentencepiece_rules


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
    return LibraryPieces(tokenizer)
