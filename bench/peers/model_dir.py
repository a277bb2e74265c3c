"""The embedded model's tokenizer as a directory of files that every peer reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from services.common.text.vocabulary import Vocabulary, build_vocabulary

_NUM_WORDS = 64


def write_model(directory: Path) -> Sequence[int]:
    """Writes the files, and returns ids of plain words, whose text never waits for more."""
    vocabulary = build_vocabulary("")
    vocabulary.tokenizer.save(str(directory / "tokenizer.json"))
    eos = next(iter(vocabulary.metadata.eos_token_ids))
    eos_token = vocabulary.tokenizer.id_to_token(eos)
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": eos_token,
            "eos_token": eos_token,
            "chat_template": vocabulary.metadata.chat_template,
        },
    )
    _write(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary.metadata.vocab_size,
            "max_position_embeddings": 1 << 20,
            "bos_token_id": eos,
            "eos_token_id": eos,
        },
    )
    return _words(vocabulary)


def _words(vocabulary: Vocabulary) -> Sequence[int]:
    found: list[int] = []
    for token_id in range(vocabulary.metadata.vocab_size):
        text = vocabulary.tokenizer.decode([token_id])
        if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and len(text) > 2:
            found.append(token_id)
            if len(found) == _NUM_WORDS:
                break
    return found


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
