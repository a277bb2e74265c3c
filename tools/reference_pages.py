"""Writes docs/reference: flags from the config classes, REST from OpenAPI, gRPC from the protos.

    python -m tools.reference_pages

Run it when one of them changes; a test says so.
"""

from __future__ import annotations

import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from services.commands import COMMANDS, GROUPS
from services.common.config import env_name, flag_name, help_text, options
from services.gateway.docs.openapi import openapi_document

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
_MADE = "<!-- Made by `python -m tools.reference_pages`; do not edit. -->\n"
_PROTOS = ("inference", "worker", "tokenizer", "common")
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6  # field numbers of FileDescriptorProto, as paths have them


def flags_page() -> str:
    """Every command's flags, with variables and defaults."""
    lines = [
        "# Flags\n",
        _MADE,
        "Every flag can also be given as a variable: `--max-queue 10` is `SHOAL_MAX_QUEUE=10`; the"
        " flag wins. `shoal COMMAND --help` says the same as this page.\n",
    ]
    for names in GROUPS.values():
        for name in names:
            lines += _command(name)
    return "\n".join(lines)


def _command(name: str) -> Iterator[str]:
    command = COMMANDS[name]
    yield f"## shoal {name}\n"
    yield f"{command.summary[0].upper()}{command.summary[1:]}.\n"
    cls = command.config_class()
    hints = typing.get_type_hints(cls)
    groups: dict[str, list[Any]] = {}
    for field in options(cls):
        groups.setdefault(field.metadata["group"], []).append(field)
    for group, fields in groups.items():
        yield f"**{group}**\n\n| flag | variable | default | |\n|---|---|---|---|"
        yield from (_flag(field, hints[field.name]) for field in fields)
        yield ""


def _flag(field: Any, hint: Any) -> str:
    meaning = help_text(field).replace("|", "\\|")
    if choices := _choices(field, hint):
        meaning += f" ({', '.join(f'`{choice}`' for choice in choices)})"
    names = f"`{flag_name(field.name)}` | `{env_name(field.name)}`"
    return f"| {names} | {_default(field.default, meaning)} | {meaning} |"


def _choices(field: Any, hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(field.metadata["choices"] or ())


def _default(value: Any, meaning: str) -> str:
    # Where the text says what the default is, the value stands for "work it out".
    if value in (None, "", ()) or "default" in meaning.lower():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{','.join(value) if isinstance(value, tuple) else value}`"


def rest_page() -> str:
    """Every operation of the REST API, with its fields."""
    document = openapi_document()
    lines = [
        "# REST\n",
        _MADE,
        "From the OpenAPI document, which a gateway serves at `/openapi.json`. What each field"
        " means beside OpenAI's own is said in [REST](../rest.md).\n",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines.append(f"## {method.upper()} {path}\n")
            said = operation.get("description") or operation.get("summary") or ""
            lines += [said + "\n"] if said else []
            body = operation.get("requestBody", {}).get("content", {})
            for content in body.values():
                lines += _fields(content["schema"], document)
            answers = ", ".join(f"`{status}`" for status in operation.get("responses", {}))
            lines.append(f"Answers: {answers}\n")
    return "\n".join(lines)


def _fields(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    schema = _resolved(schema, document)
    for number, one in enumerate(options := schema.get("anyOf") or schema.get("oneOf") or ()):
        yield f"{'Either' if not number else 'Or'} {_type(one)}:\n" if options[1:] else ""
        yield from _fields(one, document)
    needed = schema.get("required", ())
    if not schema.get("properties"):
        return
    yield "| field | type | |\n|---|---|---|"
    for name, value in schema["properties"].items():
        said = " ".join(_resolved(value, document).get("description", "").split())
        note = "needed. " if name in needed else ""
        yield f"| `{name}` | {_type(value)} | {note}{said.replace('|', chr(92) + '|')} |"
    yield ""


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(option) for option in options))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def grpc_page() -> str:
    """Every service, message and enum of shoal.v1, with the comments of the protos."""
    lines = [
        "# gRPC\n",
        _MADE,
        "Package `shoal.v1`, from the comments in `protos/`. How to call it is shown in"
        " [gRPC](../grpc.md).\n",
    ]
    for file in _descriptors():
        comments = {
            tuple(place.path): place.leading_comments for place in file.source_code_info.location
        }

        def said(*path: int, comments: dict[tuple[int, ...], str] = comments) -> str:
            return " ".join(comments.get(path, "").split()).replace("|", "\\|")

        lines.append(f"## {file.name}\n")
        for index, service in enumerate(file.service):
            lines += _service(index, service, said)
        for index, message in enumerate(file.message_type):
            lines += _message(message, said, (_MESSAGE, index))
        for index, enum in enumerate(file.enum_type):
            lines += _enum(enum, said, (_ENUM, index))
    return "\n".join(lines)


Said = Callable[..., str]


def _service(index: int, service: Any, said: Said) -> Iterator[str]:
    yield f"### service {service.name}\n\n{said(_SERVICE, index)}\n"
    yield "| method | takes | answers | |\n|---|---|---|---|"
    for number, method in enumerate(service.method):
        takes = ("stream of " if method.client_streaming else "") + _short(method.input_type)
        gives = ("stream of " if method.server_streaming else "") + _short(method.output_type)
        yield f"| `{method.name}` | {takes} | {gives} | {said(_SERVICE, index, 2, number)} |"
    yield ""


def _message(message: Any, said: Said, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {message.name}\n\n{said(*path)}\n"
    if message.field:
        yield "| field | number | type | |\n|---|---|---|---|"
    for index, field in enumerate(message.field):
        kind = _short(field.type_name) or _scalar(field.type)
        many = "repeated " if field.label == field.LABEL_REPEATED else ""
        many = "optional " if field.proto3_optional else many
        yield f"| `{field.name}` | {field.number} | {many}{kind} | {said(*path, 2, index)} |"
    yield ""


def _enum(enum: Any, said: Said, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### enum {enum.name}\n\n{said(*path)}\n\n| value | number | |\n|---|---|---|"
    for index, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {said(*path, 2, index)} |"
    yield ""


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _scalar(number: Any) -> str:
    name = descriptor_pb2.FieldDescriptorProto.Type.Name(number)
    return name.removeprefix("TYPE_").lower()


def _descriptors() -> list[Any]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "all.binpb"
        files = [f"protos/{name}.proto" for name in _PROTOS]
        options = [f"-I{ROOT}", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *options, *(str(ROOT / file) for file in files)]):
            raise RuntimeError("protoc failed")
        found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    order = {f"protos/{name}.proto": place for place, name in enumerate(_PROTOS)}
    return sorted((file for file in found.file if file.name in order), key=lambda f: order[f.name])


PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags_page,
    "rest.md": rest_page,
    "grpc.md": grpc_page,
}


def main() -> None:
    """Writes the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make().rstrip() + "\n")


if __name__ == "__main__":
    main()
