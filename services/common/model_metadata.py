"""What a model's files say about ids, context and chat.

The worker needs the end-of-sequence ids and the context, the tokenizer the chat template. Nothing
here builds a tokenizer or reads a weight, and torch and transformers are never imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import StartupError
from services.common.gguf_header import GgufHeader, read_header
from services.common.model_files import ModelFiles

BYTE_BOS, BYTE_EOS, BYTE_PAD = 256, 257, 258
BYTE_SPECIAL_TOKENS = {"<bos>": BYTE_BOS, "<eos>": BYTE_EOS, "<pad>": BYTE_PAD}
_BYTE_CONTEXT = 8192
_BYTE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a model's files say, beside weights and vocabulary.

    `architecture` is Hugging Face's model_type, for GGUF files too; `vocab_size` counts
    the rows of the embedding, which may be more than the tokens that have a text;
    `context_length` includes what RoPE scaling adds. `eos_token_ids` is the union of
    all places that name one.
    """

    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    special_token_ids: frozenset[int]
    chat_template: str | None
    add_bos: bool


def read_metadata(files: ModelFiles) -> ModelMetadata:
    """Reads what `ModelMetadata` holds; milliseconds for GGUF, no weights touched.

    Raises StartupError if a file is missing, broken or lacks what is needed.
    """
    if files.kind == "byte":
        special = frozenset(BYTE_SPECIAL_TOKENS.values())
        return ModelMetadata(
            "byte",
            259,
            _BYTE_CONTEXT,
            frozenset({BYTE_EOS}),
            BYTE_BOS,
            special,
            _BYTE_TEMPLATE,
            True,
        )
    if files.kind == "gguf":
        return _gguf_metadata(read_header(files.path))
    return _hf_metadata(files.path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file.

    Raises StartupError if it is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object")
    return value


def _gguf_metadata(header: GgufHeader) -> ModelMetadata:
    name = header.get("general.architecture")
    embedding = header.tensor_shapes.get("token_embd.weight")
    context = header.get(f"{name}.context_length")
    if name is None or embedding is None or context is None:
        raise StartupError(f"{header.path} is not a language model in GGUF form")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    types = header.array("tokenizer.ggml.token_type")
    bos = header.get("tokenizer.ggml.bos_token_id")
    # Files of Llama 3 leave the key out and mean yes (as llama.cpp reads them).
    default_bos = header.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
    return ModelMetadata(
        architecture={"qwen3moe": "qwen3_moe"}.get(name, name),
        vocab_size=embedding[-1],
        context_length=context,
        eos_token_ids=_ids(header.get(f"tokenizer.ggml.{key}") for key in keys),
        bos_token_id=bos,
        special_token_ids=frozenset(id for id, kind in enumerate(types) if kind == 3),
        chat_template=header.get("tokenizer.chat_template"),
        add_bos=bos is not None and header.get("tokenizer.ggml.add_bos_token", default_bos),
    )


def _hf_metadata(directory: Path) -> ModelMetadata:
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json")
    tokenizer = read_json(directory / "tokenizer_config.json")
    added = _added_tokens(read_json(directory / "tokenizer.json"))
    for key in ("model_type", "vocab_size", "max_position_embeddings"):
        if key not in config:
            raise StartupError(f"{directory / 'config.json'} does not say {key}")
    eos = [*_as_list(config.get("eos_token_id")), *_as_list(generation.get("eos_token_id"))]
    bos = token_id(tokenizer.get("bos_token"), added)
    return ModelMetadata(
        architecture=config["model_type"],
        vocab_size=config["vocab_size"],
        context_length=_scaled_context(config),
        eos_token_ids=_ids([*eos, token_id(tokenizer.get("eos_token"), added)]),
        bos_token_id=config.get("bos_token_id") if bos is None else bos,
        special_token_ids=frozenset(id for id, special in added.values() if special),
        chat_template=_hf_template(directory, tokenizer),
        add_bos=bool(tokenizer.get("add_bos_token", False)),
    )


def token_id(token: Any, added: Mapping[str, tuple[int, bool]]) -> int | None:
    """The id of a token as tokenizer_config.json spells it (text, or an object)."""
    text = token_text(token)
    return added[text][0] if text is not None and text in added else None


def token_text(token: Any) -> str | None:
    """The text of a token as tokenizer_config.json spells it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, tuple[int, bool]]:
    """Added tokens of a tokenizer.json: text -> (id, whether it is special)."""
    return {
        token["content"]: (token["id"], bool(token.get("special")))
        for token in tokenizer.get("added_tokens", ())
    }


def _hf_template(directory: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """The chat template: its own file, else the configured one, else "default" of several."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer.get("chat_template") or read_json(directory / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _scaled_context(config: Mapping[str, Any]) -> int:
    """The context with RoPE scaling: yarn and linear name a factor to apply; llama3's
    max_position_embeddings already includes it (as vLLM derives max_model_len)."""
    context: int = config["max_position_embeddings"]
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "yarn":
        context = scaling.get("original_max_position_embeddings", context)
    if kind in ("yarn", "linear", "dynamic"):
        return int(context * scaling.get("factor", 1.0))
    return context


def _ids(values: Iterable[int | None]) -> frozenset[int]:
    return frozenset(value for value in values if value is not None)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
