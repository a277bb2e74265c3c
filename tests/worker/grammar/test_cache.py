"""Compiling: once each, tried by a child first, and no grammar ends anything but the child."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.common.errors import InvalidRequest, Overloaded
from services.worker.core import Grammar
from services.worker.grammar import cache as cache_module
from services.worker.grammar.cache import GrammarCache

TIMEOUT = 120.0


@pytest.fixture
def grammars() -> Iterator[GrammarCache]:
    cache = GrammarCache("byte", size=8, seconds=1.0)
    yield cache
    cache.close()


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def test_hostile_grammars_end_their_trial_and_nothing_else(grammars: GrammarCache) -> None:
    chain = "".join(f"a{i}: a{i + 1}\n" for i in range(9000))
    hostile = {
        "takes more than 1 s": regex("a?" * 30_000),
        "too complex": Grammar("lark", f'start: a0\n{chain}a9000: "x"'),
        "128": regex("a" * 200_000),
        "requires itself": Grammar("json_schema", '{"$ref": "#"}'),
        "unclosed group": regex("(a"),
    }
    for words, grammar in hostile.items():
        error = grammars.get(grammar).exception(TIMEOUT)
        assert isinstance(error, InvalidRequest)
        assert words in error.message or "128" in words
        assert grammars.get(regex("ok")).result(TIMEOUT) is not None
    assert grammars.stats.num_failed == len(hostile)


def test_each_grammar_is_compiled_once_and_the_oldest_is_forgotten(grammars: GrammarCache) -> None:
    futures = [grammars.get(regex("x")) for _ in range(5)]
    assert len(set(map(id, futures))) == 1
    futures[0].result(TIMEOUT)
    assert (grammars.stats.num_compiled, grammars.stats.num_hits) == (1, 4)
    for number in range(8):
        grammars.get(regex(f"x{number}")).result(TIMEOUT)
    assert grammars.get(regex("x")) is not futures[0]


def test_a_grammar_whose_limits_are_used_up_is_compiled_anew(grammars: GrammarCache) -> None:
    first = grammars.get(regex("ab"))
    matcher = first.result(TIMEOUT).copy()
    assert not matcher.accepts([ord("z")])
    assert grammars.get(regex("ab")) is first
    matcher._failures.append(InvalidRequest("its lexer is full"))
    assert grammars.get(regex("ab")) is not first


def test_too_many_at_once_are_turned_away(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_MAX_BACKLOG", 2)
    slow = grammars.get(regex("a?" * 30_000))
    waiting = grammars.get(regex("b"))
    with pytest.raises(Overloaded):
        grammars.get(regex("c"))
    grammars.forget(regex("b"))
    assert waiting.cancelled()
    assert isinstance(slow.exception(TIMEOUT), InvalidRequest)
    assert grammars.get(regex("c")).result(TIMEOUT) is not None
