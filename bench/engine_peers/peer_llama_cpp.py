"""Peer: llama.cpp by its Python binding, as llama-batched-bench uses it: one context, a sequence
for each prompt, and batches with a token of each. Arguments: GGUF file, threads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import llama_cpp as llama
import numpy as np
from protocol import answer

path, threads = sys.argv[1], int(sys.argv[2])
SEQUENCES = 32
LENGTH = 640  # tokens that each sequence has room for

model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
settings = llama.llama_context_default_params()
settings.n_ctx, settings.n_seq_max = SEQUENCES * LENGTH, SEQUENCES
settings.n_threads = settings.n_threads_batch = threads
context = llama.llama_init_from_model(model, settings)
vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
batch = llama.llama_batch_init(settings.n_batch, 0, 1)

Row = tuple[int, int, int, bool]  # token, position, sequence, whether the next token is wanted


def decode(rows: Sequence[Row]) -> list[int]:
    """Computes some tokens, at most a batch; the likeliest next ones of those that want one."""
    for at, (token, position, sequence, wants) in enumerate(rows):
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, wants
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
    batch.n_tokens = len(rows)
    assert llama.llama_decode(context, batch) == 0, "llama_decode failed"
    wanted = sum(wants for *_, wants in rows)
    if not wanted:
        return []
    logits = ctypes.cast(llama.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
    found = np.ctypeslib.as_array(logits, (wanted, vocabulary)).argmax(axis=1)
    return [int(token) for token in found]


def generate(prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
    llama.llama_memory_clear(llama.llama_get_memory(context), False)
    ends = [len(prompt) - 1 for prompt in prompts]
    rows = [
        (token, position, sequence, position == ends[sequence])
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    size = int(settings.n_batch)
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    outputs = [[token] for part in batches for token in decode(part)]
    for step in range(1, max_new):
        newest = decode(
            [
                (output[-1], ends[sequence] + step, sequence, True)
                for sequence, output in enumerate(outputs)
            ]
        )
        for output, token in zip(outputs, newest, strict=True):
            output.append(token)
    return outputs


llama.llama_memory_clear(llama.llama_get_memory(context), True)  # writes all of it once:
generate([[1] * 64] * SEQUENCES, 2)  # the first touch of a page is no part of a load
answer(generate)
