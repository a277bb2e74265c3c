"""Whether a model's files are all here, whole and readable, and its chat template renders."""

from __future__ import annotations

from collections.abc import Iterator

from services.client.doctor.finding import Finding, ok, problem, warning
from services.common import gguf_header, safetensors_header
from services.common.errors import InvalidRequest, StartupError
from services.common.model_files import ModelFiles, find_cached
from services.common.model_metadata import read_metadata
from services.worker.models import config as model_config
from services.worker.sizing.pool import gib


def check_model(model: str) -> Iterator[Finding]:
    """Everything about one model, as far as its files go."""
    try:
        files = find_cached(model)
        yield ok("model", f"{files.name} at {files.path}")
        if files.kind != "byte":
            model_config.read(files)
        read_metadata(files)
        yield _weights(files)
    except StartupError as error:
        yield problem("model", str(error))
        return
    yield from _tokenizer(model)


def _weights(files: ModelFiles) -> Finding:
    if files.kind == "byte":
        return ok("weights", "none needed")
    if files.kind == "gguf":
        gguf_header.check_whole(files.path)
        return ok("weights", f"{gib(files.path.stat().st_size)} in one file")
    paths = safetensors_header.weight_files(files.path)
    if not paths:
        return problem("weights", f"{files.path} holds no safetensors file: fetch the model anew")
    if missing := [path.name for path in paths if not path.exists()]:
        text = f"{', '.join(missing)} missing from {files.path}: fetch the model anew"
        return problem("weights", text)
    for path in paths:
        safetensors_header.read_header(path)
    total = sum(path.stat().st_size for path in paths)
    return ok("weights", f"{gib(total)} in {len(paths)} files, all whole")


def _tokenizer(model: str) -> Iterator[Finding]:
    try:
        from services.common.text.vocabulary import build_vocabulary
        from services.tokenizer.chat_template import Conversation
        from services.tokenizer.encoder import Encoder
    except ImportError as error:
        text = f"not looked at: {error.name} missing; pip install 'shoal[tokenizer]'"
        yield warning("tokenizer", text)
        return
    try:
        vocabulary = build_vocabulary(model)
        encoder = Encoder(vocabulary)
    except StartupError as error:
        yield problem("tokenizer", str(error))
        return
    yield ok("tokenizer", f"{vocabulary.tokenizer.get_vocab_size():,} tokens")
    if vocabulary.metadata.chat_template is None:
        yield warning("chat template", "none: /v1/chat/completions will be refused")
        return
    try:
        encoder.prepare_chat(Conversation([{"role": "user", "content": "Hello"}]))
    except InvalidRequest as error:
        yield problem("chat template", f"does not render a plain conversation: {error.message}")
    else:
        yield ok("chat template", "renders")
