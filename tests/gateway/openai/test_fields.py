"""Every field of OpenAI's requests is supported, ignored or refused, and documented so."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from services.gateway.openai import fields, schema
from services.gateway.openai.fields import FieldTable

DOCUMENT = Path(__file__).parents[3] / "docs" / "rest.md"
# The parameters as the official client types them: those of both its forms, and `stream`.
SDK = {
    "chat": (fields.CHAT, chat.CompletionCreateParamsBase),
    "completions": (fields.COMPLETIONS, completions.CompletionCreateParamsBase),
    "responses": (fields.RESPONSES, responses.ResponseCreateParamsBase),
}
TABLES = {
    "POST /v1/chat/completions": fields.CHAT,
    "POST /v1/completions": fields.COMPLETIONS,
    "POST /v1/responses": fields.RESPONSES,
    "POST /generate, SGLang's body": fields.SGLANG,
    "POST /generate, SGLang's sampling_params": fields.SGLANG_SAMPLING,
}


@pytest.mark.parametrize("name", SDK)
def test_every_field_of_the_sdk_is_in_one_class(name: str) -> None:
    table, params = SDK[name]
    known = [*table.supported, *table.ignored, *table.refused]
    assert len(known) == len(set(known)), "a field is in two classes"
    missing = {*params.__annotations__, "stream"} - set(known)
    assert not missing, f"neither supported, ignored nor refused: {sorted(missing)}"


def test_every_field_of_the_sdks_messages_is_known() -> None:
    known = set(schema.Message.__struct_fields__)
    for message in typing.get_args(ChatCompletionMessageParam):
        assert set(message.__annotations__) <= known


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_refused_fields_are_fields_of_the_body(table: FieldTable) -> None:
    assert table.refused.keys() <= set(table.body.__struct_fields__)
    assert not table.ignored & set(table.body.__struct_fields__)


def documented(heading: str) -> dict[str, dict[str, str]]:
    """The tables below a heading of docs/rest.md: class -> field -> what is said of it."""
    text = DOCUMENT.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert text, f"docs/rest.md has no section for {heading}"
    classes: dict[str, dict[str, str]] = {"supported": {}, "ignored": {}, "refused": {}}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) >= 2 and cells[1] in classes:
            for field in re.findall(r"`([a-z_0-9]+)`", cells[0]):
                assert field not in classes[cells[1]], f"{field} is documented twice"
                classes[cells[1]][field] = " | ".join(cells[2:])
    return classes


@pytest.mark.parametrize("heading", TABLES)
def test_the_document_says_what_the_code_does(heading: str) -> None:
    table = TABLES[heading]
    said = documented(heading)
    assert set(said["supported"]) == table.supported
    assert set(said["ignored"]) == table.ignored
    assert set(said["refused"]) == set(table.refused)
