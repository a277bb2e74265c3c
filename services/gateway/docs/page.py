"""The OpenAPI document as one HTML page: no scripts, no styles from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a2a33; background: #fff }
h1 { margin-bottom: 0 } code { font: 14px ui-monospace, monospace }
details { border: 1px solid #c8d4da; border-radius: 6px; margin: .5rem 0; padding: .5rem .8rem }
summary { cursor: pointer } .method { display: inline-block; width: 4rem; font-weight: 700 }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td, th { text-align: left; vertical-align: top; border-top: 1px solid #dde5e9;
         padding: .25rem .5rem }
@media (prefers-color-scheme: dark) { body { color: #d7e2e7; background: #10191e }
  details, td, th { border-color: #33434b } a { color: #7ec4e8 } }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """The page of a document."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    return "".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width, initial-scale=1'>",
            f"<title>{title}</title><style>{_STYLE}</style>",
            f"<h1>{title}</h1><p>{escape(info['description'])} ",
            "The same for machines: <a href='/openapi.json'>/openapi.json</a>.</p>",
            "<h2>Operations</h2>",
            *(_operation(path, method, operation)
              for path, methods in document["paths"].items()
              for method, operation in methods.items()),
            "<h2>Objects</h2>",
            *(_schema(name, schema)
              for name, schema in sorted(document["components"]["schemas"].items())),
            "</html>",
        ]
    )  # fmt: skip


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    said = [f"<p>{escape(operation['description'])}</p>"] if "description" in operation else []
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        said.append(f"<p>Body: {_type(schema)}</p>")
    rows = "".join(
        f"<tr><td>{status}<td>{escape(answer['description'])}<td>{_content(answer)}"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<details><summary><span class=method>{method.upper()}</span>"
        f"<code>{escape(path)}</code> &ensp; {escape(operation['summary'])}</summary>"
        f"{''.join(said)}<table><tr><th>Status<th>When<th>What{rows}</table></details>"
    )


def _content(answer: Mapping[str, Any]) -> str:
    return "<br>".join(
        f"<code>{escape(kind)}</code> {_type(body.get('schema', {}))}"
        for kind, body in answer.get("content", {}).items()
    )


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{'' if field in required else ' ?'}"
        f"<td>{_type(property)}<td>{escape(property.get('description', ''))}"
        for field, property in schema.get("properties", {}).items()
    )
    return (
        f"<details id='{escape(name)}'><summary><code>{escape(name)}</code> &ensp; "
        f"{escape(schema.get('description', ''))}</summary><table>{rows}</table></details>"
    )


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(" ".join([str(kind), *_limits(schema)]))


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    for key, words in (
        ("minimum", "from"),
        ("exclusiveMinimum", "above"),
        ("maximum", "to"),
    ):
        if key in schema:
            yield f"{words} {schema[key]}"
