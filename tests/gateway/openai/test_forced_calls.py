"""Tool grammars under the worker's own compiler and the embedded model's vocabulary.

A model that picks any allowed token at random, which is worse than the smallest, still
writes calls that the parser reads and the schema validates.
"""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest

from services.common.text.decoder import build_decoder
from services.gateway.domain import Dialect, ToolFormat
from services.gateway.openai.chat_answer import message_fields
from services.gateway.openai.output.parser import OutputPlan
from services.gateway.openai.output.pieces import Piece
from services.gateway.openai.tools.grammar import tool_grammar
from services.gateway.openai.tools.use import Tool, ToolUse
from services.worker.core import Grammar
from services.worker.grammar.compiler import compile_source, library_source
from services.worker.grammar.vocabulary import load_vocabulary

CITY = {
    "type": "object",
    "description": "Rules ::= here, %json there",
    "properties": {
        "city": {"enum": ["Paris", "Köln", 'a "b"']},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
}
TOOLS = (Tool("weather", CITY), Tool("clock", {"type": "object", "properties": {}}))


@pytest.mark.parametrize("format", ["hermes", "llama3_json", "none"])
@pytest.mark.parametrize("parallel", [False, True])
def test_random_tokens_make_valid_calls(format: ToolFormat, parallel: bool) -> None:
    use = ToolUse(TOOLS, required=True, parallel=parallel)
    grammar = tool_grammar(use, format, None)
    assert grammar is not None
    vocabulary = load_vocabulary("")
    source = library_source(Grammar(grammar.kind, grammar.value))
    decoder = build_decoder("")
    called = set()
    for seed in range(2):
        draw = random.Random(seed)
        matcher = compile_source(source, vocabulary)
        mask = np.zeros((vocabulary.vocab_size + 31) // 32, np.int32)
        ids: list[int] = []
        while not matcher.exhausted and len(ids) < 2_000:
            matcher.fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: vocabulary.vocab_size])
            token = vocabulary.eos_token if vocabulary.eos_token in allowed else None
            if token is None or draw.random() < 0.3:
                token = int(draw.choice(allowed))
            if token == vocabulary.eos_token:
                break
            matcher.advance(token)
            ids.append(token)
        text = decoder.decode(ids)
        dialect = Dialect("llama3_json" if format == "none" else format)
        parser = OutputPlan(dialect, use.names, constrained=True).parser("unknown")
        pieces: list[Piece] = [*parser.feed(text, ids), *parser.finish()]
        message = message_fields(pieces, reasons=False)
        assert parser.finish_reason("stop") == "tool_calls", text
        assert message["content"] is None
        assert parallel or len(message["tool_calls"]) == 1
        for call in message["tool_calls"]:
            called.add(call["function"]["name"])
            tool = next(tool for tool in TOOLS if tool.name == call["function"]["name"])
            jsonschema.validate(json.loads(call["function"]["arguments"]), tool.parameters)
    assert called
