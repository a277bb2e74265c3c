"""A model's `tokenizers.Tokenizer`, whatever form its files have.

A directory brings it ready in tokenizer.json. A GGUF file brings the parts: tokens,
merges, and the *name* of the rule that cuts text into words, from which the pipeline
is built here; an unknown name is refused, because a wrong rule gives ids that the
model was not trained with. Nothing here knows of chat or of sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from services.common.errors import StartupError
from services.common.gguf_header import GgufHeader, read_header
from services.common.model_files import ModelFiles, Progress, resolve
from services.common.model_metadata import (
    BYTE_SPECIAL_TOKENS,
    ModelMetadata,
    read_json,
    read_metadata,
    token_text,
)
from services.common.text.byte_level import byte_alphabet

# How ggml numbers the kinds of tokens.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

# Word rules of Llama 3 and Qwen 2 differ only in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer with what its files say beside it.

    `special_tokens` are those a chat template can name, such as bos_token.
    """

    tokenizer: Tokenizer
    files: ModelFiles
    metadata: ModelMetadata
    special_tokens: Mapping[str, str]


def build_vocabulary(model: str, *, progress: Progress | None = None) -> Vocabulary:
    """The vocabulary of a model named as for `--model`; takes a fraction of a second.

    Raises StartupError if there is no such model or its tokenizer is not supported.
    """
    files = resolve(model, progress=progress, weights=False)
    metadata = read_metadata(files)
    if files.kind == "byte":
        names = {f"{text[1:-1]}_token": text for text in BYTE_SPECIAL_TOKENS}
        return Vocabulary(_byte_tokenizer(), files, metadata, names)
    if files.kind == "gguf":
        header = read_header(files.path)
        tokenizer = _gguf_tokenizer(header, metadata)
        return Vocabulary(tokenizer, files, metadata, _gguf_names(header, tokenizer))
    return Vocabulary(_hf_tokenizer(files.path), files, metadata, _hf_names(files.path))


def _byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    # Cut into words, as real ones are: the library keeps ten thousand of what is not cut.
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in BYTE_SPECIAL_TOKENS])
    _prepend(tokenizer, "<bos>")
    return tokenizer


def _hf_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise StartupError(f"model directory {directory} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise StartupError(f"cannot read {path}: {error}") from error
    # A prompt is never cut or padded behind its sender's back.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _hf_names(directory: Path) -> dict[str, str]:
    config = read_json(directory / "tokenizer_config.json")
    texts = {key: token_text(value) for key, value in config.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if text is not None}


def _gguf_tokenizer(header: GgufHeader, metadata: ModelMetadata) -> Tokenizer:
    kind = header.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise StartupError(
            f"{header.path} has a tokenizer of kind {kind!r}; of GGUF files only byte-level"
            " BPE ('gpt2') is supported"
        )
    tokens = header.array("tokenizer.ggml.tokens")
    types = header.array("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {text: id for id, text in enumerate(tokens) if types[id] != _UNUSED}
    pairs = [tuple(merge.split(" ")) for merge in header.array("tokenizer.ggml.merges")]
    if not vocab or any(len(pair) != 2 for pair in pairs):
        raise StartupError(f"{header.path} has a broken vocabulary")
    rule = str(header.get("tokenizer.ggml.pre", "default"))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule == "llama-bpe"))
    _set_word_rule(tokenizer, rule, header.path)
    tokenizer.decoder = decoders.ByteLevel()
    for id, text in enumerate(tokens):
        if types[id] in (_CONTROL, _USER_DEFINED):
            special = types[id] == _CONTROL
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
    if metadata.add_bos and metadata.bos_token_id is not None:
        _prepend(tokenizer, tokens[metadata.bos_token_id])
    return tokenizer


def _set_word_rule(tokenizer: Tokenizer, rule: str, path: Path) -> None:
    """How text is cut before BPE, as `tokenizer.ggml.pre` names it."""
    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        tokenizer.pre_tokenizer = gpt2
    elif rule == "smollm":
        tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), gpt2])
    elif rule in ("llama-bpe", "qwen2"):
        words = _WORDS.format(digits=r"\p{N}" if rule == "qwen2" else r"\p{N}{1,3}")
        split = pre.Split(Regex(words), behavior="isolated")
        raw = pre.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre.Sequence([split, raw])
        if rule == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise StartupError(
            f"{path} cuts words by the rule {rule!r}; supported are gpt-2, llama-bpe, qwen2"
            " and smollm"
        )


def _gguf_names(header: GgufHeader, tokenizer: Tokenizer) -> dict[str, str]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: header.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    texts = {name: tokenizer.id_to_token(id) for name, id in ids.items() if id is not None}
    return {f"{name}_token": text for name, text in texts.items() if text is not None}


def _prepend(tokenizer: Tokenizer, bos: str) -> None:
    id = tokenizer.token_to_id(bos)
    assert id is not None
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, id)]
    )
