"""Peer: transformers' `generate` in float32. Arguments: model directory, threads."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from protocol import answer
from transformers import AutoModelForCausalLM

directory, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def generate(prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
    """All prompts are of one length, so that nothing is padded."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new,
            min_new_tokens=max_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return rows


answer(generate)
