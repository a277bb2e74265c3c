"""Peer: CTranslate2. Arguments: converted model directory, threads."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import ctranslate2
from protocol import answer

directory, threads = sys.argv[1], int(sys.argv[2])
model = ctranslate2.Generator(directory, device="cpu", inter_threads=1, intra_threads=threads)
# The library speaks tokens, not ids.
vocabulary = json.loads((Path(directory) / "vocabulary.json").read_text(encoding="utf-8"))


def generate(prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
    """No token ends a generation."""
    results = model.generate_batch(
        [[vocabulary[token] for token in prompt] for prompt in prompts],
        max_length=max_new,
        min_length=max_new,
        sampling_topk=1,
        include_prompt_in_result=False,
        end_token=[],
    )
    return [list(result.sequences_ids[0]) for result in results]


answer(generate)
