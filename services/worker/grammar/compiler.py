"""From a grammar to a matcher, by llguidance; the one place that knows how it is asked.

    json_schema   any keyword that the library does not implement is an error; whitespace
                  is bounded (`services.common.json_grammar`)
    regex         Rust's dialect, anchored at both ends; no look-around
    choices       a Lark grammar of alternatives
    lark          llguidance's dialect of Lark, or GBNF (told by its ::=), converted to it

Nothing here bounds time: `services.worker.grammar.trial` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from services.common.errors import InvalidRequest
from services.common.json_grammar import JSON_OPTIONS
from services.worker.core import Grammar, IntArray
from services.worker.grammar.finite import check_finite

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_BYTES = 128 * 1024  # of a grammar's text

_UNIMPLEMENTED = "Unimplemented keys: "  # and a JSON array, in the library's errors
_MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, shared by all who use the grammar


def library_source(grammar: Grammar) -> str:
    """A grammar as the library takes it, checked as far as that goes without compiling.

    May take long for what a client has made for that. Raises InvalidRequest.
    """
    value = grammar.value
    texts = (value,) if isinstance(value, str) else value
    if not texts:
        raise invalid("there is nothing to choose from")
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_BYTES:
        raise invalid(f"it has {size} bytes, and at most {MAX_BYTES} can be compiled")
    if not isinstance(value, str):
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
    try:
        return _SOURCES[grammar.kind](value)
    except RecursionError:
        raise invalid("it is nested too deeply")


def compile_source(source: str, vocabulary: LLTokenizer) -> LibraryMatcher:
    """A matcher at the start of an output.

    Raises InvalidRequest, in one sentence, if there can be none.
    """
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    compiled = LibraryMatcher(LLMatcher(vocabulary, source, log_level=0, limits=limits))
    compiled.fill(np.zeros(-(-vocabulary.vocab_size // 32), np.int32))  # a dead end shows here
    return compiled


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


def _json_source(text: str) -> str:
    options = cast("JsonCompileOptions", JSON_OPTIONS)
    try:
        schema = json.loads(text)
        check_finite(schema)
        # What the schema itself says of the options does not count.
        return LLMatcher.grammar_from_json_schema(
            "{}" if schema is True else text, overrides=options
        )
    except ValueError as error:
        raise invalid(f"it is no JSON schema: {error}")


def _context_free_source(text: str) -> str:
    if "::=" not in text:
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises no narrower class
        raise invalid(str(error))


def _regex_source(text: str) -> str:
    # The library drops a backslash that stands alone at the end, which is no regular expression.
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise invalid("it ends inside an escape sequence")
    return LLMatcher.grammar_from_regex(text)


_SOURCES: dict[str, Callable[[str], str]] = {
    "json_schema": _json_source,
    "regex": _regex_source,
    "lark": _context_free_source,
}


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
    if lines[0].startswith(_UNIMPLEMENTED):
        return _unsupported_keywords(lines[0].removeprefix(_UNIMPLEMENTED).rstrip("."))
    # What may follow is advice on options that no client has.
    return lines[0].partition(". Enable ")[0].rstrip(".")


def _unsupported_keywords(quoted: str) -> str:
    """A sentence about a JSON array of the names of a schema's keywords."""
    *others, last = map(json.dumps, json.loads(quoted))
    if not others:
        return f"the schema's keyword {last} is not supported"
    return f"the schema's keywords {', '.join(others)} and {last} are not supported"


def invalid(reason: str) -> InvalidRequest:
    """The error of a request whose grammar cannot be used."""
    return InvalidRequest(f"The grammar cannot be used: {reason}.", param="grammar")
