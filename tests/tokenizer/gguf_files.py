"""GGUF files with a tokenizer and no tensors, for tests."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer

from tests.tokenizer import trained


def write_gguf(
    path: Path, rule: str, *, model: str = "gpt2", tokenizer: Tokenizer | None = None
) -> Path:
    """A file whose tokenizer has the trained byte-level vocabulary, and words cut by `rule`."""
    state = json.loads((tokenizer or trained.byte_level()).to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(rule)
    # Behind the vocabulary: a token the user defined, and one that is not used.
    writer.add_token_list([*tokens, "<think>", "<unused>"])
    writer.add_token_types([*(3 if token in special else 1 for token in tokens), 4, 5])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(vocab["<s>"])
    writer.add_eos_token_id(vocab["</s>"])
    writer.add_tensor_info("token_embd.weight", (len(tokens) + 2, 4), np.dtype("float32"), 16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path
