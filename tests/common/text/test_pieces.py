"""The joined stream equals the library's one-shot decode, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.common.text.byte_level import BytePieces
from services.common.text.library_pieces import LibraryPieces
from services.common.text.pieces import Pieces, build_pieces
from services.common.text.sentencepiece import SentencepiecePieces, sentencepiece_rules
from services.common.text.vocabulary import build_vocabulary
from tests.tokenizer import trained

MADE: dict[str, Callable[[], Tokenizer]] = {
    "smollm": lambda: build_vocabulary("").tokenizer,
    "byte": lambda: build_vocabulary("byte").tokenizer,
    "byte_level": trained.byte_level,
    "llama_style": trained.llama_style,
    "metaspace": trained.metaspace,
    "word_piece": trained.word_piece,
}
KINDS = {
    "smollm": BytePieces,
    "byte": BytePieces,
    "byte_level": BytePieces,
    "llama_style": SentencepiecePieces,
    "metaspace": SentencepiecePieces,
    "word_piece": LibraryPieces,
}

Kind = tuple[Tokenizer, Pieces, int]  # the last token's id


@pytest.fixture(scope="module", params=MADE)
def kind(request: pytest.FixtureRequest) -> Kind:
    tokenizer = MADE[request.param]()
    pieces = build_pieces(tokenizer)
    assert isinstance(pieces, KINDS[request.param])
    return tokenizer, pieces, max(tokenizer.get_vocab().values())


def streamed(pieces: Pieces, ids: list[int], cuts: list[int], skip: bool) -> str:
    """The joined text of a stream fed in chunks of the given sizes."""
    stream = pieces.stream(skip_special_tokens=skip)
    text, start = "", 0
    for cut in [*cuts, len(ids)]:
        text += stream.push(ids[start : start + cut])
        start += cut
    return text + stream.push(ids[start:]) + stream.flush()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), skip=st.booleans())
def test_random_ids(kind: Kind, data: st.DataObject, skip: bool) -> None:
    tokenizer, pieces, top = kind
    # Beyond the last token, as the padded rows of an embedding are.
    ids = data.draw(st.lists(st.integers(0, top + 3) | st.integers(0, 300), max_size=24))
    cuts = data.draw(st.lists(st.integers(1, 3), max_size=24))
    assert streamed(pieces, ids, cuts, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=30), skip=st.booleans())
def test_encoded_text(kind: Kind, text: str, skip: bool) -> None:
    tokenizer, pieces, _ = kind
    ids = tokenizer.encode(" a  b\n c" + text + "🙂 é").ids
    cuts = [1] * len(ids)
    assert streamed(pieces, ids, cuts, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_byte_level_round_trip_gives_the_same_bytes() -> None:
    tokenizer = build_vocabulary("").tokenizer
    pieces = build_pieces(tokenizer)
    text = " a  b\n c\t\x00 🫠 e\u0301"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(pieces.token_bytes(token_id) for token_id in ids).decode() == text
    assert streamed(pieces, ids, [], True) == text


def test_a_character_is_held_until_it_is_whole() -> None:
    pieces = build_pieces(build_vocabulary("byte").tokenizer)
    stream = pieces.stream(skip_special_tokens=True)
    smile = "🙂".encode()
    assert [stream.push([byte]) for byte in smile] == ["", "", "", "🙂"]
    assert stream.push(list(smile[:3])) == ""
    assert stream.flush() == "\ufffd"


def test_a_run_of_byte_tokens_is_text_or_one_replacement_a_byte() -> None:
    tokenizer = trained.llama_style()
    pieces = build_pieces(tokenizer)

    def ids(text: bytes) -> list[int]:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in text]

    good, bad = ids("é".encode()), ids("é".encode() + b"\xff")
    assert streamed(pieces, good, [1] * 2, True) == "é"
    assert streamed(pieces, bad, [1] * 3, True) == "\ufffd" * 3
    assert pieces.token_bytes(good[0]) == b"\xc3"


def test_word_gaps_survive_in_sentencepiece_streams() -> None:
    for tokenizer in (trained.llama_style(), trained.metaspace()):
        pieces = build_pieces(tokenizer)
        ids = tokenizer.encode("the quick brown fox", add_special_tokens=False).ids
        assert streamed(pieces, ids, [1] * len(ids), True) == "the quick brown fox"
        assert pieces.token_bytes(ids[-1]).decode() in " brown fox"


def test_unknown_ids_have_no_bytes() -> None:
    for make in MADE.values():
        pieces = build_pieces(make())
        assert pieces.token_bytes(1 << 30) == b""


def test_other_decoders_are_not_taken_for_sentencepiece() -> None:
    assert sentencepiece_rules(None) is None
    assert sentencepiece_rules({"type": "WordPiece", "prefix": "##", "cleanup": True}) is None
    stripping_the_end = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 0, "stop": 1},
        ],
    }
    assert sentencepiece_rules(stripping_the_end) is None
