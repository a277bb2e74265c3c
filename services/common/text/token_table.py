"""What a tokenizer says of its single tokens."""

from __future__ import annotations

from tokenizers import Tokenizer


def list_tokens(tokenizer: Tokenizer) -> list[str | None]:
    """Each id's token, None where an id has none."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of control tokens, which `skip_special_tokens` leaves out of texts."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)
