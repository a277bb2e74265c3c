"""Stop strings: which match wins, and what must be held back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.text.stop import StopMatch, StopMatcher


def first_match(text: str, stops: list[str]) -> StopMatch | None:
    """The match by definition: earliest start, then shortest."""
    places = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not places:
        return None
    start, length, stop = min(places)
    return StopMatch(stop, start, start + length)


def feed_all(matcher: StopMatcher, pieces: list[str]) -> bool:
    return any(matcher.feed(piece) for piece in pieces)


stops_of = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc", max_size=30), stops=stops_of, data=st.data())
def test_the_match_depends_on_the_text_alone(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    matcher = StopMatcher(stops)
    expected = first_match(text, stops)
    position = 0
    while position < len(text):
        size = data.draw(st.integers(1, 4))
        settled = matcher.feed(text[position : position + size])
        position += size
        so_far = text[:position]
        if settled:
            break
        # Whatever follows, a match begins at or after the safe length.
        assert expected is None or expected.start >= matcher.safe_length
        # And nothing is held back without need: the held text begins a stop string.
        held = so_far[matcher.safe_length :]
        assert held == "" or any(stop.startswith(held) or stop in held for stop in stops)
    assert matcher.candidate == expected


def test_an_earlier_start_beats_an_earlier_end() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert not matcher.feed("xabc")
    assert matcher.candidate == StopMatch("bc", 2, 4)
    assert matcher.feed("d")
    assert matcher.candidate == StopMatch("abcd", 1, 5)


def test_the_shorter_of_two_that_start_together_wins() -> None:
    matcher = StopMatcher(["<end>", "<e"])
    assert matcher.feed("a<e")
    assert matcher.candidate == StopMatch("<e", 1, 3)


def test_a_near_miss_is_released() -> None:
    matcher = StopMatcher(["the end"])
    assert not feed_all(matcher, ["say ", "the", " en"])
    assert matcher.safe_length == len("say ")
    assert not matcher.feed("x")
    assert matcher.safe_length == len("say the enx")


def test_characters_that_mean_something_to_patterns() -> None:
    for stop in ("]", "^", "-a", "\\", "\n\n", "🙂"):
        matcher = StopMatcher([stop, "zzz"])
        assert matcher.feed(f"text{stop}")
