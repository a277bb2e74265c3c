"""The parser of one output: which marks to look for, and what the answer counts."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from services.gateway.domain import Dialect, FinishReason, ReasoningState
from services.gateway.ids import new_id
from services.gateway.openai.output.pieces import ContentParser, Piece, TextParser
from services.gateway.openai.output.reasoning import ReasoningParser
from services.gateway.openai.output.tool_calls import HERMES, LLAMA3_JSON, ToolCallParser

_SYNTAXES = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{new_id()[:24]}"


class OutputPlan(Struct, frozen=True):
    """What a request's outputs may hold beside content.

    `tool_names` are the tools that may be called. An output that a grammar shapes is
    `constrained`: the grammar leaves no room for reasoning, so there is none to look for.
    """

    dialect: Dialect
    tool_names: frozenset[str] = frozenset()
    constrained: bool = False

    @property
    def reasons(self) -> bool:
        """Whether outputs may hold reasoning."""
        return self.dialect.reasoning != "none"

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return not self.reasons and not (self.tool_names and self.dialect.tools != "none")

    def parser(self, state: ReasoningState) -> OutputParser:
        """A parser for one output; `state` is what its prompt says of reasoning."""
        return OutputParser(self, "closed" if self.constrained else state)


class OutputParser:
    """Takes one output apart."""

    def __init__(self, plan: OutputPlan, state: ReasoningState) -> None:
        self._calls: ToolCallParser | None = None
        self._reasoning: ReasoningParser | None = None
        self._end_id = plan.dialect.reasoning_end_id
        self._num_tokens = 0
        self._num_chars = 0
        self._tokens_to_end: int | None = None  # of the reasoning, by its token
        if plan.tool_names and plan.dialect.tools != "none":
            syntax = _SYNTAXES[plan.dialect.tools]
            self._calls = ToolCallParser(syntax, plan.tool_names, new_call_id)
        parser: TextParser = self._calls or ContentParser()
        if plan.reasons:
            implied = plan.dialect.reasoning == "deepseek_r1"
            self._reasoning = parser = ReasoningParser(parser, state, implied=implied)
        self._parser = parser

    def feed(self, text: str, token_ids: Sequence[int]) -> Sequence[Piece]:
        """The pieces that the next text completes; the ids are its tokens."""
        if self._reasoning is not None:
            end = self._end_id
            if end is not None and self._tokens_to_end is None and end in token_ids:
                self._tokens_to_end = self._num_tokens + list(token_ids).index(end) + 1
            self._num_tokens += len(token_ids)
            self._num_chars += len(text)
        return self._parser.feed(text)

    def finish(self) -> Sequence[Piece]:
        """What was held back."""
        return self._parser.finish()

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens the reasoning took, its marks included.

        Exact where the vocabulary has </think> as one token, else by share of the text.
        """
        if self._reasoning is None or not self._reasoning.reasons:
            return 0
        if self._end_id is not None:
            return self._num_tokens if self._tokens_to_end is None else self._tokens_to_end
        share = self._reasoning.num_chars / max(self._num_chars, 1)
        return round(self._num_tokens * share)

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """The reason as the API words it: an output that ended with calls says so."""
        called = self._calls is not None and self._calls.num_calls > 0 and not self._calls.in_call
        return "tool_calls" if called and reason == "stop" else reason
