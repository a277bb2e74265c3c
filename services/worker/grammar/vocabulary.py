"""The model's vocabulary as the grammar library wants it: each id's bytes.

Those of the worker's own model files, the same that the tokenizer service reads, so that
what a matcher counts as text is what the detokenizer will write.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from services.common.errors import StartupError, Unsupported
from services.common.model_metadata import ModelMetadata
from services.common.text.library_pieces import LibraryPieces
from services.common.text.pieces import Pieces, build_pieces
from services.common.text.vocabulary import Vocabulary, build_vocabulary


def load_vocabulary(model: str) -> LLTokenizer:
    """The vocabulary of a model named as for `--model`; takes a fraction of a second.

    Raises Unsupported if the model cannot be held to a grammar.
    """
    try:
        vocabulary = build_vocabulary(model)
    except StartupError as error:
        raise Unsupported(
            f"This model has no usable tokenizer for a grammar: {error}.", param="grammar"
        )
    metadata = vocabulary.metadata
    pieces = build_pieces(vocabulary.tokenizer)
    if isinstance(pieces, LibraryPieces):
        raise Unsupported(
            "This model's tokens are not strings of bytes, as a grammar needs them.",
            param="grammar",
        )
    if not metadata.eos_token_ids:
        raise Unsupported(
            "This model names no end-of-sequence token, so no grammar can end.", param="grammar"
        )
    tokens = _Tokens(vocabulary, pieces, metadata)
    library = LLTokenizer(
        TokenizerWrapper(tokens),
        n_vocab=metadata.vocab_size,
        eos_token=sorted(metadata.eos_token_ids),
    )
    tokens.library = library
    return library


class _Tokens:
    """What llguidance's wrapper reads, and calls to spell text that a grammar forces.

    Where the next bytes are settled the library allows the one token that the tokenizer
    would write, which keeps the model on the spellings that it was trained with.
    """

    def __init__(self, vocabulary: Vocabulary, pieces: Pieces, metadata: ModelMetadata) -> None:
        # Rows of the embedding beyond the tokenizer's ids have no bytes and are never allowed.
        self.tokens = [pieces.token_bytes(token_id) for token_id in range(metadata.vocab_size)]
        self.special_token_ids = sorted(metadata.special_token_ids | metadata.eos_token_ids)
        self.eos_token_id = min(metadata.eos_token_ids)
        self.bos_token_id = metadata.bos_token_id
        self.library: LLTokenizer | None = None  # set when it is made of this
        self._tokenizer = vocabulary.tokenizer
        self._tokenizer.encode_special_tokens = True  # text like a control token is text

    def __call__(self, text: bytes) -> Sequence[int]:
        """Ids whose bytes are the text: the tokenizer's, where those are (it may add a blank
        at the start, or normalise), else the longest tokens from the left."""
        if self.library is None:
            return []  # the wrapper only tries whether it may pass bytes
        string = text.decode()
        ids: list[int] = self._tokenizer.encode(string, add_special_tokens=False).ids
        if b"".join(self.tokens[token_id] for token_id in ids) == text:
            return ids
        return self.library.greedy_tokenize(string)
