"""The floor under a text's tokens: never above their number, and absent where it might be."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from services.common.text.byte_level import byte_alphabet
from services.common.text.vocabulary import build_vocabulary
from services.tokenizer.token_floor import TokenFloor
from tests.tokenizer import trained
from tests.tokenizer.gguf_files import write_gguf


@functools.cache
def smollm() -> Tokenizer:
    return build_vocabulary("").tokenizer


@functools.cache
def byte() -> Tokenizer:
    return build_vocabulary("byte").tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    return trained.byte_level()


@functools.cache
def llama_style() -> Tokenizer:
    return trained.llama_style()


@functools.cache
def qwen_style() -> Tokenizer:
    """Composed before it is cut; some compositions are a word of the vocabulary."""
    tokenizer = trained.byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@functools.cache
def dropping() -> Tokenizer:
    """Knows two letters, and all else is one unknown token however much it is."""
    vocab = {character: i for i, character in enumerate(["a", "Ġ", "aa", "<unk>"])}
    tokenizer = Tokenizer(BPE(vocab, [("a", "a")], unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def longest_words(tokenizer: Tokenizer) -> list[str]:
    """The longest tokens' texts, of which a text has the fewest tokens."""
    words = sorted(tokenizer.get_vocab(), key=len)[-40:]
    alphabet = byte_alphabet()
    return [
        bytes(alphabet[c] for c in word).decode(errors="ignore")
        if all(c in alphabet for c in word)
        else word.replace("▁", " ")
        for word in words
    ]


AWKWARD = [
    *(
        "\u212a",
        "\u1fef",
        "\u1fbe\u0308\u0301",
        "\u1100\u1161\u11a8",
        "e\u0301",
        "α\u0313\u0301\u0345",
        "Å",
    ),
    *("\x04", "\x1d", "\U00040000", "\U0001f642", "的", " ", "   ", "\n\n", "\t", "\xa0"),
    *("<think>", "é<a>", " spaced out ", "<s>", "</s>", "<|im_end|>", "a", "aa", "é"),
]


@pytest.mark.parametrize(
    "make", [smollm, byte, byte_level, llama_style, qwen_style, dropping], ids=lambda f: f.__name__
)
def test_no_text_has_fewer_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    floor = TokenFloor.of(tokenizer)
    assert floor is not None
    pieces = st.sampled_from([*AWKWARD, *longest_words(tokenizer)]) | st.text(max_size=8)

    @settings(max_examples=150, deadline=None)
    @example(["<think>"] * 50)
    @example([" spaced out "] * 50)
    @example(["\u212a"] * 50)
    @example(["\x04"] * 50)
    @example(longest_words(tokenizer)[-1:] * 20)
    @given(st.lists(pieces, max_size=30))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        assert floor.least(text) <= len(tokenizer.encode(text, add_special_tokens=False))

    check()


def test_the_floor_is_what_the_longest_token_makes_it() -> None:
    floor = TokenFloor.of(byte())
    assert floor == TokenFloor(len("<bos>"))
    assert [floor.least("é" * n) for n in (0, 1, 5, 6)] == [0, 1, 2, 3]
    embedded = TokenFloor.of(smollm())
    assert embedded is not None
    assert embedded.longest == 81  # a line end and eighty blanks
    assert embedded.least("a " * 81) == 2
    assert embedded.least("\x04" * 1000) == 0  # for which it has no token
    composing = TokenFloor.of(qwen_style())
    assert composing is not None
    length = composing.longest
    assert (composing.least("a" * 3 * length), composing.least("é" * 4 * length)) == (3, 2)


def test_composition_shrinks_no_text_more_than_fourfold() -> None:
    apart = functools.partial(unicodedata.normalize, "NFD")
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    changed = [character for character in characters if apart(character) != character]
    # The most bytes that stand for a part of a character that is taken apart.
    longest = {part: len(part.encode()) for character in changed for part in apart(character)}
    for character in changed:
        part = apart(character)
        if len(part) == 1:
            longest[part] = max(longest[part], len(character.encode()))
    shrinks = 0.0
    for character in changed:
        size = len(character.encode())
        parts = sum(longest[part] for part in apart(character))
        assert size <= parts  # so that a text has at most its parts' bytes
        shrinks = max(shrinks, parts / size)
    for part, size in longest.items():
        shrinks = max(shrinks, size / len(part.encode()))
    assert shrinks == 3.5
    text = "\u1fbe\u0308\u0301" * 100
    assert len(text.encode()) == 3.5 * len(unicodedata.normalize("NFC", text).encode())


def _lossy(change: Callable[[Tokenizer], object]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    change(tokenizer)
    return tokenizer


def _set(name: str, value: object) -> Callable[[Tokenizer], object]:
    return lambda tokenizer: setattr(tokenizer, name, value)


@pytest.mark.parametrize(
    "change",
    [
        _set("normalizer", normalizers.NFKC()),
        _set("normalizer", normalizers.Strip()),
        _set("normalizer", normalizers.Lowercase()),
        _set("normalizer", normalizers.Replace("  ", " ")),
        _set("normalizer", normalizers.Replace(Regex(" +"), "▁")),
        _set("normalizer", normalizers.Sequence([normalizers.Prepend("▁"), normalizers.NFC()])),
        _set("pre_tokenizer", pre_tokenizers.Whitespace()),
        _set(
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            ),
        ),
        _set("pre_tokenizer", None),  # then the model drops what it has no token for
        lambda tokenizer: tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)]),
        lambda tokenizer: tokenizer.add_tokens([AddedToken("<mask>", rstrip=True)]),
    ],
)
def test_a_tokenizer_that_may_lose_text_has_no_floor(
    change: Callable[[Tokenizer], object],
) -> None:
    assert TokenFloor.of(_lossy(lambda tokenizer: None)) is not None
    assert TokenFloor.of(_lossy(change)) is None


def test_models_that_know_whole_words_have_no_floor() -> None:
    assert TokenFloor.of(trained.word_piece()) is None
    assert TokenFloor.of(trained.metaspace()) is None


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_every_rule_of_a_gguf_file_has_a_floor(tmp_path: Path, rule: str) -> None:
    vocabulary = build_vocabulary(str(write_gguf(tmp_path / "model.gguf", rule)))
    assert TokenFloor.of(vocabulary.tokenizer) is not None
