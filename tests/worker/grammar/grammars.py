"""Grammars for the tests, with the vocabulary of bytes and what may come out of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from services.worker.core import Grammar
from services.worker.grammar.compiler import LibraryMatcher, compile_source, library_source
from services.worker.grammar.vocabulary import load_vocabulary

EOS = 257


@cache
def byte_vocabulary() -> LLTokenizer:
    return load_vocabulary("byte")


def compile_grammar(grammar: Grammar, vocabulary: LLTokenizer) -> LibraryMatcher:
    return compile_source(library_source(grammar), vocabulary)


def text_of(token_ids: list[int]) -> str:
    """The text of byte tokens, without a final end-of-sequence token."""
    return bytes(token for token in token_ids if token < 256).decode()


@dataclass(frozen=True)
class Case:
    """A grammar and its judge."""

    grammar: Grammar
    valid: Callable[[str], bool]

    def matcher(self, vocabulary: LLTokenizer | None = None) -> Any:
        return compile_grammar(self.grammar, vocabulary or byte_vocabulary())


def schema_case(schema: dict[str, Any]) -> Case:
    validator = Draft202012Validator(schema)

    def valid(text: str) -> bool:
        return bool(validator.is_valid(json.loads(text)))

    return Case(Grammar("json_schema", json.dumps(schema)), valid)


def regex_case(pattern: str) -> Case:
    return Case(Grammar("regex", pattern), lambda text: re.fullmatch(pattern, text) is not None)


def choice_case(*texts: str) -> Case:
    return Case(Grammar("choices", texts), lambda text: text in texts)


def random_case(random: Random) -> Case:
    """A grammar whose outputs are short."""
    kind = random.randrange(4)
    if kind == 0:
        return choice_case(*{random_word(random) for _ in range(random.randint(1, 5))})
    if kind == 1:
        parts = [random_atom(random) for _ in range(random.randint(1, 4))]
        return regex_case("".join(parts))
    return schema_case(
        {**random_schema(random, depth=2), "$defs": {"leaf": random_schema(random, depth=0)}}
    )


def random_word(random: Random) -> str:
    alphabet = 'abc "\\\n{}é😀0'
    return "".join(random.choice(alphabet) for _ in range(random.randint(1, 6)))


def random_atom(random: Random) -> str:
    atom = random.choice(["[a-c]", "x", "(foo|ba[rz])", r"\d", "[^a-z]", "é"])
    return atom + random.choice(["", "?", "{1,3}", "{2}", "{0,4}"])


def random_schema(random: Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "boolean", "null", "string", "pattern", "enum", "number"]
    if depth:
        kinds += ["object"] * 4 + ["array"] * 3 + ["anyOf", "ref"]
    kind = random.choice(kinds)
    inner = depth - 1
    if kind == "integer":
        low = random.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 200)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": random.randint(1, 9)}
    if kind == "string":
        low = random.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + random.randint(0, 8)}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[A-Z][a-z]{0,5}$"}
    if kind == "enum":
        return {"enum": [random_word(random), random.randint(0, 9), None, True]}
    if kind == "anyOf":
        return {"anyOf": [random_schema(random, inner) for _ in range(2)]}
    if kind == "ref":
        return {"$ref": "#/$defs/leaf"}
    if kind == "array":
        low = random.randint(0, 2)
        items = random_schema(random, inner)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = [random_word(random) for _ in range(random.randint(0, 3))]
        return {
            "type": "object",
            "properties": {name: random_schema(random, inner) for name in names},
            "required": sorted({name for name in names if random.random() < 0.7}),
            "additionalProperties": False,
        }
    return {"type": kind}
