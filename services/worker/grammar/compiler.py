"""From a grammar to a matcher, by llguidance; the one place that knows how it is asked.

    json_schema   any keyword that the library does not implement is an error; whitespace
                  is bounded (`services.common.json_grammar`)
    regex         Rust's dialect, anchored at both ends; no look-around
    choices       a Lark grammar of alternatives
    lark          llguidance's dialect of Lark

Nothing here bounds time: `services.worker.grammar.trial` does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.common.errors import InvalidRequest
from services.common.json_grammar import JSON_OPTIONS
from services.worker.core import Grammar, IntArray

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_BYTES = 128 * 1024  # of a grammar's text

_MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, shared by all who use the grammar


def compile_grammar(grammar: Grammar, vocabulary: LLTokenizer) -> LibraryMatcher:
    """A matcher at the start of an output.

    Raises InvalidRequest, in one sentence, if there can be none.
    """
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary, _source(grammar), log_level=0, limits=limits)
    compiled = LibraryMatcher(matcher)
    compiled.fill(np.zeros(-(-vocabulary.vocab_size // 32), np.int32))  # a dead end shows here
    return compiled


def check_size(grammar: Grammar) -> None:
    """Raises InvalidRequest for a grammar that is empty or too long."""
    texts = (grammar.value,) if isinstance(grammar.value, str) else grammar.value
    if not texts:
        raise invalid("there is nothing to choose from")
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_BYTES:
        raise invalid(f"it has {size} bytes, and at most {MAX_BYTES} can be compiled")


class LibraryMatcher:
    """`services.worker.core.Matcher` by llguidance. Copies are cheap.

    Copies share the states of the lexer that any of them has reached, and their limit.
    `exhausted` says of all of them that one could not go on.
    """

    def __init__(self, matcher: LLMatcher, failures: list[InvalidRequest] | None = None) -> None:
        self._matcher = matcher
        self._failures: list[InvalidRequest] = [] if failures is None else failures

    @property
    def exhausted(self) -> bool:
        return len(self._failures) > 0

    def copy(self) -> LibraryMatcher:
        """Another one in the same state."""
        return LibraryMatcher(self._matcher.deep_copy(), self._failures)

    def advance(self, token_id: int) -> None:
        """Takes in the next token. One that the grammar does not allow shows in `fill`."""
        self._matcher.consume_token(token_id)

    def accepts(self, token_ids: list[int]) -> bool:
        """Takes in tokens; False if they do not follow the grammar."""
        return self._matcher.consume_tokens(token_ids)

    def fill(self, mask: IntArray) -> None:
        """See `Matcher.fill`; the GIL is free meanwhile."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self._failures.append(invalid(_reason(self._matcher.get_error())))
            raise self._failures[-1]


def _source(grammar: Grammar) -> str:
    """The grammar as the library takes it."""
    value = grammar.value
    if grammar.kind == "choices":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
    assert isinstance(value, str)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(value)
    options = cast("JsonCompileOptions", JSON_OPTIONS)
    schema = "{}" if value.strip() == "true" else value
    try:  # what the schema itself says of these options does not count
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        raise invalid(f"it is no JSON schema: {error}")


def _reason(error: str) -> str:
    """The sentence in an error of the library, without its pictures and states."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines or lines[0].startswith("panic"):
        return "the grammar library cannot handle it"
    if lines[0].startswith("NoExtension"):
        return "nothing can match it"
    for line in lines:  # the regex crate points at the place first, and gives the reason last
        if line.startswith("error: "):
            return f"{line.removeprefix('error: ')} in the regular expression"
    return lines[0].rstrip(".")


def invalid(reason: str) -> InvalidRequest:
    """The error of a request whose grammar cannot be used."""
    return InvalidRequest(f"The grammar cannot be used: {reason}.", param="grammar")
