"""Open texts: stop strings over tokens, replay, and books that return to nothing."""

from __future__ import annotations

import functools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.common.text.decoder import TextDecoder, TextDelta, build_decoder
from services.common.text.vocabulary import build_vocabulary


@pytest.fixture(scope="module")
def model() -> TextDecoder:
    return build_decoder("")


@pytest.fixture
def decoder(model: TextDecoder) -> TextDecoder:
    return model.session()


@pytest.fixture(scope="module")
def byte_model() -> TextDecoder:
    return build_decoder("byte")


@functools.cache
def tokenizer() -> Tokenizer:
    return build_vocabulary("").tokenizer


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def run(
    decoder: TextDecoder,
    ids: list[int],
    *,
    size: int = 1,
    stop: tuple[str, ...] = (),
    include: bool = False,
    replay: int = 0,
    skip_chars: int = 0,
) -> tuple[str, TextDelta]:
    """The joined text of ids fed `size` at a time, and the last delta."""
    delta = decoder.open(
        1,
        stop=stop,
        include_stop_str_in_output=include,
        replay_ids=ids[:replay],
        skip_chars=skip_chars,
    )
    text = delta.text
    for start in range(replay, len(ids), size):
        if delta.ended:
            break
        news = decoder.feed(1, ids[start : start + size])
        assert news is not None
        delta = news
        text += delta.text
    if not delta.ended:
        last = decoder.end(1)
        assert last is not None
        delta = last
        text += delta.text
    assert len(decoder) == 0
    return text, delta


SENTENCE = "Once upon a time, in a far away land, there lived a king. The end of it."


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_stop_string_over_several_tokens(decoder: TextDecoder, size: int) -> None:
    ids = encode(SENTENCE)
    text, delta = run(decoder, ids, size=size, stop=("way land, there",))
    assert text == "Once upon a time, in a far a"
    assert delta.stop == "way land, there"
    # The ids that complete the match, whatever came in the same frame.
    assert delta.ids_consumed == len(encode("Once upon a time, in a far away land, there"))
    text, delta = run(decoder, ids, size=size, stop=("way land, there",), include=True)
    assert text == "Once upon a time, in a far away land, there"
    text, delta = run(decoder, ids, size=size, stop=("way land, therf",))
    assert (text, delta.stop) == (SENTENCE, None)
    assert delta.ids_consumed == len(ids)


def test_held_text_is_counted_and_comes_out(decoder: TextDecoder) -> None:
    decoder.open(1, stop=(" a time machine",))
    deltas = [decoder.feed(1, [token_id]) for token_id in encode("Once upon a time")]
    assert [delta and delta.text for delta in deltas] == ["Once", " upon", "", ""]
    assert [delta and delta.held_chars for delta in deltas] == [0, 0, 2, 7]
    last = decoder.end(1)
    assert last == TextDelta(" a time", 4, ended=True)


def test_a_match_that_an_earlier_one_could_have_beaten_wins_at_the_end(
    decoder: TextDecoder,
) -> None:
    text, delta = run(decoder, encode("say one two"), stop=("one two three", "two"))
    assert (text, delta.stop) == ("say one ", "two")


def test_the_end_of_a_cut_character_comes_out(byte_model: TextDecoder) -> None:
    decoder = byte_model.session()
    ids = list("aé🙂".encode()[:-1])
    assert run(decoder, ids)[0] == "aé\ufffd"
    assert run(decoder, ids, stop=("zz",))[0] == "aé\ufffd"
    assert run(decoder, ids, stop=("\ufffd",))[1].stop == "\ufffd"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), text=st.text("ab 🙂é", max_size=24), include=st.booleans())
def test_a_replay_goes_on_where_the_first_instance_was_lost(
    byte_model: TextDecoder, data: st.DataObject, text: str, include: bool
) -> None:
    ids = list(text.encode())
    stop = tuple(data.draw(st.lists(st.text("ab 🙂", min_size=1, max_size=3), max_size=2)))
    whole, end = run(byte_model.session(), ids, stop=stop, include=include)
    cut = data.draw(st.integers(0, len(ids)))
    lost = byte_model.session()
    delta = lost.open(1, stop=stop, include_stop_str_in_output=include, replay_ids=ids[:cut])
    again, other_end = run(
        byte_model.session(),
        ids,
        stop=stop,
        include=include,
        replay=cut,
        skip_chars=len(delta.text),
    )
    assert delta.text + again == whole
    assert (other_end.stop, other_end.ids_consumed) == (end.stop, end.ids_consumed)


def test_special_tokens_are_left_out_unless_asked_for(decoder: TextDecoder) -> None:
    ids = encode("<|im_start|>user\nhi<|im_end|>")
    assert decoder.decode(ids) == "user\nhi"
    assert decoder.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert run(decoder, ids)[0] == "user\nhi"


def test_unknown_handles_are_ignored(decoder: TextDecoder) -> None:
    assert decoder.feed(5, [1, 2]) is None
    assert decoder.end(5) is None
    decoder.close(5)
    decoder.open(5, stop=("Once",))
    delta = decoder.feed(5, encode(SENTENCE))
    assert delta is not None
    assert delta.ended
    assert decoder.feed(5, encode(SENTENCE)) is None


def test_no_live_text_is_forgotten_and_none_is_left_over(decoder: TextDecoder) -> None:
    for handle in range(20_000):
        decoder.open(handle)
    delta = decoder.feed(0, encode("still here"))
    assert delta is not None
    assert delta.text == "still here"
    for handle in range(20_000):
        if handle % 2:
            decoder.close(handle)
        else:
            decoder.end(handle)
    assert len(decoder) == 0


@pytest.mark.parametrize("stop", [(), ("\ufffd" * 5_000 + "x", "x" * 5_000 + "y")])
def test_time_per_row_is_flat(byte_model: TextDecoder, stop: tuple[str, ...]) -> None:
    """Ids that decode to nothing, to a character never finished, to a half-done match."""
    decoder = byte_model.session()
    for token_id in (257, 0xC3, ord("x")):
        decoder.open(1, stop=stop)
        times = []
        for _ in range(2):
            start = time.process_time()
            for _ in range(2_000):
                decoder.feed(1, [token_id])
            times.append(time.process_time() - start)
        assert times[1] < 4 * times[0] + 0.05
        decoder.close(1)


def test_random_ids_with_stop_strings_equal_the_one_shot_rule(decoder: TextDecoder) -> None:
    random.seed(7)
    for _ in range(100):
        ids = [random.randrange(49_152) for _ in range(40)]
        whole = decoder.decode(ids)
        start = random.randrange(max(1, len(whole) - 6))
        stops = (whole[start : start + 5] or "none", "zzzz")
        places = [whole.find(stop) for stop in stops if stop in whole]
        text, delta = run(decoder, ids, stop=stops)
        assert text == (whole[: min(places)] if places else whole)
        assert (delta.stop is not None) == bool(places)
