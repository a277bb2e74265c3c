"""Writes the services' options into the chart's schema, so that helm checks them by name.

    python -m deploy.k8s.sync_options

An option that a service has and the chart does not decide is a value `<service>.config.<option>`,
in camel case. Run this when a config class changes; a test says so.
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

from services.common.config import options
from services.gateway.config import GatewayConfig
from services.tokenizer.config import DetokenizerConfig, TokenizerConfig
from services.worker.config import WorkerConfig

SCHEMA_FILE = Path(__file__).with_name("shoal") / "values.schema.json"
CONFIGS: dict[str, type] = {
    "gateway": GatewayConfig,
    "tokenizer": TokenizerConfig,
    "detokenizer": DetokenizerConfig,
    "worker": WorkerConfig,
}
CHART_DECIDES = {
    *("address", "admin_address", "host", "port", "grpc_port", "drain_timeout"),
    *("log_level", "log_format", "model", "served_model_name", "expect_models"),
    *("tp", "nnodes", "node_rank", "rendezvous"),
    *("tls_cert", "tls_key", "tls_ca", "api_key", "api_key_file", "otlp_endpoint"),
    *("peer_tls_cert", "peer_tls_key", "peer_tls_ca", "peer_tls_server_name"),
    *("tokenizer_addresses", "detokenizer_addresses", "worker_addresses"),
}
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def option_schemas(config: type) -> dict[str, Any]:
    """The JSON schemas of a config's options that the chart leaves to the user, by name."""
    hints = typing.get_type_hints(config)
    return {
        _camel_case(field.name): {
            "description": field.metadata["help"],
            **(field.metadata["bounds"].schema() if field.metadata["bounds"] else {}),
            **_type_schema(hints[field.name], field.metadata["choices"]),
        }
        for field in options(config)
        if field.name not in CHART_DECIDES
    }


def _type_schema(hint: Any, choices: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    if choices:
        return {"enum": list(choices)}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [part for part in typing.get_args(hint) if part is not type(None)]
    return {"type": _JSON_TYPES.get(hint, "string")}  # a tuple is text with commas


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def config_schema(schema: dict[str, Any], service: str) -> dict[str, Any]:
    """The schema of a service's `config`; that of the workers is also every pool's."""
    node = schema["definitions"] if service == "worker" else schema["properties"]
    found: dict[str, Any] = node[service]["properties"]["config"]
    return found


def main() -> None:
    """Rewrites the schema's option lists in place."""
    schema = json.loads(SCHEMA_FILE.read_text())
    for service, config in CONFIGS.items():
        config_schema(schema, service)["properties"] = option_schemas(config)
    SCHEMA_FILE.write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    main()
