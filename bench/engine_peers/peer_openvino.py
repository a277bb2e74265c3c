"""Peer: OpenVINO GenAI with continuous batching. Arguments: GGUF file, threads."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import answer

path, threads = sys.argv[1], int(sys.argv[2])
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 2  # GiB
scheduler.max_num_seqs = 64
scheduler.max_num_batched_tokens = 512
scheduler.enable_prefix_caching = False
pipeline = genai.ContinuousBatchingPipeline(
    path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
)


def generate(prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = max_new
    config.ignore_eos = True
    inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    results = pipeline.generate(inputs, [config] * len(inputs))
    return [list(result.m_generation_ids[0]) for result in results]


answer(generate)
