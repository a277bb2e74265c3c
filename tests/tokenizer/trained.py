"""Small tokenizers, made or trained on the spot, of every kind that Shoal decodes."""

from __future__ import annotations

import json

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a stream of tokens is a stream of bytes, said the tokenizer",
    "从前有一个小村庄 émoji 🙂 naïve café",
    "def f(x):\n    return x ** 2\n",
] * 8
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    """GPT-2's kind, with added tokens that are awkward to decode."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Within the byte alphabet, outside of it, and across both.
    tokenizer.add_tokens([AddedToken(text) for text in ("<think>", "é<a>", " spaced out ", "的")])
    return tokenizer


def llama_style() -> Tokenizer:
    """Llama 2's kind: BPE over blanks as marks, bytes where there is no token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    specials = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    tokenizer = _only_special(tokenizer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def _only_special(tokenizer: Tokenizer) -> Tokenizer:
    """Keeps of the added tokens those in SPECIAL: byte tokens are ordinary ones."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(state))


def metaspace() -> Tokenizer:
    """T5's kind: a unigram model whose decoder drops the mark of the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("▁▁x▁")])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind, which has no tables here and goes through the library."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
